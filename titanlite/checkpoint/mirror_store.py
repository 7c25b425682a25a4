"""Keep copies of a run's checkpoints behind a URL of fsspec's (`checkpoint.mirror`), each complete or absent.

    s3://bucket/run/
      mirror.json             whose mirror it is: id and name of the run, and which of its starts writes here
      config.toml, hub.json   of the run's folder
      step-00000500/          complete: MANIFEST.json was put there last
      step-00001000/          without MANIFEST.json no checkpoint: being copied, or what a kill has left

Object stores have no rename of folders, so the manifest is the commit: it comes after all other files are there with
their sizes, and is deleted before them. A file is hashed before it is sent and after it is fetched, against the
manifest of the save. The upload itself is checked by the store and by sizes. A fetched checkpoint is published as a
save is. Each start has its own claim in `mirror.json`, so an earlier one that still runs elsewhere notices and stops.
Uses no torch.
"""

import errno
import json
import os
import shutil
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

from titanlite.byte_size import byte_size
from titanlite.checkpoint import publish
from titanlite.checkpoint.publish import MANIFEST, FileEntry
from titanlite.checkpoint.saved_state import STATE, RankedLoss, best_of, state_from_json
from titanlite.data.remote import retried
from titanlite.errors import CheckpointError, DataError
from titanlite.file_system import MIRROR, filesystem, url_error
from titanlite.json_file import MALFORMED, as_type, parse_json
from titanlite.redact import redact_urls

BESIDE = ("config.toml", "hub.json")
"""Files of the run's folder that its mirror has, too."""
_CLAIM = "mirror.json"
_TRIES = 1  # further ones of each file: back ends repeat requests themselves, and the copy is tried again


@dataclass(frozen=True, order=True)
class Claim:
    """Whose a mirror is: id and name of a run, and the start that writes there. Of two starts the larger claim has it.

    `start` counts those that could read the mirror, and `since` those of the folder since then: what could not read it,
    and so does not know of a start elsewhere, is before that one. `token` tells starts with the same numbers apart.
    """

    id: str
    name: str
    start: int
    since: int
    token: str


class MirrorStore:
    """The checkpoints behind a URL. Errors of fsspec and its back ends are raised as they are, if not stated.

    Raises:
        DataError: the protocol is unknown, or its package is not installed.
    """

    def __init__(self, url: str) -> None:
        self._fs, path = filesystem(url, MIRROR)
        self._root, self._url = path.rstrip("/"), url

    def __str__(self) -> str:
        return redact_urls(self._url)

    def claim(self) -> Claim | None:
        """Return whose the mirror is, None if nobody's. Raise DataError if that is damaged."""
        try:
            return None if (raw := self.read(_CLAIM)) is None else cast(Claim, as_type(Claim, parse_json(raw)))
        except MALFORMED as e:
            want, fix = "what titanlite writes there", f"delete {_CLAIM} there, if it is this run's; or another URL"
            raise DataError.of("checkpoint", MIRROR, f"{self}, whose {_CLAIM} is damaged ({e})", want, fix) from e

    def require_place(self) -> None:
        """Raise DataError if neither the mirror nor the bucket or folder above it is there."""
        with suppress(PermissionError):  # credentials may be for the mirror alone
            if not (self._fs.isdir(self._root) or self._fs.isdir(self._root.rpartition("/")[0])):
                want, fix = "a URL in a bucket or folder that is there", "make the bucket or folder, or correct the URL"
                raise url_error(self._url, MIRROR, "", want, fix)

    def write_claim(self, claim: Claim) -> None:
        """Make the mirror a run's."""
        self.write(_CLAIM, json.dumps(asdict(claim)).encode())

    def read(self, name: str) -> bytes | None:
        """Return the content of a small file; None if it is not there."""
        try:
            return cast(bytes, self._fs.cat_file(self._at(name)))
        except FileNotFoundError:
            return None

    def write(self, name: str, content: bytes) -> None:
        """Write or replace a small file; a kill leaves the old one or the new one."""
        path = self._at(name)
        self._put(f"{path}.tmp", lambda tmp: self._fs.pipe_file(tmp, content))
        try:
            self._fs.mv(f"{path}.tmp", path)
        except Exception:  # object stores copy and delete, which credentials may not allow
            if self.read(name) != content:
                raise

    def complete(self) -> list[int]:
        """Return the steps with a manifest, oldest first."""
        return sorted(step for step, files in self._sizes().items() if MANIFEST in files)

    def copy(self, folder: Path, make_own: Callable[[], object]) -> bool:
        """Copy a checkpoint, unless the same is there; return whether it was not.

        `make_own` is called before each file is written; it raises if the mirror is another's.

        Raises:
            CheckpointError: the local checkpoint is damaged.
        """
        manifest, step = (folder / MANIFEST).read_bytes(), int(folder.name.removeprefix("step-"))
        entries, there = publish.entries_in(manifest, str(folder)), self._sizes().get(step, {})
        sizes = {name: entry.bytes for name, entry in entries.items()}
        if MANIFEST in there:
            with suppress(CheckpointError):  # a damaged manifest equals none
                if sizes.items() <= there.items() and self._manifest(folder.name) == entries:
                    return False
            make_own()
            self._fs.rm_file(self._at(folder.name, MANIFEST))  # of a branch that was left
        for name, entry in entries.items():
            if publish.hash_files(folder, [name])[name] != entry:
                want = f"the content that {MANIFEST} was written for: a damaged checkpoint is not copied"
                raise CheckpointError.of(str(folder), name, "another size or SHA-256", want, "move the folder away")
            make_own()
            put = partial(self._put, self._at(folder.name, name), partial(self._fs.put_file, str(folder / name)))
            retried(put, self._url, MIRROR, f"{folder.name}/{name}", _TRIES)
        there = self._sizes().get(step, {})
        if wrong := [name for name, size in sizes.items() if there.get(name) != size]:
            raise OSError(f"{wrong[0]} of {folder.name} has {there.get(wrong[0])} bytes there, not those sent")
        make_own()
        self.write(f"{folder.name}/{MANIFEST}", manifest)
        return True

    def best(self, steps: Iterable[int], key: str) -> int | None:
        """Return which of these steps is the best by the loss `key`, or None if none has it."""
        return best_of({step: self._loss(step, key) for step in steps})

    def fetch(self, steps: Iterable[int], root: Path, say: Callable[[str], object]) -> None:
        """Copy checkpoints from here into the folder `root`; publish them once all are there. `say`: tells of a copy.

        Raises:
            CheckpointError: a checkpoint here is broken, or the disk has too little room.
            DataError: the store cannot be read.
        """
        # The newest last: a folder that lacks it after a kill is refused, as it is older than the mirror.
        for tmp, entries in [self._fetch(step, root, say) for step in sorted(steps)]:
            publish.commit(tmp, entries)

    def _fetch(self, step: int, root: Path, say: Callable[[str], object]) -> tuple[Path, dict[str, FileEntry]]:
        """Copy a checkpoint into a folder that is not published yet; return this, and what its manifest lists."""
        name = publish.step_folder(root, step).name
        entries = self._tried(lambda: self._manifest(name), name)
        tmp, size = publish.begin(root, step), sum(entry.bytes for entry in entries.values())
        lacks = f"{byte_size(size)} for {name} of {self}", "make room, or set job.dump_folder to another disk"
        if (free := shutil.disk_usage(tmp).free) < size:
            raise CheckpointError.of(str(root), "free space", byte_size(free), *lacks)
        say(f"{root} has no checkpoint: takes {name} ({byte_size(size)}) from {self}")

        def get(file: str) -> None:
            try:
                self._fs.get_file(self._at(name, file), str(tmp / file))
            except OSError as e:
                if e.errno not in (errno.ENOSPC, errno.EDQUOT):
                    raise
                raise CheckpointError.of(str(root), "free space", str(e.strerror), *lacks) from e

        for file, entry in entries.items():
            for is_last in (False, True):  # a transfer may have damaged it, too
                self._tried(lambda of=file: get(of), name)
                if publish.hash_files(tmp, [file])[file] == entry:
                    break
                if is_last:
                    raise self._broken(name, f"{file} has another size or SHA-256")
            with open(tmp / file, "rb") as written:
                os.fsync(written.fileno())
        return tmp, entries

    def prune(self, keep: int, best_by: str, newest: int) -> None:
        """Delete all but the newest `keep` checkpoints (0: none) and the best by the loss `best_by`, and all leftovers.

        Checkpoints beyond `newest`, the newest of this start, are of another start: they are not counted nor deleted.
        Nothing may be in the middle of a copy. A checkpoint's manifest is deleted first.
        """
        sizes = self._sizes()
        complete = sorted(step for step, files in sizes.items() if MANIFEST in files)
        own = [step for step in complete if step <= newest]
        old = own[:-keep] if keep else []
        best = self.best(own, best_by) if old and best_by else None
        for step in (step for step in sizes if step not in complete or (step in old and step != best)):
            folder = publish.step_folder(Path(), step).name
            if MANIFEST in sizes[step]:
                self._fs.rm_file(self._at(folder, MANIFEST))
            self._fs.rm(self._at(folder), recursive=True)

    def _at(self, *names: str) -> str:
        return "/".join((self._root, *names))

    def _put(self, path: str, write: Callable[[str], object]) -> None:
        """Write to a path; where the store has folders, make the one that it lacks. A missing bucket is not made."""
        try:
            write(path)
        except Exception:  # back ends tell in different ways that a folder is missing
            folder = path.rpartition("/")[0]
            if "/" not in folder or self._fs.isdir(folder):
                raise
            self._fs.mkdir(folder, create_parents=False)
            write(path)

    def _sizes(self) -> dict[int, dict[str, int]]:
        """Return the size of each file in each folder of a step, complete or not."""
        self._fs.invalidate_cache()
        found = dict[int, dict[str, int]]()
        try:
            listed = self._fs.find(self._root, maxdepth=2, detail=True)
        except FileNotFoundError:
            return found
        for path, info in listed.items():
            folder, _, name = path.removeprefix(self._root).lstrip("/").partition("/")
            if (step := publish.step_named(folder)) is not None and name:
                found.setdefault(step, {})[name] = info["size"]
        return found

    def _manifest(self, name: str) -> dict[str, FileEntry]:
        return publish.entries_in(self._fs.cat_file(self._at(name, MANIFEST)), f"{self}/{name}")

    def _loss(self, step: int, key: str) -> RankedLoss | None:
        """Return a loss that a checkpoint here has measured, or None; a damaged one has none."""
        with suppress(*MALFORMED):
            raw = self.read(f"{publish.step_folder(Path(), step).name}/{STATE}") or b""
            return state_from_json(parse_json(raw)).measured(key)
        return None

    def _tried(self, action: Callable[[], Any], name: str) -> Any:
        try:
            return retried(action, self._url, MIRROR, name)
        except FileNotFoundError as e:
            raise self._broken(name, f"a file of it is missing ({e})") from e

    def _broken(self, name: str, why: str) -> CheckpointError:
        want, fix = f"the files that its {MANIFEST} lists", "delete it there: the start then takes another"
        return CheckpointError.of(str(self), name, f"broken: {why}", want, fix)
