"""Let one process make a folder that several processes need.

The folder is made under another name and renamed when it is complete, so it is either complete or absent. A lock on a
file beside it lets one process work while the others wait. The system releases the lock when its holder dies, and the
next process continues from the content left behind. The holder writes its progress into the lock file, so that any
process can show it. If it fails, it writes the reason: waiting processes with equal limits then fail without a try.

Several hosts may share the folder if the file system has locks (NFS since version 4, Lustre mounted with `flock`).
"""

import fcntl
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from titanlite.data.progress import Progress
from titanlite.data.shard_writer import PROGRESS, read_made
from titanlite.durable import open_plain
from titanlite.errors import DataError
from titanlite.redact import redact

POLL_SECONDS = 0.1
_SAID_BYTES = 1 << 12


def make_once(
    folder: Path,
    make: Callable[[Path, Callable[[int], None]], None],
    terms: str,
    progress: Progress,
    total: int | None,
    on_wait: Callable[[], object] = lambda: None,
) -> None:
    """Make a folder if it does not exist, or wait until another process has made it.

    Args:
        folder: the folder to make; its parent exists.
        make: called with the folder to fill, which is empty or has the content left by an earlier process, and with a
            function to call with the bytes read so far.
        terms: the settings that decide whether `make` fails; waiting processes with equal terms fail, too.
        progress: shows how many of `total` bytes (None: not known) were read, here or in the process that works.
        on_wait: called repeatedly while another process works.

    Raises:
        DataError: raised by `make`, in this process or in the one that it waited for.
        OSError: the parent of the folder cannot be written, or its file system has no locks.
    """
    if folder.exists():
        return
    failed = failed_start(terms)

    def waiting(done: int | None) -> None:
        on_wait()
        if done is not None:
            progress.update(done, total)

    with progress, _lock(folder, waiting) as (lock, has_waited):
        if folder.exists():
            return
        if has_waited and (received := _read_lock(lock)).startswith(failed):
            raise DataError(received.removeprefix(failed).rstrip())
        os.truncate(lock, _SAID_BYTES)
        os.pwrite(lock, b" " * _SAID_BYTES, 0)  # reserve room for a message: the disk may be full later
        unfinished = unfinished_of(folder)
        if unfinished.is_symlink() or unfinished.is_file():
            unfinished.unlink()
        elif unfinished.exists() and not (unfinished / PROGRESS).exists():
            shutil.rmtree(unfinished)
        unfinished.mkdir(exist_ok=True)

        def report(done: int) -> None:
            progress.update(done, total)
            os.pwrite(lock, b"%-20d" % done, 0)

        try:
            make(unfinished, report)
            unfinished.rename(folder)
        except DataError as e:
            with suppress(OSError):
                _write_failure(lock, terms, e)
            raise
        finally:
            if read_made(unfinished) is None:
                shutil.rmtree(unfinished, ignore_errors=True)


def unfinished_of(folder: Path) -> Path:
    """Return the path under which a folder is made until it is complete."""
    return folder.with_name(f"{folder.name}.unfinished")


def lock_of(folder: Path) -> Path:
    """Return the path of the lock file of a folder."""
    return folder.with_name(f"{folder.name}.lock")


def failed_start(terms: str) -> str:
    """Return the text with which a lock file begins after a failure; the error message follows it."""
    return redact(f"failed, {terms}: ")


def say_failed(folder: Path, terms: str, error: object) -> None:
    """Write the reason why a folder could not be made into its lock file, unless another process holds the lock."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _lock_file(folder, os.O_RDWR | os.O_CREAT) as file, suppress(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _write_failure(file, terms, error)


def maker_failed(folder: Path, terms: str) -> str | None:
    """Return None while a process makes a folder; else the last error message recorded with equal `terms`, or "".

    Raises:
        OSError: the lock file cannot be read.
    """
    with suppress(FileNotFoundError), _lock_file(folder, os.O_RDONLY) as file:
        if not _is_free(file):
            return None
        received, start = _read_lock(file), failed_start(terms)
        return received.removeprefix(start).rstrip() if received.startswith(start) else ""
    return ""


@contextmanager
def _lock_file(folder: Path, flags: int) -> Iterator[int]:
    file = open_plain(lock_of(folder), flags)
    try:
        yield file
    finally:
        os.close(file)


def _is_free(lock: int) -> bool:
    """Return whether no process holds the lock. Tries a shared lock, as others may test at the same moment."""
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    fcntl.flock(lock, fcntl.LOCK_UN)
    return True


@contextmanager
def _lock(folder: Path, waiting: Callable[[int | None], None]) -> Iterator[tuple[int, bool]]:
    has_waited = False
    with _lock_file(folder, os.O_RDWR | os.O_CREAT) as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                has_waited |= not _is_free(file)
                received = _read_lock(file).strip()
                waiting(int(received) if received.isdigit() else None)
                time.sleep(POLL_SECONDS)
        yield file, has_waited


def _write_failure(lock: int, terms: str, error: object) -> None:
    said = redact(f"{failed_start(terms)}{error}").encode(errors="backslashreplace")
    os.pwrite(lock, said.ljust(_SAID_BYTES), 0)


def _read_lock(lock: int) -> str:
    return os.pread(lock, os.fstat(lock).st_size, 0).decode(errors="replace")
