"""Publish a checkpoint folder so that a reader sees all of it or none of it.

    step-00000120.tmp/        being written; never loaded, never counted, removed at the next start
    step-00000120/            complete: MANIFEST.json was written last, then the folder was renamed
    step-00000120.deleting/   being removed; never loaded, never counted

The rename is the commit: a kill at any instant leaves the checkpoint before it. The manifest has the size and SHA-256
of every file, because a flipped bit in a tensor file loads without a word. It protects against damage, not against a
person who can write to the folder and may rewrite both.

A checkpoint is flat: plain files with plain names, no subfolders and no links, so no name in a manifest can lead out of
it. Hashing costs about a second per 2 GB and core; each rank therefore hashes what it wrote (`hash_files`), several
files at a time, and what is left to rank 0 (`commit`) does not grow with the model. This module knows nothing of torch
or of ranks.
"""

import hashlib
import json
import logging
import os
import re
import shutil
import stat
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

from titanlite.durable import read_plain, write_durably
from titanlite.errors import CheckpointError, Problem, describe
from titanlite.json_file import parse_json

MANIFEST = "MANIFEST.json"
THREADS = 4  # of a rank, for what holds one up: checksums, and files that are written
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
    """Return the folder of the complete checkpoint of `step`."""
    return root / f"step-{step:08d}"


def step_of(folder: Path) -> int | None:
    """Return the step of a complete checkpoint; None of any other folder."""
    named = _STEP.fullmatch(folder.resolve().name)
    return int(named[1]) if named and _has_manifest(folder) else None


def hash_files(folder: Path, names: Iterable[str]) -> dict[str, FileEntry]:
    """Return the manifest's entry of each of these files, which are read back."""
    found = list(names)
    sums = _sha256s([folder / name for name in found])
    return {name: FileEntry((folder / name).stat().st_size, sha256) for name, sha256 in zip(found, sums, strict=True)}


def commit(tmp: Path, entries: Mapping[str, FileEntry]) -> Path:
    """Write the manifest, make everything durable and rename `tmp` to its final name.

    One process calls it, when every writer has closed and synced its files: exactly those of `entries`.

    Raises:
        CheckpointError: the checkpoint exists already, or the folder does not hold what was written.
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
    """Make an empty `step-<step>.tmp` to write into.

    Raises:
        CheckpointError: the checkpoint of this step exists already. It is never overwritten.
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
        share: the part of the files to hash, so that processes can share the reading; names and sizes are all checked.
        shares: number of parts.
        largest: bytes of the largest file to hash; larger ones are compared by size alone. None: all.

    Raises:
        CheckpointError: names every file that is missing, altered or not a plain file of this checkpoint, or the first
            that cannot be read.
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
    """Return the steps with a complete checkpoint, oldest first; raise CheckpointError if a folder is unreadable."""
    try:
        steps = {int(p.name.removeprefix("step-")) for p in _named_as_steps(root) if _has_manifest(p)}
    except OSError as e:
        raise cannot_be_read("checkpoints", e) from None
    return sorted(step for step in steps if step_folder(root, step).is_dir())


def partial_folders(root: Path) -> list[str]:
    """Return folders that are named as checkpoints but are not complete, as of a copy that broke off."""
    whole = {step_folder(root, step).name for step in complete_steps(root)}
    return sorted(p.name for p in _named_as_steps(root) if p.name not in whole)


def prune(root: Path, keep: int, spare: int | None = None) -> list[int]:
    """Delete all but the newest `keep` complete checkpoints, 0 for all, and return the deleted steps, oldest first.

    The step that the run was resumed from is spared, too: it is the last one known to load.
    """
    if keep == 0:
        return []
    old = [step for step in complete_steps(root)[:-keep] if step != spare]
    for step in old:
        doomed = step_folder(root, step)
        hidden = doomed.with_suffix(".deleting")
        os.rename(doomed, hidden)  # from here on it is not a checkpoint, in one instant
        _delete(hidden)
    return old


def remove_stale(root: Path) -> list[str]:
    """Remove what a killed process left half written or half deleted, and name it. Call on one process, at start."""
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
    """Read the manifest, and refuse names that lead out of the folder."""
    try:
        raw = cast(object, parse_json(read_plain(folder / MANIFEST)))
        files = cast(dict[str, Any], cast(dict[str, Any], raw)["files"])
        entries = {name: FileEntry(int(e["bytes"]), str(e["sha256"])) for name, e in files.items()}
    except (OSError, ValueError, LookupError, TypeError, AttributeError, OverflowError) as e:
        if isinstance(e, OSError) and not isinstance(e, FileNotFoundError):
            raise cannot_be_read(str(folder), e) from None
        raise CheckpointError.of(
            str(folder), MANIFEST, f"{type(e).__name__}: {e}", "the manifest that titanlite writes", _ASIDE
        ) from None
    bad = [n for n in entries if not _FILE.fullmatch(n) or n in (".", "..", MANIFEST)]
    if bad:
        want = "plain file names inside the checkpoint"
        raise CheckpointError(describe(str(folder), [Problem(f"{MANIFEST} lists", repr(n), want, _ASIDE) for n in bad]))
    return entries


def _check_files(folder: Path, entries: Mapping[str, FileEntry]) -> None:
    """Refuse a folder that does not hold exactly the files of `entries`, at their sizes."""
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
    """Return the error for files that the system cannot read, and that may be whole."""
    want, fix = "folders and files that can be read", "make it readable, or start as the user that trained"
    return CheckpointError.of(where, e.filename or "a file", e.strerror or str(e), want, fix)


def _exists(final: Path) -> CheckpointError:
    fix = "set job.name to a new name, or move the existing checkpoint away"
    want = "a step that has not been saved: a checkpoint is never overwritten"
    return CheckpointError.of(str(final.parent), final.name, "exists already", want, fix)


def _delete(path: Path) -> None:
    """Remove a folder that no longer counts. Its name already says so, hence a failure need not end the run."""
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
    """Hash files side by side: arithmetic takes longer than the disk, and leaves the interpreter free."""
    with ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(_sha256, paths))


def _sha256(path: Path) -> str:
    with open(path, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()
