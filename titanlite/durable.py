"""Files in a folder that outlives the process: written whole, kept under another name, looked at before they are made.

A text file is as it was or as it is to be, whenever a crash comes, and never in between.
"""

import errno
import itertools
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


def earlier(*paths: Path) -> list[Path]:
    """Name what files were before: `metrics.earlier-1.jsonl`, or `-2` and so on, the first number that is free for all.

    Args:
        paths: the files.
    """
    numbered = ([path.with_name(f"{path.stem}.earlier-{n}{path.suffix}") for path in paths] for n in itertools.count(1))
    return next(names for names in numbered if not any(map(os.path.lexists, names)))


def require_writable(folder: Path) -> None:
    """Raise what making a file in a folder would raise, or the folder itself where it is not there; touch nothing.

    Args:
        folder: there or not.

    Raises:
        OSError: what is there is no folder, or nothing can be made in it: permissions, or a read-only mount.
    """
    there = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
    number = 0
    if not there.is_dir():
        number = errno.ENOTDIR
    elif not os.access(there, os.W_OK | os.X_OK, effective_ids=True):
        number = errno.EROFS if os.statvfs(there).f_flag & os.ST_RDONLY else errno.EACCES
    if number:
        raise OSError(number, os.strerror(number), str(folder))
