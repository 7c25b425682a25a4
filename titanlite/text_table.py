"""Write tables as text, and fold text into the width of a terminal."""

import os
import re
import sys
import textwrap
from collections.abc import Iterator, Sequence
from itertools import groupby

_INDENT = "  "  # before each row of a table; `folded` recognises rows by it
_FURTHER = 4 * " "  # before the second and later lines of a folded row


def columns(*rows: Sequence[str]) -> str:
    """Return a table as text, headings first. Columns with numbers, except the first, are aligned to the right."""
    aligned = []
    for i, column in enumerate(zip(*rows, strict=True)):
        width, has_number = max(map(len, column)), i > 0 and any(cell[:1].isdigit() for cell in column)
        aligned.append([cell.rjust(width) if has_number else cell.ljust(width) for cell in column])
    return "".join(f"  {'  '.join(row)}".rstrip() + "\n" for row in zip(*aligned, strict=True))


def terminal_width() -> int | None:
    """Return the variable COLUMNS, or else the terminal's width in characters; None if the output is no terminal."""
    if (said := os.environ.get("COLUMNS", "")).isdecimal() and int(said):
        return int(said)
    try:
        return os.get_terminal_size(sys.stdout.fileno()).columns or None
    except (OSError, ValueError):  # a pipe, or no file
        return None


def folded(text: str, width: int | None) -> str:
    """Fold a text into a width in characters; None: unlimited. Paragraphs, of one line each, are folded between words,
    and tables of `columns` between columns.
    """
    if width is None:
        return text
    lines: list[str] = []
    for is_table, block in groupby(text.splitlines(), key=lambda line: line.startswith(_INDENT)):
        rows = list(block)
        if max(map(len, rows)) <= width:
            lines += rows
        elif is_table:
            lines += _folded_rows(rows, width)
        else:
            for line in rows:
                lines += textwrap.wrap(line, width, break_long_words=False, break_on_hyphens=False) or [""]
    return "".join(f"{line}\n" for line in lines)


def _folded_rows(rows: Sequence[str], width: int) -> Iterator[str]:
    """Break all rows of a table at the same columns. Two blanks separate columns in every row."""
    longest = max(map(len, rows))
    blank = "".join(" " if all(row[n : n + 1] in ("", " ") for row in rows) else "x" for n in range(longest))
    cells = [found.span() for found in re.finditer(r"x+(?: x+)*", blank)]
    bands: list[list[tuple[int, int]]] = [[]]
    for start, end in cells:
        room = width - len(_FURTHER if len(bands) > 1 else _INDENT)
        if bands[-1] and end - bands[-1][0][0] > room:
            bands.append([])
        bands[-1].append((start, end))
    for row in rows:
        for n, band in enumerate(bands):
            indent, text = _FURTHER if n else _INDENT, row[band[0][0] : band[-1][1]].rstrip()
            if len(indent + text) > width:  # a cell wider than the terminal
                yield from textwrap.wrap(
                    text,
                    width,
                    initial_indent=indent,
                    subsequent_indent=_FURTHER + _INDENT,
                    break_long_words=False,
                    break_on_hyphens=False,
                )
            elif text:
                yield indent + text
