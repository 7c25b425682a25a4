"""Print a line on stderr when a part of a command takes long, so that the user knows why to wait."""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_QUIET_S = 0.5


@contextmanager
def at_work(what: str, quiet_s: float = _QUIET_S) -> Iterator[None]:
    """Print `what` on stderr if the body of the `with` statement takes longer than `quiet_s` seconds."""
    timer = threading.Timer(quiet_s, print, (f"{what} …",), {"file": sys.stderr, "flush": True})
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
