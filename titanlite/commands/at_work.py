"""Tell a person who waits that a command is at work: a line on stderr, once it has taken some seconds."""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_QUIET_S = 2.0


@contextmanager
def at_work(what: str, quiet_s: float = _QUIET_S) -> Iterator[None]:
    """Say what is being done where it takes longer than `quiet_s` seconds."""
    timer = threading.Timer(quiet_s, print, (f"{what} …",), {"file": sys.stderr, "flush": True})
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
