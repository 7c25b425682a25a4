"""Show a run's progress to its user: one line per step, notices and warnings, and a progress bar on a terminal.

    step   120/10000  loss  2.4313  grad  0.513    9,912 tok/s/gpu  mfu 58.1%   52.3 GiB  eta 8h 14m

A step's line fits 100 columns; all other numbers are in metrics.jsonl. Its time left counts the validations,
evaluations and checkpoints to come, each as long as the last of its kind, once there was one. Longer texts are folded
between words, with continuation lines indented. Paths beneath the working directory are shown relative to it.

A pipe or a file gets the line of every logged step, without colours and in ASCII, so that `grep` and `awk` work on it.
A terminal has the newest step's figures above a progress bar, and keeps the lines of the first and the last step, of
validations, with the training loss, and without validation of about twenty steps; with `--verbose` of every step.

Every rank writes `logs/rank<r>.log`, each line with its time in UTC. Only the first rank of each host writes to the
terminal, and only global rank 0 writes step lines to it, so that eight ranks do not print everything eight times. A
closed terminal, or a pipe without a reader, does not end a run: the log notes the loss and is continued.
"""

import re
import statistics
import sys
import textwrap
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from titanlite.durable import append_plain, named
from titanlite.errors import TitanliteError
from titanlite.observe.metric_table import METRICS
from titanlite.observe.metrics import Row, is_of_step
from titanlite.observe.observer import Observer, Sample
from titanlite.redact import redact
from titanlite.streams import drawn, escaped, with_relative_paths

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

WIDTH = 100
"""Greatest width of a printed line, in columns. Longer lines are folded."""
_RECENT = 20  # logged steps from which the time left is estimated; few, so that slow first steps soon drop out
_LINES = 20  # step lines that a terminal keeps of a run without validation
_ROOM = 12  # printed lines of a digest
_LONG_WAIT = 0.1  # warn if recent steps spent this share of their time, or more, on waiting for data


class Console(Observer):
    """Writes one rank's log file, appending if it exists. The first rank of each host also writes to the terminal.

    `has_validation`: whether lines of validations stand for those of steps. `is_verbose`: show all that is logged.
    """

    def __init__(
        self,
        rank: int,
        local_rank: int,
        total_steps: int,
        log_folder: Path,
        stream: TextIO | None = None,
        *,
        has_validation: bool = False,
        is_verbose: bool = False,
    ) -> None:
        log_folder.mkdir(parents=True, exist_ok=True)
        self._path = log_folder / f"rank{rank}.log"
        self._file = append_plain(self._path)
        self._rank, self._total = rank, total_steps
        self._stream = None if local_rank else stream or sys.stdout  # also None once writing has failed
        self._work: Callable[[int], float] = float  # step → work done up to its end
        self._recent: deque[tuple[float, float, float]] = deque(maxlen=_RECENT)  # seconds: in all, waiting, per work
        self._beside: dict[str, tuple[float, int]] = {}  # work between steps → its latest seconds, and steps between
        self._has_waited, self._has_validation, self._is_verbose = False, has_validation, is_verbose
        self._newest: Row = {}  # row of the newest logged step
        self._shown_step = 0  # the last step whose line was shown; 0: none
        self._unshown = ""  # line of the newest step while it is not shown
        self._bar: tuple[Progress, TaskID] | None = None

    def write(self, row: Row) -> None:
        """Log a row of metrics as one line. Rank 0 shows it, too; a terminal keeps the lines of few steps."""
        step, is_terminal = int(row["step"]), self._stream is not None and self._stream.isatty()
        place = _progress(step, self._total)
        if not is_of_step(row):
            losses, newest = _validation(row), self._newest
            line = f"{place}  {losses or _accuracies(row) or _float8(row)}"
            self._log(line)
            if losses and is_terminal and "loss" in newest:
                at = "" if newest["step"] == step else f" at step {newest['step']}"
                line = f"{place}  {METRICS['loss'].loss_of} {newest['loss']:.4f}{at}  {losses}"
            if self._rank == 0:
                self._show(line, is_row=True)
            return
        pace = row["seconds"] / (self._work(step) - self._work(step - 1))
        self._recent.append((row["seconds"], row["data_wait_seconds"], pace))
        left = self._work(self._total) - self._work(step)
        left_s = left * statistics.median(pace for _, _, pace in self._recent)
        left_s += sum(each * (-(-self._total // every) - (step - 1) // every) for each, every in self._beside.values())
        line = step_line(row, self._total, left_s)
        self._log(line)
        if self._rank == 0:
            self._newest, self._unshown = row, line
            if is_terminal:
                self._draw(partial(self._advance, step, line.removeprefix(place).lstrip()))
            if not is_terminal or self._keeps(step):
                self.show_newest()
            self._warn_of_wait()

    def show_newest(self) -> None:
        """Show the line of the newest step if it is not shown yet. Called after the last one."""
        if self._unshown:
            self._show(self._unshown, is_row=True)
            self._unshown, self._shown_step = "", int(self._newest["step"])

    def samples(self, step: int, tokens: int, samples: Sequence[Sample]) -> None:
        """Log each sample in one line, and show of it what fits two."""
        for sample in samples:
            prompt, text = (" ".join(escaped(part).split()) for part in sample)
            line = f"sample  {prompt} → {text or ('(white space)' if sample.text else '(nothing)')}"
            self._log(line)
            if self._rank == 0:  # as on all other ranks
                self._show(_in_two_lines(redact(line)))

    def digest(self, details: Sequence[str], brief: Sequence[str], last: Callable[[int], str]) -> None:
        """Log `details`, which `--verbose` shows; else show of `brief` what fits into `_ROOM` lines, from the first on.

        `last` returns the last line, for a number of texts of `brief` that are left out.
        """
        for text in (*details, last(0)):
            self._log(text)
        shown, room = [], _ROOM - len(_printed_lines(last(len(brief))))
        for text in brief:
            if (n := len(_printed_lines(text))) <= room:
                shown, room = [*shown, text], room - n
        for text in (*details, last(0)) if self._is_verbose else (*shown, last(len(brief) - len(shown))):
            self._show(text)

    def measure_by(self, work: Callable[[int], float]) -> None:
        """Estimate the time left from `work(step)`, the work up to a step, such as tokens: steps may differ in size."""
        self._work = work

    def took(self, phase: str, seconds: float, every: int) -> None:
        """Count what work such as a validation took in the time left: it is due each `every` steps and at the last."""
        self._beside[phase] = seconds, every

    def notice(self, text: str, style: str = "") -> None:
        """Log an event, such as a saved checkpoint. The first rank of each host also shows it on its terminal."""
        self._log(text)
        self._show(f"[rank {self._rank}] {text}" if self._rank else text, style)

    def warning(self, text: str) -> None:
        """Log a warning about something that the user may want to change, and show it as `notice` shows an event."""
        self.notice(f"warning: {text}", "yellow")

    def failed(self, error: BaseException) -> None:
        """Log the error that ends this rank, with a traceback if it is no TitanliteError. The terminal gets nothing."""
        bug = [] if isinstance(error, TitanliteError) else traceback.format_exception(error)
        self._log(f"failed: {''.join(bug).rstrip() or error}")

    def close(self, has_failed: bool = False) -> None:
        """Show the newest step, stop the progress bar and close the log file. `has_failed` is ignored."""
        self.show_newest()
        if self._bar:
            self._draw(self._bar[0].stop)
        with named(self._path):
            self._file.close()

    def _warn_of_wait(self) -> None:
        """Warn, once per process, if recent steps spent too large a share of their time on waiting for data."""
        all_of_it, waited = sum(seconds for seconds, _, _ in self._recent), sum(wait for _, wait, _ in self._recent)
        if self._has_waited or len(self._recent) < _RECENT or waited < _LONG_WAIT * all_of_it:
            return
        self._has_waited = True
        share = f"{waited / all_of_it:.0%} of the last {_RECENT} lines' time went by waiting for data"
        self.warning(f"{share}: put data.cache_dir on a faster disk, or leave the reader a core")

    def _keeps(self, step: int) -> bool:
        """Return whether a terminal keeps the line of a step."""
        is_next = not self._has_validation and step * _LINES // self._total > self._shown_step * _LINES // self._total
        return self._is_verbose or is_next or not self._shown_step or step == self._total

    def _log(self, text: str) -> None:
        with named(self._path):
            self._file.write(f"{datetime.now(UTC).strftime('%Y-%m-%dT%H:%M:%SZ')} {escaped(redact(text))}\n")

    def _show(self, text: str, style: str = "", is_row: bool = False) -> None:
        """Write to the terminal, above the progress bar. `is_row`: of metrics, whose labels are dimmed."""
        if self._stream is not None:
            self._draw(partial(self._print, self._stream, "\n".join(_printed_lines(text)), style, is_row))

    def _draw(self, write: Callable[[], None]) -> None:
        """Call `write`, which writes to the terminal. If it fails, log that, and never use the terminal again."""
        try:
            write()
        except OSError as e:
            self._stream = self._bar = None
            self._log(f"warning: the terminal is lost ({e.strerror}); what it would show is in this file")

    def _print(self, stream: TextIO, text: str, style: str, is_row: bool) -> None:
        if not stream.isatty():
            stream.write(text + "\n")
            stream.flush()
            return
        import rich.console
        from rich.text import Text

        console = self._bar[0].console if self._bar else rich.console.Console(file=drawn(stream))
        styled = Text(escaped(text), style)
        if is_row:
            styled.highlight_words(("step", *_labels(), "eta"), "dim")
            styled.highlight_regex(r"(?<=loss) +\S+", "bold cyan")
        console.print(styled, soft_wrap=True)

    def _advance(self, step: int, figures: str) -> None:
        """Show a step and its figures in the progress bar, which the first one starts."""
        if self._bar is None and self._stream is not None:
            self._bar = self._start_bar(self._stream)
        if self._bar is not None:
            self._bar[0].update(self._bar[1], completed=step, description=figures, refresh=True)

    def _start_bar(self, stream: TextIO) -> "tuple[Progress, TaskID]":
        """Start the progress bar. It is redrawn with each line, not by a thread, which would slow the steps down."""
        import rich.console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskProgressColumn
        from rich.text import Text

        class Bar(Progress):
            def get_renderables(self) -> Iterator[rich.console.RenderableType]:
                yield from (Text(task.description, no_wrap=True, overflow="ellipsis") for task in self.tasks)
                yield from super().get_renderables()

        progress = Bar(
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TaskProgressColumn(),
            console=rich.console.Console(file=drawn(stream)),
            auto_refresh=False,
            expand=True,
            transient=True,  # a run's last lines end its output
            redirect_stdout=False,  # prints of other code keep their destination
            redirect_stderr=False,
        )
        task = progress.add_task("", total=self._total)
        progress.start()
        return progress, task


def _printed_lines(text: str) -> list[str]:
    """Return a text as it is printed: without secrets, with relative paths, in lines of at most `WIDTH` columns.

    Lines are folded between words, with continuation lines indented. Longer words stay in one piece.
    """
    lines: list[str] = []
    for line in with_relative_paths(redact(text)).split("\n"):
        indent = " " * (len(line) - len(line.lstrip()) + 4)
        wrapped = textwrap.wrap(line, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
        lines += wrapped if len(line) > WIDTH else [line]
    return lines


def _in_two_lines(text: str) -> str:
    """Fold what fits of a text into two lines of at most `WIDTH` columns, also of words and characters of any width."""
    first, indent = _beginning(text, WIDTH), " " * 4
    if not (rest := text.removeprefix(first).strip()):
        return first
    second = _beginning(indent + rest, WIDTH)
    return f"{first}\n{second if second == indent + rest else _beginning(indent + rest, WIDTH - 2) + ' …'}"


def _beginning(text: str, width: int) -> str:
    """Return what fits `width` characters and columns, up to the end of a word, unless that leaves half of it empty."""
    from rich.cells import chop_cells

    fits = chop_cells(text[:width], width)[0]
    rest = text[len(fits) :]
    end = fits.rfind(" ") if rest and not rest[0].isspace() else 0
    return (fits[:end] if end > len(fits) // 2 else fits).rstrip()


def step_line(row: Row, total_steps: int, seconds_left: float) -> str:
    """Format a step's metrics as one ASCII line of aligned fields, two blanks apart, so that programs can split it."""
    shown = [metric.console(row[key]) for key, metric in METRICS.items() if metric.console and key in row]
    none = () if "loss" in row else ("no token with a target",)
    return "  ".join((_progress(int(row["step"]), total_steps), *none, *shown, f"eta {_rough(seconds_left)}"))


def _labels() -> list[str]:
    """Return the labels of the numbers in a step line, such as "grad" and "tok/s/gpu"."""
    shown = " ".join(metric.console(0.0) for metric in METRICS.values() if metric.console)
    return re.findall(r"[^\W\d][\w/]*", shown)


def duration(seconds: float) -> str:
    """Format seconds as h:mm:ss, preceded by the days if there are any: `3:12:05`, `2d 3:12:05`."""
    days, h, m, s = _units(seconds)
    return (f"{days}d " if days else "") + f"{h}:{m:02}:{s:02}"


def _rough(seconds: float) -> str:
    """Format seconds in their two largest units, from 10 days on in days: `12d`, `2d 3h`, `8h 14m`, `3m 12s`."""
    days, h, m, s = _units(seconds)
    if days > 9:
        return f"{days}d"
    return f"{days}d {h}h" if days else f"{h}h {m:02}m" if h else f"{m}m {s:02}s"


def _units(seconds: float) -> tuple[int, int, int, int]:
    """Split seconds, rounded, into (days, hours, minutes, seconds)."""
    minutes, s = divmod(max(0, round(seconds)), 60)
    hours, m = divmod(minutes, 60)
    return *divmod(hours, 24), m, s


def _validation(row: Row) -> str:
    """Format the validation loss of each source, with bits per byte where known; "" if the row has no validation."""
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
    """Format each task's accuracy, plain and with choices scored per byte ("norm"); "" if the row has no accuracy."""
    tasks = [key.partition(".")[2] for key in row if key.startswith("accuracy.")]
    of_tasks = [f"{name} {row[f'accuracy.{name}']:.2%} (norm {row[f'accuracy_norm.{name}']:.2%})" for name in tasks]
    return f"accuracy {'  '.join(of_tasks)}" if tasks else ""


def _float8(row: Row) -> str:
    """Format the lowest SQNR of a layer's float8 output, and the largest shares of clamped and of zeroed elements."""
    sqnr = {key: number for key, number in row.items() if key.startswith("float8_output_sqnr_db.")}
    worst = min(sqnr, key=sqnr.__getitem__)
    clamped, lost = (
        max(number for key, number in row.items() if f"_{what}." in key) for what in ("saturated", "flushed")
    )
    line = f"float8 at least {sqnr[worst]:.1f} dB, {worst.partition('.')[2]}; "
    return line + f"at most {clamped:.2%} beyond the range, {lost:.2%} became zero"


def _progress(step: int, total: int) -> str:
    return f"step {step:>{len(str(total))}}/{total}"
