"""Guard standard output and standard error: they tell no secret, and nobody else's text commands the terminal.

Names of files, folders, keys and groups come from others, as the lines of a file do. What a terminal obeys in them is
escaped as `repr` writes it, and so are the controls that show text in another order than it has; newlines and tabs are
layout. Colours and bars, which are drawn on purpose, are written to `drawn`. Bars of other libraries (tqdm's) are known
by their moves, with which they get to lines that are empty or their own, and to no other text of the stream.
"""

import io
import os
import re
import sys
from collections.abc import Callable
from typing import Any, TextIO

from titanlite.redact import redact

OUTPUT = "standard output"
"""The file that an OSError of standard output names."""
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_MOVE = re.compile(r"\n+\Z|(?:\x1b\[A)+\Z|\r(?: *\r\Z)?(?=[^\n]*\Z)")  # alone, or before a line in a line's place


class _Drawn:
    """A stream as it is for who draws on it; secrets are kept out all the same."""

    def __init__(self, stream: TextIO, write: Callable[[str], int]) -> None:
        self._stream, self.write = stream, write

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def escaped(text: str) -> str:
    """Return a text without what a terminal obeys, except newlines and tabs."""
    return _CONTROL.sub(lambda found: repr(found[0])[1:-1], text)


def one_line(text: str) -> str:
    """Return a name without what a terminal obeys."""
    return escaped(text).replace("\n", r"\n").replace("\t", r"\t")


def drawn(stream: TextIO) -> Any:
    """Return a guarded stream for colours and bars, whose texts the caller escapes; any other stream as it is."""
    return getattr(stream, "drawn", stream)


def guard_streams() -> None:
    """Guard both streams; what was closed by who started this process, as cron does, takes everything."""
    for number, name in ((1, "stdout"), (2, "stderr")):
        if getattr(sys, name) is None:
            os.dup2(os.open(os.devnull, os.O_WRONLY), number)  # another file would get the number
            os.set_inheritable(number, True)
            setattr(sys, name, os.fdopen(number, "w", closefd=False))
    if isinstance(sys.stdout, io.TextIOWrapper):  # a terminal of ASCII gets escapes, and not an error
        sys.stdout.reconfigure(errors="backslashreplace")
    guard_stream(sys.stdout)
    guard_stream(sys.stderr, drops=True)


def guard_stream(stream: TextIO, drops: bool = False) -> None:
    """Have a stream redact and escape what is written to it from now on, by whom ever.

    Args:
        stream: an OSError of it names the file `OUTPUT`.
        drops: take everything in place of an OSError, as where nobody else can be told.
    """
    if "drawn" in vars(stream):
        return
    write, flush = stream.write, stream.flush
    free = 0  # lines above the cursor's that are empty or a bar's; -1: its own is another text's

    def attempt(action: Callable[..., Any], *given: str) -> Any:
        try:
            return action(*given)
        except OSError as error:
            if drops:
                return silence(stream)
            error.filename = OUTPUT
            raise

    def draw(text: str) -> int:
        nonlocal free
        free = 0
        return attempt(write, redact(text))

    def write_text(text: str) -> int:
        nonlocal free
        move = found.group() if (found := _MOVE.match(text)) else ""
        down = move.count("\n") - move.count("\x1b")
        after = free + down
        if text and (not move or min(free, after) < 0):
            move, after = "", text.endswith("\n") - 1
        written = draw(move + escaped(text.removeprefix(move)))
        free = after
        return written

    vars(stream)["drawn"] = _Drawn(stream, draw)
    stream.write, stream.flush = write_text, lambda: attempt(flush)


def silence(stream: TextIO) -> None:
    """Let a stream take everything from now on, and what it holds that it could not write."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def settle_streams() -> None:
    """Write what the streams hold, or drop it: the interpreter would try again, and end with a code of its own."""
    for stream in filter(None, (sys.stdout, sys.stderr)):
        try:
            stream.flush()
        except OSError:
            silence(stream)
