"""A folder that several processes want and one makes.

It is made under a temporary name beside its place and renamed when it is complete, so it is whole or absent. A lock on
a file beside it lets one process work while the others wait; the system drops the lock when its holder dies, however
it dies, and the next one clears away what was left and starts over. The holder writes how far it is into the lock file,
so that whichever process was asked to show progress can.

Several hosts may share the folder where the file system has locks (NFS since version 4, Lustre mounted with `flock`).
"""

import fcntl
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from titanlite.data.progress import Progress

_POLL_SECONDS = 0.1


def make_once(folder: Path, make: Callable[[Path, Callable[[int], None]], None], progress: Progress, total: int | None):
    """Make a folder if it is not there, or wait until another process has.

    Args:
        folder: what is wanted; its parent exists.
        make: called with an empty folder to fill, and a function to call with the bytes read so far.
        progress: shows the work, of this process or of the one that is waited for.
        total: bytes to read, if known.

    Raises:
        OSError: the folder's place cannot be written, or has no locks.
    """
    if folder.exists():
        return
    with progress, _lock(folder.with_name(folder.name + ".lock"), lambda done: progress.update(done, total)) as lock:
        if folder.exists():
            return
        for stale in folder.parent.glob(folder.name + ".tmp-*"):
            shutil.rmtree(stale)
        unfinished = folder.with_name(f"{folder.name}.tmp-{os.getpid()}")
        unfinished.mkdir()

        def report(done: int) -> None:
            progress.update(done, total)
            os.pwrite(lock, b"%-20d" % done, 0)

        try:
            make(unfinished, report)
            unfinished.rename(folder)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)


@contextmanager
def _lock(path: Path, waiting: Callable[[int], None]) -> Iterator[int]:
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                waiting(int(os.pread(file, 20, 0) or 0))
                time.sleep(_POLL_SECONDS)
        yield file
    finally:
        os.close(file)
