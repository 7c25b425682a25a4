"""Keep copies of a run's checkpoints behind a URL of fsspec's (`checkpoint.mirror`), each complete or absent.

    s3://bucket/run/
      mirror.json             whose mirror it is: id and name of the run, and which of its starts writes here
      config.toml, hub.json   of the run's folder
      step-00000500/          complete: MANIFEST.json was written last
      step-00001000/          without MANIFEST.json no checkpoint: being copied, or what a kill has left

Object stores have no rename, so the manifest is the commit: it is written after all other files are there with their
sizes, and deleted before them. A file is hashed before it is sent and after it is fetched, against the manifest of the
save. The upload itself is checked by the store and by sizes. A fetched checkpoint is published as a save is. Each start
writes its own token to `mirror.json`, so an earlier one that still runs elsewhere notices and stops. Uses no torch.
"""

import json
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

from titanlite.byte_size import byte_size
from titanlite.checkpoint import publish
from titanlite.checkpoint.publish import MANIFEST, FileEntry
from titanlite.checkpoint.saved_state import STATE, best_of, state_from_json
from titanlite.data.remote import retried
from titanlite.errors import CheckpointError, DataError
from titanlite.file_system import MIRROR, filesystem
from titanlite.json_file import MALFORMED, as_type, parse_json
from titanlite.redact import redact_urls

BESIDE = ("config.toml", "hub.json")
"""Files of the run's folder that its mirror has, too."""
_CLAIM = "mirror.json"


@dataclass(frozen=True)
class Claim:
    """Whose a mirror is: the id of a run, its name, and a token of the start that writes there."""

    id: str
    name: str
    start: str


class MirrorStore:
    """The checkpoints behind a URL. Errors of fsspec and its back ends are raised as they are, if not stated.

    Raises:
        DataError: the protocol is unknown, or its package is not installed.
    """

    def __init__(self, url: str) -> None:
        self._fs, path = filesystem(url, MIRROR)
        self._root, self._url = path.rstrip("/"), url
        self._sent: set[tuple[str, FileEntry]] = set()  # files of the copy that a failure has interrupted

    def __str__(self) -> str:
        return redact_urls(self._url)

    def claim(self) -> Claim | None:
        """Return whose the mirror is; None if nobody has written there. Raise DataError if that is damaged."""
        try:
            return cast(Claim, as_type(Claim, parse_json(raw))) if (raw := self.read(_CLAIM)) else None
        except MALFORMED as e:
            want, fix = "what titanlite writes there", f"delete {_CLAIM} there, if it is this run's; or another URL"
            raise DataError.of("checkpoint", MIRROR, f"{self}, whose {_CLAIM} is damaged ({e})", want, fix) from e

    def write_claim(self, claim: Claim) -> None:
        """Make the mirror a run's."""
        self.write(_CLAIM, json.dumps(asdict(claim)).encode())

    def read(self, name: str) -> bytes | None:
        """Return the content of a small file; None if it is not there, or empty, as a kill may leave it."""
        try:
            return cast(bytes, self._fs.cat_file(self._at(name))) or None
        except FileNotFoundError:
            return None

    def write(self, name: str, content: bytes) -> None:
        """Write a small file at once."""
        self._put(self._at(name), lambda path: self._fs.pipe_file(path, content))

    def complete(self) -> list[int]:
        """Return the steps with a manifest, oldest first."""
        return sorted(step for step, files in self._sizes().items() if files.get(MANIFEST))

    def copy(self, folder: Path, require: Callable[[], object]) -> bool:
        """Copy a checkpoint, unless the same is there; return whether it was not.

        After a failure the next call goes on with files not yet sent. `require` is called before the manifest is
        written; it raises if the mirror is another's.

        Raises:
            CheckpointError: the local checkpoint is damaged.
        """
        manifest, step = (folder / MANIFEST).read_bytes(), int(folder.name.removeprefix("step-"))
        entries, there = publish.entries_in(manifest, str(folder)), self._sizes().get(step, {})
        if MANIFEST in there:
            with suppress(CheckpointError):  # a damaged manifest equals none
                is_whole = all(there.get(name) == entry.bytes for name, entry in entries.items())
                if is_whole and self._manifest(folder.name) == entries:
                    return False
            self._fs.rm_file(self._at(folder.name, MANIFEST))  # of a branch that was left
        for name, entry in entries.items():
            key = name, entry
            if key in self._sent and there.get(name) == entry.bytes:
                continue
            if publish.hash_files(folder, [name])[name] != entry:
                want = f"the content that {MANIFEST} was written for: a damaged checkpoint is not copied"
                raise CheckpointError.of(str(folder), name, "another size or SHA-256", want, "move the folder away")
            file = str(folder / name)
            self._put(self._at(folder.name, name), lambda path, file=file: self._fs.put_file(file, path))
            self._sent.add(key)
        there = self._sizes().get(step, {})
        if wrong := [name for name, entry in entries.items() if there.get(name) != entry.bytes]:
            self._sent.clear()
            raise OSError(f"{wrong[0]} of {folder.name} has {there.get(wrong[0])} bytes there, not those sent")
        require()
        self.write(f"{folder.name}/{MANIFEST}", manifest)
        self._sent.clear()
        return True

    def fetch(self, step: int, root: Path, say: Callable[[str], object]) -> None:
        """Copy the checkpoint of a step from here into the folder `root`, and publish it. `say`: tells of the copy.

        Raises:
            CheckpointError: the checkpoint here is broken, or the disk has too little room.
            DataError: the store cannot be read.
        """
        name = publish.step_folder(root, step).name
        entries = self._tried(lambda: self._manifest(name), name)
        tmp, size = publish.begin(root, step), sum(entry.bytes for entry in entries.values())
        if (free := shutil.disk_usage(tmp).free) < size:
            want, fix = f"{byte_size(size)} for {name} of {self}", "make room, or set job.dump_folder to another disk"
            raise CheckpointError.of(str(root), "free space", byte_size(free), want, fix)
        say(f"{root} has no checkpoint: takes {name} ({byte_size(size)}) from {self}")
        for file, entry in entries.items():
            for is_last in (False, True):  # a transfer may have damaged it, too
                self._tried(lambda of=file: self._fs.get_file(self._at(name, of), str(tmp / of)), name)
                if publish.hash_files(tmp, [file])[file] == entry:
                    break
                if is_last:
                    raise self._broken(name, f"{file} has another size or SHA-256")
            with open(tmp / file, "rb") as written:
                os.fsync(written.fileno())
        publish.commit(tmp, entries)

    def prune(self, keep: int, best_by: str) -> None:
        """Delete all but the newest `keep` checkpoints (0: none) and the best by the loss `best_by`, and all leftovers.

        Nothing may be in the middle of a copy. A checkpoint's manifest is deleted first.
        """
        sizes = self._sizes()
        complete = sorted(step for step, files in sizes.items() if files.get(MANIFEST))
        old = complete[:-keep] if keep else []
        best = best_of({step: self._loss(step, best_by) for step in complete}) if old and best_by else None
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
        except FileNotFoundError:
            folder = path.rpartition("/")[0]
            if "/" not in folder:
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

    def _loss(self, step: int, key: str) -> float | None:
        """Return a loss that a checkpoint here has measured, or None; a damaged one has none."""
        with suppress(*MALFORMED):
            raw = self.read(f"{publish.step_folder(Path(), step).name}/{STATE}") or b""
            return state_from_json(parse_json(raw)).losses.get(key)
        return None

    def _tried(self, action: Callable[[], Any], name: str) -> Any:
        try:
            return retried(action, self._url, MIRROR, name)
        except FileNotFoundError as e:
            raise self._broken(name, f"a file of it is missing ({e})") from e

    def _broken(self, name: str, why: str) -> CheckpointError:
        want, fix = f"the files that its {MANIFEST} lists", "delete it there: the start then takes the one before it"
        return CheckpointError.of(str(self), name, f"broken: {why}", want, fix)
