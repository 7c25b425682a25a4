"""Publish a checkpoint folder so that a reader sees all of it or none of it.

    step-00000120.tmp/        being written; never loaded, never counted, removed at the next start
    step-00000120/            complete: MANIFEST.json was written last, then the folder was renamed
    step-00000120.deleting/   being removed; never loaded, never counted

The rename is the commit: after a kill at any instant the previous checkpoint is still complete. The manifest lists the
size and SHA-256 of every file, because a file of tensors with a flipped bit would load without an error. It protects
against damage, not against a person with write access, who can change a file and the manifest.

A checkpoint is flat: plain files with plain names, no subfolders and no links, so no name in a manifest can lead out of
the folder. Hashing costs about a second per 2 GB and core. Each rank therefore hashes the files that it wrote
(`hash_files`), several at a time, and the work of rank 0 (`commit`) does not grow with the model. This module uses
neither torch nor ranks.
"""

import hashlib
import json
import logging
import os
import re
import shutil
import stat
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

from titanlite.durable import read_plain, write_durably
from titanlite.errors import CheckpointError, Problem, describe
from titanlite.json_file import MALFORMED, parse_json

MANIFEST = "MANIFEST.json"
THREADS = 4  # per rank, to compute checksums and to write files of tensors
_STEP = re.compile(r"step-([0-9]{8,})")
_SEEN = re.compile(r"seen-[0-9a-f]{8}\.tmp")  # made by `Checkpoints.check_shared`
_STALE = re.compile(rf"step-[0-9]{{8,}}\.(tmp|deleting)|{_SEEN.pattern}")
_FILE = re.compile(r"[A-Za-z0-9_.][A-Za-z0-9_.-]*")
_ASIDE = "move this checkpoint's folder away or delete it"

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class FileEntry:
    """The manifest's entry of one file."""

    bytes: int
    sha256: str


def step_folder(root: Path, step: int) -> Path:
    """Return the path that a complete checkpoint of `step` has."""
    return root / f"step-{step:08d}"


def step_of(folder: Path) -> int | None:
    """Return the step if `folder` is a complete checkpoint, else None."""
    step = step_named(folder.resolve().name)
    return step if step is not None and _has_manifest(folder) else None


def step_named(name: str) -> int | None:
    """Return the step of a checkpoint's folder, by its name; None if it is not named so."""
    named = _STEP.fullmatch(name)
    return int(named[1]) if named else None


def hash_files(folder: Path, names: Iterable[str]) -> dict[str, FileEntry]:
    """Read the files `names` of a folder, and return the manifest's entry for each."""
    found = list(names)
    sums = _sha256s([folder / name for name in found])
    return {name: FileEntry((folder / name).stat().st_size, sha256) for name, sha256 in zip(found, sums, strict=True)}


def commit(tmp: Path, entries: Mapping[str, FileEntry]) -> Path:
    """Write the manifest, make everything durable and rename `tmp` to its final name.

    One process calls this after all writers have closed and synced their files. `entries` lists all these files.

    Raises:
        CheckpointError: the checkpoint exists already, or the folder does not hold exactly the files of `entries`.
    """
    final = tmp.with_suffix("")
    if os.path.lexists(final):
        raise _exists(final)
    _check_files(tmp, entries)
    manifest = {"version": 1, "files": {name: asdict(entry) for name, entry in entries.items()}}
    write_durably(tmp / MANIFEST, json.dumps(manifest, indent=1))
    _fsync(tmp)
    os.rename(tmp, final)
    _fsync(final.parent)
    return final


def begin(root: Path, step: int) -> Path:
    """Make the empty folder `step-<step>.tmp`, into which a save writes.

    Raises:
        CheckpointError: a checkpoint of this step exists already. It is never overwritten.
    """
    final = step_folder(root, step)
    if os.path.lexists(final):
        raise _exists(final)
    tmp = final.with_suffix(".tmp")
    if tmp.exists():  # an earlier attempt of this process failed
        shutil.rmtree(tmp)
    tmp.mkdir(parents=True)
    return tmp


def verify(folder: Path, *, share: int = 0, shares: int = 1, largest: int | None = None) -> None:
    """Compare a checkpoint with its manifest.

    Args:
        folder: the checkpoint.
        share: number of this process among the `shares` processes that split the hashing. Each process checks the names
            and sizes of all files.
        shares: number of processes that split the hashing.
        largest: the most bytes of a file that is hashed; of larger files only the size is checked. None: no limit.

    Raises:
        CheckpointError: a file is missing, altered or not a plain file of this checkpoint (all are listed), or cannot
            be read.
    """
    entries = _manifest(folder)
    hashed = [name for name, entry in entries.items() if largest is None or entry.bytes <= largest]
    by_size = sorted(hashed, key=lambda name: (-entries[name].bytes, name))
    own = by_size[share::shares]
    try:
        _check_files(folder, entries)
        sums = zip(own, _sha256s([folder / name for name in own]), strict=True)
    except OSError as e:
        raise cannot_be_read(str(folder), e) from e
    altered = [name for name, sha256 in sums if sha256 != entries[name].sha256]
    if altered:
        wrong = [Problem(n, "another SHA-256", f"the content that {MANIFEST} was written for", _ASIDE) for n in altered]
        raise CheckpointError(describe(str(folder), wrong))


def complete_steps(root: Path) -> list[int]:
    """Return the steps with a complete checkpoint, oldest first. Raise CheckpointError if a folder is unreadable."""
    try:
        steps = {int(p.name.removeprefix("step-")) for p in _named_as_steps(root) if _has_manifest(p)}
    except OSError as e:
        raise cannot_be_read("checkpoints", e) from None
    return sorted(step for step in steps if step_folder(root, step).is_dir())


def partial_folders(root: Path) -> list[str]:
    """Return the folders that are named like checkpoints but are incomplete, for instance after an aborted copy."""
    whole = {step_folder(root, step).name for step in complete_steps(root)}
    return sorted(p.name for p in _named_as_steps(root) if p.name not in whole)


def prune(root: Path, keep: int, spare: Collection[int | None] = ()) -> list[int]:
    """Delete all but the newest `keep` complete checkpoints and the steps `spare`.

    With a `keep` of 0 none is deleted. Return the deleted steps, oldest first.
    """
    if keep == 0:
        return []
    old = [step for step in complete_steps(root)[:-keep] if step not in spare]
    for step in old:
        doomed = step_folder(root, step)
        hidden = doomed.with_suffix(".deleting")
        os.rename(doomed, hidden)  # atomic: from here on it is not a checkpoint
        _delete(hidden)
    return old


def remove_stale(root: Path) -> list[str]:
    """Remove folders that a killed process left partly written or deleted. Return their names. One process calls it."""
    stale = _stale(root)
    for path in stale:
        _delete(path)
    return [p.name for p in stale]


def stale_bytes(root: Path) -> int:
    """Return the bytes that `remove_stale` would free."""
    return sum(f.lstat().st_size for path in _stale(root) for f in path.rglob("*") if f.is_file())


def _stale(root: Path) -> list[Path]:
    places = ((root, _STALE), (root.parent, _SEEN))
    return sorted(p for at, name in places if at.is_dir() for p in at.iterdir() if name.fullmatch(p.name))


def _named_as_steps(root: Path) -> list[Path]:
    try:
        return [p for p in root.iterdir() if _STEP.fullmatch(p.name)]
    except FileNotFoundError:
        return []


def _has_manifest(folder: Path) -> bool:
    try:
        return stat.S_ISREG((folder / MANIFEST).stat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False


def _manifest(folder: Path) -> dict[str, FileEntry]:
    try:
        raw = read_plain(folder / MANIFEST)
    except FileNotFoundError as e:
        raise _no_manifest(str(folder), e) from None
    except OSError as e:
        raise cannot_be_read(str(folder), e) from None
    return entries_in(raw, str(folder))


def entries_in(manifest: bytes, folder: str) -> dict[str, FileEntry]:
    """Return what the manifest of the checkpoint `folder` lists. Raise CheckpointError if a name leads out of it."""
    try:
        files = cast(dict[str, Any], cast(dict[str, Any], parse_json(manifest))["files"])
        entries = {name: FileEntry(int(e["bytes"]), str(e["sha256"])) for name, e in files.items()}
    except MALFORMED as e:
        raise _no_manifest(folder, e) from None
    bad = [n for n in entries if not _FILE.fullmatch(n) or n in (".", "..", MANIFEST)]
    if bad:
        want = "plain file names inside the checkpoint"
        raise CheckpointError(describe(folder, [Problem(f"{MANIFEST} lists", repr(n), want, _ASIDE) for n in bad]))
    return entries


def _no_manifest(folder: str, e: Exception) -> CheckpointError:
    saw, want = f"{type(e).__name__}: {e}", "the manifest that titanlite writes"
    return CheckpointError.of(folder, MANIFEST, saw, want, _ASIDE)


def _check_files(folder: Path, entries: Mapping[str, FileEntry]) -> None:
    """Refuse a folder unless it holds exactly the files of `entries`, with their sizes; it may have a manifest, too."""
    found: dict[str, int] = {}
    problems: list[Problem] = []
    for item in sorted(os.scandir(folder), key=lambda i: i.name):
        if not item.is_file(follow_symlinks=False):
            kind = "a link" if item.is_symlink() else "not a file"
            problems.append(Problem(item.name, kind, "plain files only", f"remove {folder / item.name}"))
        elif item.name in entries:
            found[item.name] = item.stat().st_size
        elif item.name != MANIFEST:
            fix = f"remove {folder / item.name}"
            problems.append(Problem(item.name, "not of this checkpoint", "the files that were saved, only", fix))
    listed = {p.where for p in problems}
    for name, entry in entries.items():
        if name not in found and name not in listed:
            fix = f"{_ASIDE}; if it was just being saved: every host must write to the same file system"
            problems.append(Problem(name, "missing", f"a file of {entry.bytes} bytes", fix))
        elif name in found and found[name] != entry.bytes:
            problems.append(Problem(name, f"{found[name]} bytes", f"{entry.bytes} bytes", _ASIDE))
    if problems:
        raise CheckpointError(describe(str(folder), problems))


def cannot_be_read(where: str, e: OSError) -> CheckpointError:
    """Return the error for a file that the system cannot read. The file itself may be undamaged."""
    want, fix = "folders and files that can be read", "make it readable, or start as the user that trained"
    return CheckpointError.of(where, e.filename or "a file", e.strerror or str(e), want, fix)


def _exists(final: Path) -> CheckpointError:
    fix = "set job.name to a new name, or move the existing checkpoint away"
    want = "a step that has not been saved: a checkpoint is never overwritten"
    return CheckpointError.of(str(final.parent), final.name, "exists already", want, fix)


def _delete(path: Path) -> None:
    """Remove a folder named `.tmp` or `.deleting`. A failure is only logged, because readers ignore such folders."""
    try:
        path.unlink() if path.is_symlink() else shutil.rmtree(path)
    except OSError as e:  # for instance a file that another process still has open on NFS
        log.warning("could not delete all of %s (%s); the next start tries again", path, e)


def _fsync(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _sha256s(paths: Sequence[Path]) -> list[str]:
    """Hash files in parallel threads: hashing is slower than the disk, and releases the interpreter lock."""
    with ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(_sha256, paths))


def _sha256(path: Path) -> str:
    with open(path, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()
