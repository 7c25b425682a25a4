"""Text files that a crash leaves as they were or as they are to be, never in between."""

import os
from pathlib import Path


def write_durably(path: Path, text: str) -> None:
    """Write a text file, in the place of an old one if there is one, and wait until it is on disk.

    Args:
        path: the file; its folder exists.
        text: all of it.
    """
    beside = path.with_name(f"{path.name}.tmp")
    with beside.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)
