"""Guard standard output and standard error: redact secrets, and escape control characters.

Names of files, keys and groups, and lines of files, come from others. Terminal controls in them are escaped as `repr`
writes them, also those that reorder text; newlines and tabs remain. Colours and bars are written to `drawn`. Bars of
other libraries (tqdm) are recognised by their cursor moves, which may reach only empty lines or their own.
"""

import io
import os
import re
import sys
from collections.abc import Callable
from typing import Any, TextIO

from titanlite.redact import redact

OUTPUT = "standard output"
"""The file name in an OSError of standard output."""
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_MOVE = re.compile(r"\n+\Z|(?:\x1b\[A)+\Z|\r(?: *\r\Z)?(?=[^\n]*\Z)")  # alone, or before a line in a line's place


class _Drawn:
    """A stream that redacts, and does not escape."""

    def __init__(self, stream: TextIO, write: Callable[[str], int]) -> None:
        self._stream, self.write = stream, write

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def escaped(text: str) -> str:
    """Escape terminal controls in a text, except newlines and tabs."""
    return _CONTROL.sub(lambda found: repr(found[0])[1:-1], text)


def one_line(text: str) -> str:
    """Escape all terminal controls in a name."""
    return escaped(text).replace("\n", r"\n").replace("\t", r"\t")


def drawn(stream: TextIO) -> Any:
    """Return a guarded stream's `drawn`, for colours and bars with escaped texts; any other stream as it is."""
    return getattr(stream, "drawn", stream)


def guard_streams() -> None:
    """Guard both streams; a closed one, as under cron, discards everything."""
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
    """Redact and escape everything that is written to a stream from now on. An OSError names the file `OUTPUT`, or with
    `drops` everything after it is discarded.
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
    """Discard everything that is written to a stream from now on, and its buffer."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def settle_streams() -> None:
    """Flush the streams, or discard their buffers: the interpreter would try again, and change the exit code."""
    for stream in filter(None, (sys.stdout, sys.stderr)):
        try:
            stream.flush()
        except OSError:
            silence(stream)
