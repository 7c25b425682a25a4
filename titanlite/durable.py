"""Write files atomically, name backups of earlier files, and check that folders are writable.

After a crash a text file has its old content or its new content. Another user of the folder may put a link, a pipe or a
device in place of a file. Such a path is not followed, written to or waited for.
"""

import errno
import itertools
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from titanlite.byte_size import byte_size

_KINDS = {stat.S_IFLNK: "a link", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}


def open_plain(path: Path, flags: int) -> int:
    """Open a plain file and return its descriptor; raise OSError if the path is a link, folder, pipe or device."""
    require_plain(path)
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)


def append_plain(path: Path) -> TextIO:
    """Open or create a plain text file, line-buffered, to append to it; raise OSError as `open_plain` does."""
    lines = open_plain(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    # Half a surrogate pair in a text cannot be encoded in UTF-8.
    return open(lines, "a", buffering=1, encoding="utf-8", errors="backslashreplace")


@contextmanager
def named(path: Path) -> Iterator[None]:
    """Within the context, give an OSError of an open file, such as of a write to it, the path of the file."""
    try:
        yield
    except OSError as e:
        e.filename = e.filename or str(path)
        raise


def is_at(path: Path, file: int) -> bool:
    """Return whether `path` still leads to the open file with descriptor `file`; True if a disk error hides this."""
    try:
        found = path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True
    try:
        return os.path.samestat(found, os.fstat(file))
    except OSError as e:
        return e.errno != errno.ESTALE  # the server no longer has the open file


def read_plain(path: Path) -> bytes:
    """Return the content of a plain file; raise OSError as `open_plain` does."""
    with open(open_plain(path, os.O_RDONLY), "rb") as file:
        return file.read()


def write_durably(path: Path, text: str, *, by: str = "", on_disk: bool = True) -> None:
    """Write or replace a text file in a folder that exists, and wait until it is on disk, unless `on_disk` is false.

    `by` is part of the temporary file's name. It must differ between processes that may write the same file at once.

    Raises:
        OSError: the file cannot be written, or its temporary file exists and is not a plain file.
    """
    beside = path.with_name(f"{path.name}{by}.tmp")
    require_plain(beside)
    beside.unlink(missing_ok=True)  # left by a process that was killed
    with open(open_plain(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        if on_disk:
            os.fsync(file.fileno())
    beside.replace(path)


def require_plain(path: Path) -> None:
    """Raise OSError if a path exists and is not a plain file."""
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
    """Return unused names to back files up, such as `metrics.earlier-1.jsonl`, all with the same number."""
    numbered = ([path.with_name(f"{path.stem}.earlier-{n}{path.suffix}") for path in paths] for n in itertools.count(1))
    return next(names for names in numbered if not any(map(os.path.lexists, names)))


def require_reachable(path: str | Path) -> None:
    """Raise PermissionError if this user may not access a path, which would otherwise seem not to exist."""
    try:
        os.stat(path)
    except PermissionError:
        raise
    except (OSError, ValueError):  # the path does not exist or is malformed: the caller reports it
        return


def disk_space_in(folder: Path) -> tuple[str, str]:
    """Return (the free space on a folder's disk, e.g. "3.1 GiB are free"; advice to get more, e.g. "make room")."""
    there = next(path for path in (folder, *folder.parents) if os.path.exists(path))
    free, disk = byte_size(shutil.disk_usage(there).free), os.statvfs(there)
    if disk.f_files and not disk.f_favail:  # some file systems have no fixed number of inodes
        return f"{free} are free, but no inode for another file", "delete files of whatever size"
    return f"{free} are free", "make room"


def require_writable(folder: Path) -> None:
    """Raise the OSError that creating a file in a folder, or the folder itself, would raise; leave nothing behind.

    Raises:
        OSError: the path is no folder, a broken link, not writable, or on a read-only mount.
    """
    there = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
    number = 0
    if not there.exists():
        raise FileNotFoundError(errno.ENOENT, "a link that leads nowhere", str(there))
    if not there.is_dir():
        number = errno.ENOTDIR
    elif not os.access(there, os.W_OK | os.X_OK, effective_ids=True):
        number = errno.EROFS if os.statvfs(there).f_flag & os.ST_RDONLY else errno.EACCES
    elif not os.statvfs(there).f_blocks:  # such as /proc, which seems writable and refuses files
        try:
            os.rmdir(tempfile.mkdtemp(dir=there))
        except OSError as e:
            number = e.errno or errno.EIO
    if number:
        raise OSError(number, os.strerror(number), str(folder))
