"""Check the files that commands write before what takes long, and tell a failure as one of the flag that names them."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from titanlite.observe.metrics import RunError


def require_picture(command: str, path: Path, example: str, flag: str = "--out") -> None:
    """Refuse a picture whose ending names no kind of picture.

    Args:
        command: as `titanlite compare`.
        path: the picture.
        example: a name that can be given.
        flag: of the command, that names the picture.

    Raises:
        RunError: there is no such kind.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    kinds = FigureCanvasAgg.get_supported_filetypes()
    if path.suffix[1:].lower() not in kinds:
        want = f"a file whose ending is one of {', '.join(sorted(kinds))}"
        raise RunError.of(command, flag, str(path), want, f"{flag} {example}")


@contextmanager
def writable(command: str, flag: str, path: Path) -> Iterator[None]:
    """Tell a failure to write a file as one of the flag that names it.

    Raises:
        RunError: the file cannot be written.
    """
    try:
        yield
    except OSError as error:
        saw, want = f"{path} ({error.strerror or error})", "a file that can be written"
        raise RunError.of(command, flag, saw, want, f"{flag} with a path in a folder of yours") from None
