"""Write files whole in a folder that outlives the process, keep old ones under another name, and check it beforehand.

A text file is as it was or as it is to be, whenever a crash comes, and never in between. Whoever else may write to the
folder can put a link, a pipe or a device in a file's place: none is followed, written to or waited for.
"""

import errno
import itertools
import os
import shutil
import stat
import tempfile
from pathlib import Path
from typing import TextIO

from titanlite.byte_size import byte_size

_KINDS = {stat.S_IFLNK: "a link", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}


def open_plain(path: Path, flags: int) -> int:
    """Open a plain file.

    Returns:
        Its descriptor.

    Raises:
        OSError: something else is in its place.
    """
    require_plain(path)
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)


def append_plain(path: Path) -> TextIO:
    """Open a plain text file to add lines to it, each of which is at once the operating system's; made if need be.

    Raises:
        OSError: as `open_plain` says.
    """
    lines = open_plain(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    # What is told may have half a surrogate pair, which has no UTF-8.
    return open(lines, "a", buffering=1, encoding="utf-8", errors="backslashreplace")


def is_at(path: Path, file: int) -> bool:
    """Return whether a path is still that of an open file: nobody has removed, moved or replaced it.

    So it is as long as nothing else is known: a network's file system may fail for a while.
    """
    try:
        found = path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True
    try:
        return os.path.samestat(found, os.fstat(file))
    except OSError as e:
        return e.errno != errno.ESTALE  # there is a file, and its server no longer has this one


def read_plain(path: Path) -> bytes:
    """Read a plain file.

    Raises:
        OSError: as `open_plain` says.
    """
    with open(open_plain(path, os.O_RDONLY), "rb") as file:
        return file.read()


def write_durably(path: Path, text: str, *, by: str = "", on_disk: bool = True) -> None:
    """Write a text file, in the place of an old one if there is one, and wait until it is on disk.

    Args:
        path: the file; its folder exists.
        text: all of it.
        by: who writes, where others may write the same file at the same time.
        on_disk: whether to wait.

    Raises:
        OSError: something else than a plain file is where it is written first, or it cannot be written.
    """
    beside = path.with_name(f"{path.name}{by}.tmp")
    require_plain(beside)
    beside.unlink(missing_ok=True)  # of a process that was killed
    with open(open_plain(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        if on_disk:
            os.fsync(file.fileno())
    beside.replace(path)


def require_plain(path: Path) -> None:
    """Raise where something else than a plain file is in a file's place; that nothing is there is right.

    Raises:
        OSError: as `open_plain` says.
    """
    try:
        found = path.lstat()
    except FileNotFoundError:
        return
    kind = stat.S_IFMT(found.st_mode)
    if kind == stat.S_IFDIR:
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if kind != stat.S_IFREG:
        raise OSError(errno.EINVAL, f"{_KINDS.get(kind, 'a device')} in place of a file", str(path))


def earlier(*paths: Path) -> list[Path]:
    """Name what files were before: `metrics.earlier-1.jsonl`, or `-2` and so on: the first number free for all."""
    numbered = ([path.with_name(f"{path.stem}.earlier-{n}{path.suffix}") for path in paths] for n in itertools.count(1))
    return next(names for names in numbered if not any(map(os.path.lexists, names)))


def require_reachable(path: str | Path) -> None:
    """Check that this user may know what is at a path: what is in another user's folder seems not to be there.

    Raises:
        PermissionError: it may not.
    """
    try:
        os.stat(path)
    except PermissionError:
        raise
    except (OSError, ValueError):  # it is not there, or no path, as who looks for it says
        return


def disk_space_in(folder: Path) -> tuple[str, str]:
    """Say what is free on the disk of a folder, and what makes more of it: a disk may have bytes and no inode left.

    Returns:
        As "3.1 GiB are free", and as "make room".
    """
    there = next(path for path in (folder, *folder.parents) if os.path.exists(path))
    free, disk = byte_size(shutil.disk_usage(there).free), os.statvfs(there)
    if disk.f_files and not disk.f_favail:  # some file systems have no fixed number of them
        return f"{free} are free, but no inode for another file", "delete files of whatever size"
    return f"{free} are free", "make room"


def require_writable(folder: Path) -> None:
    """Raise what making a file in a folder would raise, or the folder itself where it is not there; leave nothing.

    Raises:
        OSError: what is there is no folder, or nothing can be made in it: permissions, a read-only mount, or a link to
            what is not there.
    """
    there = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
    number = 0
    if not there.exists():
        raise FileNotFoundError(errno.ENOENT, "a link that leads nowhere", str(there))
    if not there.is_dir():
        number = errno.ENOTDIR
    elif not os.access(there, os.W_OK | os.X_OK, effective_ids=True):
        number = errno.EROFS if os.statvfs(there).f_flag & os.ST_RDONLY else errno.EACCES
    elif not os.statvfs(there).f_blocks:  # on no disk, as /proc, of which nothing else says that it takes no folder
        try:
            os.rmdir(tempfile.mkdtemp(dir=there))
        except OSError as e:
            number = e.errno or errno.EIO
    if number:
        raise OSError(number, os.strerror(number), str(folder))
