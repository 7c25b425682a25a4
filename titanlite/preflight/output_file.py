"""Check that commands can write their files before they start long work, and name the flag if they cannot."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from titanlite.durable import require_writable
from titanlite.errors import ConfigError
from titanlite.extras import missing_packages
from titanlite.observe.metrics import RunError


def require_picture(command: str, path: Path, example: str, flag: str = "--out") -> None:
    """Refuse a picture that matplotlib cannot draw, or that cannot be written. Call before long work.

    Raises:
        RunError: matplotlib is not installed, or the suffix names no format. The message proposes `example`, a file
            name.
        ConfigError: as `require_place` raises it.
    """
    if missing := missing_packages("matplotlib"):
        raise RunError.of(command, flag, str(path), *missing)
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    kinds = FigureCanvasAgg.get_supported_filetypes()
    if path.suffix[1:].lower() not in kinds:
        want = f"a file whose ending is one of {', '.join(sorted(kinds))}"
        raise RunError.of(command, flag, str(path), want, f"{flag} {example}")
    require_place(flag, path, makes_folder=True)


def require_place(flag: str, path: Path, makes_folder: bool = False) -> None:
    """Refuse a file that cannot be written. Call before long work; `makes_folder`: the command creates its folder.

    Raises:
        ConfigError: the folder is missing or cannot be written, or the path is a folder.
    """
    number = 0
    if path.is_dir():
        number = errno.EISDIR
    elif not makes_folder and not path.parent.is_dir():
        number = errno.ENOENT
    elif path.exists():
        number = 0 if os.access(path, os.W_OK, effective_ids=True) else errno.EACCES
    else:
        try:
            require_writable(path.parent)
        except OSError as e:
            number = e.errno or errno.EIO
    if number:
        saw = f"{path} ({os.strerror(number)})"
        want = f"a file that can be written{', in a folder that exists' * (not makes_folder)}"
        raise ConfigError.of("command line", flag, saw, want, f"{flag} {path.name}")


def require_new(flag: str, path: Path) -> None:
    """Raise ConfigError about `flag`, which names the file `path`, if the file exists or cannot be written."""
    require_place(flag, path)
    if os.path.lexists(path):
        fix = f"remove {path}, or name another"
        raise ConfigError.of("command line", flag, str(path), "a file that does not exist", fix)


@contextmanager
def writable(command: str, flag: str, path: Path) -> Iterator[None]:
    """Create the folder of a file. Within the context, raise RunError about `flag` if the file cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        saw, want = f"{path} ({error.strerror or error})", "a file that can be written"
        raise RunError.of(command, flag, saw, want, f"{flag} with a path in a folder of yours") from None
