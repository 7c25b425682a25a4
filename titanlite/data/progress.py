"""Show the progress of a preparation: a bar on a terminal, elsewhere a line every ten seconds."""

import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING

from titanlite.redact import redact
from titanlite.streams import drawn, escaped

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress as Bar

_SECONDS_BETWEEN_LINES = 10.0


class Progress:
    """Shows the bytes read so far on stderr if `enable`; if `is_quiet`, only `notice` and the lines passed to `say`."""

    def __init__(self, title: str, enable: bool, notice: str = "", is_quiet: bool = False) -> None:
        self._title, self._enable, self._notice, self._n_bytes = escaped(redact(title)), enable, notice, 0
        self._is_quiet = is_quiet
        self._console: Console | None = None
        self._bar: Bar | None = None
        self._started = self._last_line = time.monotonic()

    def __enter__(self) -> "Progress":
        if self._enable:
            from rich.console import Console

            self._console = Console(file=drawn(sys.stderr), highlight=False, soft_wrap=True)
            if self._notice:
                self.say(self._notice)
            if self._is_quiet:
                return self
            if self._console.is_terminal:
                self._bar = _bar(self._console)
                self._task = self._bar.add_task(self._title, total=None)
                self._bar.start()
            else:
                self.say(self._title)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        if self._bar:
            self._bar.stop()
        if kind is KeyboardInterrupt:
            lost = f"interrupted after {_mb(self._n_bytes)} MB"
            self.say(f"{self._title}: {lost}; the next start goes on from the last document that is on disk")
        elif not self._bar and self._enable and not self._is_quiet and kind is None and self._last_line > self._started:
            self.say(f"{self._title}: done after {time.monotonic() - self._started:.0f} s")

    def update(self, n_bytes: int, total: int | None) -> None:
        """Show that `n_bytes` of `total` have been read. Cheap enough to be called often."""
        self._n_bytes = n_bytes
        if self._bar:
            self._bar.update(self._task, completed=n_bytes, total=total)
        elif self._enable and not self._is_quiet and time.monotonic() - self._last_line > _SECONDS_BETWEEN_LINES:
            self._last_line = time.monotonic()
            of_total = f" of {_mb(total)}" if total else ""
            rate = n_bytes / 1e6 / (self._last_line - self._started)
            self.say(f"{self._title}: {_mb(n_bytes)}{of_total} MB, {rate:.1f} MB/s")

    def say(self, line: str) -> None:
        """Print a line on stderr, above the progress bar if there is one."""
        if self._console:
            self._console.print(escaped(line), markup=False)


def _mb(n_bytes: int) -> str:
    return f"{n_bytes / 1e6:,.{0 if n_bytes >= 1e6 else 2}f}"


def _bar(console: "Console") -> "Bar":
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
    from rich.progress import Progress as Bar

    columns = TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(), TransferSpeedColumn()
    return Bar(
        *columns,
        TimeRemainingColumn(),
        console=console,
        transient=True,
        redirect_stdout=False,  # do not capture what other code prints: it is escaped already
        redirect_stderr=False,
    )
