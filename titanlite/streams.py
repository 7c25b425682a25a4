"""Guard standard output and standard error: redact secrets, and escape control characters.

Text such as names and lines of files is not trusted. Terminal controls in it, also those that reorder text, are escaped
as `repr` escapes them; newlines and tabs remain. Colours and progress bars of titanlite are written to `drawn`.
Progress bars of other libraries (tqdm) are recognised by their cursor moves, which may reach only empty lines or lines
of bars. Paths that a run prints are relative to the working directory.
"""

import io
import os
import re
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TextIO

from titanlite.redact import redact

OUTPUT = "standard output"
"""The `filename` of an OSError that a write to standard output raises."""
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_MOVE = re.compile(r"\n+\Z|(?:\x1b\[A)+\Z|\r(?: *\r\Z)?(?=[^\n]*\Z)")  # cursor moves alone, or \r before one line


class _Drawn:
    """A stream that redacts text, but does not escape it: for colours and progress bars."""

    def __init__(self, stream: TextIO, write: Callable[[str], int]) -> None:
        self._stream, self.write = stream, write

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def escaped(text: str) -> str:
    """Escape terminal controls in a text, except newlines and tabs."""
    return _CONTROL.sub(lambda found: repr(found[0])[1:-1], text)


def one_line(text: str) -> str:
    """Escape all terminal controls in a text, newlines and tabs included."""
    return escaped(text).replace("\n", r"\n").replace("\t", r"\t")


def with_relative_paths(text: str) -> str:
    """Make paths beneath the working directory relative to it. For what is printed: files keep absolute paths."""
    with suppress(OSError):  # the directory was deleted
        if (here := os.getcwd()) != "/":
            return re.sub(rf"(?<![^\s'\"=:(\[]){re.escape(here)}/(?=[\w.])", "", text)
    return text


def say_first(text: str) -> None:
    """Say on stderr, on the first rank, what a command begins with: importing torch takes seconds."""
    if os.environ.get("RANK", "0") == "0":
        sys.stderr.write(with_relative_paths(f"{text} …\n"))
        sys.stderr.flush()


def drawn(stream: TextIO) -> Any:
    """Return the stream for colours and bars, `drawn` if `stream` is guarded. Callers must escape text themselves."""
    return getattr(stream, "drawn", stream)


def guard_streams() -> None:
    """Guard standard output and standard error by `guard_stream`. A closed one, as under cron, discards all text."""
    for number, name in ((1, "stdout"), (2, "stderr")):
        if getattr(sys, name) is None:
            os.dup2(os.open(os.devnull, os.O_WRONLY), number)  # else the next file to be opened would get the number
            os.set_inheritable(number, True)
            setattr(sys, name, os.fdopen(number, "w", closefd=False))
    if isinstance(sys.stdout, io.TextIOWrapper):  # escapes in place of errors on an ASCII terminal
        sys.stdout.reconfigure(errors="backslashreplace")
    guard_stream(sys.stdout)
    guard_stream(sys.stderr, drops=True)


def guard_stream(stream: TextIO, drops: bool = False) -> None:
    """Redact and escape all text that is written to a stream from now on.

    An OSError of a write gets the file name `OUTPUT`. With `drops` it is not raised, and all later text is discarded.
    """
    if "drawn" in vars(stream):
        return
    write, flush = stream.write, stream.flush
    free = 0  # lines above the cursor that a bar may overwrite; -1: not even the cursor's line

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
    """Discard all text that is written to a stream from now on, and the text in its buffer."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def settle_streams() -> None:
    """Flush stdout and stderr, or else discard their buffers, which would change the exit code of the process."""
    for stream in filter(None, (sys.stdout, sys.stderr)):
        try:
            stream.flush()
        except OSError:
            silence(stream)
