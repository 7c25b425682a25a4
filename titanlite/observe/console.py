"""Print what a person sees while a run trains: one line a step, notices and warnings, and a progress bar on a terminal.

    step   120/10000  loss  2.4313  grad  0.513    9,912 tok/s/gpu  mfu 58.1%   52.3 GiB  eta 8h 14m

A step's line fits 100 columns; all other numbers are in metrics.jsonl. A longer text goes on in indented lines, folded
between words. On a terminal the labels are dimmed and a bar is at the bottom. In a pipe or a file there is only the
text above: no colours, no boxes, step lines in ASCII, so that `grep` and `awk` work on it.

Every rank writes `logs/rank<r>.log`, each line with its time in UTC. The terminal belongs to the first rank of each
host, and step lines to global rank 0, so eight ranks do not say everything eight times. A terminal that hangs up, or a
pipe that nobody reads any more, does not end a run: the log says so, and goes on.
"""

import re
import statistics
import sys
import textwrap
import traceback
from collections import deque
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from titanlite.durable import append_plain
from titanlite.errors import TitanliteError
from titanlite.observe.metric_table import METRICS
from titanlite.observe.metrics import Row, is_of_step
from titanlite.observe.observer import Observer
from titanlite.redact import redact
from titanlite.streams import drawn, escaped

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

WIDTH = 100
"""Columns that lines are folded into."""
_RECENT = 20  # log lines over which the time left is estimated: the first step, which compiles, must not count for long
_LONG_WAIT = 0.1  # share of the time of so many lines that is too much to spend on waiting for data


class Console(Observer):
    """The log of one rank, which is continued if it exists; the first rank of each host also writes to the terminal."""

    def __init__(
        self, rank: int, local_rank: int, total_steps: int, log_folder: Path, stream: TextIO | None = None
    ) -> None:
        log_folder.mkdir(parents=True, exist_ok=True)
        self._file = append_plain(log_folder / f"rank{rank}.log")
        self._rank, self._total = rank, total_steps
        self._stream = None if local_rank else stream or sys.stdout  # None once nobody reads it, too
        self._work: Callable[[int], float] = float  # done up to a step
        self._recent: deque[tuple[float, float, float]] = deque(maxlen=_RECENT)  # seconds, waited, of a unit of work
        self._has_waited = False
        self._bar: tuple[Progress, TaskID] | None = None

    def write(self, row: Row) -> None:
        """Show one row in a line."""
        step = int(row["step"])
        if is_of_step(row):
            pace = row["seconds"] / (self._work(step) - self._work(step - 1))
            self._recent.append((row["seconds"], row["data_wait_seconds"], pace))
            left = self._work(self._total) - self._work(step)
            line = step_line(row, self._total, left * statistics.median(pace for _, _, pace in self._recent))
        else:
            line = f"{_progress(step, self._total)}  {_validation(row) or _accuracies(row) or _float8(row)}"
        self._log(line)
        if self._rank == 0:
            self._show(line, done=step)
            self._warn_of_wait()

    def measure_by(self, work: Callable[[int], float]) -> None:
        """Estimate the time left by what is done up to each step, as tokens, where steps are of several sizes."""
        self._work = work

    def notice(self, text: str, style: str = "") -> None:
        """Say something that happens once: what was loaded, saved, chosen. Shown by the first rank of each host."""
        self._log(text)
        self._show(f"[rank {self._rank}] {text}" if self._rank else text, style)

    def warning(self, text: str) -> None:
        """Say something that the user may want to change. Shown by the first rank of each host."""
        self.notice(f"warning: {text}", "yellow")

    def failed(self, error: BaseException) -> None:
        """Note in the log file what ended this rank; the terminal is told when the process ends."""
        bug = [] if isinstance(error, TitanliteError) else traceback.format_exception(error)
        self._log(f"failed: {''.join(bug).rstrip() or error}")

    def close(self, has_failed: bool = False) -> None:
        """Leave the terminal and the log file in order."""
        if self._bar:
            self._draw(self._bar[0].stop)
        self._file.close()

    def _warn_of_wait(self) -> None:
        """Say once that steps wait for data."""
        all_of_it, waited = sum(seconds for seconds, _, _ in self._recent), sum(wait for _, wait, _ in self._recent)
        if self._has_waited or len(self._recent) < _RECENT or waited < _LONG_WAIT * all_of_it:
            return
        self._has_waited = True
        share = f"{waited / all_of_it:.0%} of the last {_RECENT} lines' time went by waiting for data"
        self.warning(f"{share}: put data.cache_dir on a faster disk, or leave the reader a core")

    def _log(self, text: str) -> None:
        self._file.write(f"{datetime.now(UTC).strftime('%Y-%m-%dT%H:%M:%SZ')} {escaped(redact(text))}\n")

    def _show(self, text: str, style: str = "", done: int | None = None) -> None:
        """Write to the terminal, above the bar if there is one. The bar appears with the first step."""
        if self._stream is not None:
            self._draw(partial(self._print, self._stream, _fold_long(redact(text)), style, done))

    def _draw(self, write: Callable[[], None]) -> None:
        """Write to the terminal, and never again if that fails."""
        try:
            write()
        except OSError as e:
            self._stream = self._bar = None
            self._log(f"warning: the terminal is lost ({e.strerror}); what it would show is in this file")

    def _print(self, stream: TextIO, text: str, style: str, done: int | None) -> None:
        if not stream.isatty():
            stream.write(text + "\n")
            stream.flush()
            return
        import rich.console
        from rich.text import Text

        if self._bar is None and done is not None:
            self._bar = self._start_bar(stream)
        console = self._bar[0].console if self._bar else rich.console.Console(file=drawn(stream))
        styled = Text(escaped(text), style)
        if done is not None:
            styled.highlight_words(("step", *_labels(), "eta"), "dim")
            styled.highlight_regex(r"(?<=loss) +\S+", "bold cyan")
        console.print(styled, soft_wrap=True)
        if self._bar and done is not None:
            self._bar[0].update(self._bar[1], completed=done, refresh=True)

    def _start_bar(self, stream: TextIO) -> "tuple[Progress, TaskID]":
        """Put the bar at the bottom. It is redrawn with each line and by no thread, which would disturb the step."""
        import rich.console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskProgressColumn

        progress = Progress(
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TaskProgressColumn(),
            console=rich.console.Console(file=drawn(stream)),
            auto_refresh=False,
            expand=True,
            redirect_stdout=False,  # what others print goes where they send it
            redirect_stderr=False,
        )
        task = progress.add_task("", total=self._total)
        progress.start()
        return progress, task


def _fold_long(text: str) -> str:
    """Fold lines into 100 columns between words, so that a longer path is whole; further lines are indented."""
    lines: list[str] = []
    for line in text.split("\n"):
        indent = " " * (len(line) - len(line.lstrip()) + 4)
        wrapped = textwrap.wrap(line, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
        lines += wrapped if len(line) > WIDTH else [line]
    return "\n".join(lines)


def step_line(row: Row, total_steps: int, seconds_left: float) -> str:
    """Format one step as one line of aligned fields in ASCII, two blanks apart, that a program can split again."""
    shown = [metric.console(row[key]) for key, metric in METRICS.items() if metric.console and key in row]
    none = () if "loss" in row else ("no token with a target",)
    return "  ".join((_progress(int(row["step"]), total_steps), *none, *shown, f"eta {_rough(seconds_left)}"))


def _labels() -> list[str]:
    """Return the words beside the numbers of a step's line."""
    shown = " ".join(metric.console(0.0) for metric in METRICS.values() if metric.console)
    return re.findall(r"[^\W\d][\w/]*", shown)


def duration(seconds: float) -> str:
    """Format a time as h:mm:ss, with days in front where there are any: `3:12:05`, `2d 3:12:05`."""
    days, h, m, s = _units(seconds)
    return (f"{days}d " if days else "") + f"{h}:{m:02}:{s:02}"


def _rough(seconds: float) -> str:
    """Format a time by its two largest units: `12d`, `2d 3h`, `8h 14m`, `3m 12s`."""
    days, h, m, s = _units(seconds)
    if days > 9:
        return f"{days}d"
    return f"{days}d {h}h" if days else f"{h}h {m:02}m" if h else f"{m}m {s:02}s"


def _units(seconds: float) -> tuple[int, int, int, int]:
    """Return (days, hours, minutes, seconds)."""
    minutes, s = divmod(max(0, round(seconds)), 60)
    hours, m = divmod(minutes, 60)
    return *divmod(hours, 24), m, s


def _validation(row: Row) -> str:
    """Say the loss of each held-out source, and its bits per byte where they are known; "" of another row."""
    texts: list[str] = []
    for key, loss in row.items():
        kind, _, name = key.partition(".")
        if not kind.startswith("validation_loss"):
            continue
        bits = row.get(key.replace("_loss", "_bits_per_byte", 1))
        texts.append(
            f"{name or METRICS[kind].loss_of} {loss:.4f}" + ("" if bits is None else f" ({bits:.4f} bits/byte)")
        )
    return "  ".join(texts)


def _accuracies(row: Row) -> str:
    """Say what share of each task's questions was answered right, and by the choices' bytes; "" of another row."""
    tasks = [key.partition(".")[2] for key in row if key.startswith("accuracy.")]
    of_tasks = [f"{name} {row[f'accuracy.{name}']:.2%} (norm {row[f'accuracy_norm.{name}']:.2%})" for name in tasks]
    return f"accuracy {'  '.join(of_tasks)}" if tasks else ""


def _float8(row: Row) -> str:
    """Say which layer's product is the least exact, and how much a layer clamps and loses at most."""
    sqnr = {key: number for key, number in row.items() if key.startswith("float8_output_sqnr_db.")}
    worst = min(sqnr, key=sqnr.__getitem__)
    clamped, lost = (
        max(number for key, number in row.items() if f"_{what}." in key) for what in ("saturated", "flushed")
    )
    line = f"float8 at least {sqnr[worst]:.1f} dB, {worst.partition('.')[2]}; "
    return line + f"at most {clamped:.2%} beyond the range, {lost:.2%} became zero"


def _progress(step: int, total: int) -> str:
    return f"step {step:>{len(str(total))}}/{total}"
