"""Rows as text, for every table that a command prints."""

from collections.abc import Sequence


def columns(*rows: Sequence[str]) -> str:
    """Align rows, headings first: the first column to the left, others to the right if there is a number in them."""
    aligned = []
    for i, column in enumerate(zip(*rows, strict=True)):
        width, has_number = max(map(len, column)), i > 0 and any(cell[:1].isdigit() for cell in column)
        aligned.append([cell.rjust(width) if has_number else cell.ljust(width) for cell in column])
    return "".join(f"  {'  '.join(row)}".rstrip() + "\n" for row in zip(*aligned, strict=True))
