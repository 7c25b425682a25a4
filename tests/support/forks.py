"""Processes forked from a test: a tenth of a second each, where a fresh interpreter that imports torch costs six.

It is safe while the parent has no thread pool, which conftest.py ensures.
"""

import contextlib
import faulthandler
import gc
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

LAUNCHER_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""What torchrun tells a rank."""


def fork(body: Callable[[], int], log: Path) -> int:
    """Call `body()` in a process of its own, which ends with what it returns, or with 1 if it raises.

    Args:
        body: its return value is the exit code.
        log: takes stdout and stderr.

    Returns:
        The process id; the caller waits for it.
    """
    with forks_beside_threads():
        pid = os.fork()
    if pid:
        return pid
    gc.freeze()  # what there was before is not looked through, and so not copied
    try:
        print_to(log)
        faulthandler.enable(file=2)
        os._exit(body())
    except BaseException:
        os.write(2, traceback.format_exc().encode())
        os._exit(1)


@contextlib.contextmanager
def forks_beside_threads() -> Iterator[None]:
    """Python 3.12 warns of a fork beside threads; torch's own start-up threads are idle here."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*multi-threaded, use of fork", category=DeprecationWarning)
        yield


def print_to(log: Path) -> None:
    """Past pytest's capture."""
    fd = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    sys.stdout = sys.stderr = sys.__stderr__ = os.fdopen(1, "w", buffering=1)
