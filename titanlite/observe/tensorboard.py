"""Write the rows of metrics.jsonl for TensorBoard. It can never end a run: the first failure becomes one warning.

A run that is restarted trains some steps again. `purge_step` has TensorBoard forget what it has read of them, in all
files. What the last file lacks, because it could not be written or was not asked for, is written first.

TensorBoard's x axis is the step; `tokens` is an axis and no curve. A number that is NaN or infinite has no point.
"""

from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tomli_w

from titanlite.config.schema import Config
from titanlite.config.write import toml_table
from titanlite.observe.metric_table import AXES, shown_name
from titanlite.observe.metrics import Row, json_row, read_metrics
from titanlite.observe.observer import Observer
from titanlite.receipt import Entry, Skipped
from titanlite.redact import redact, redact_tree

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class TensorBoardFile(Observer):
    """The file of one start, beside those of earlier ones; made on rank 0 when `metrics.tensorboard` is true. `warn` is
    called with one text at the first failure.
    """

    def __init__(self, folder: Path, metrics: Path, warn: Callable[[str], object]) -> None:
        self._warn, self.has_failed = warn, False  # then it writes no more, for a reason that it has said
        self._writer: SummaryWriter | Any = None
        self._attempt(lambda: self._start(folder, metrics))

    def describe(self, config: Config, facts: Mapping[str, Any]) -> None:
        """Show the config and the run's facts as texts, without secrets."""

        def write() -> None:
            for name, table in {"config": toml_table(config), "run": dict(facts)}.items():
                toml = tomli_w.dumps(redact_tree(table))
                markdown = "".join(f"    {line}\n" for line in toml.splitlines())  # as it stands
                self._writer.add_text(name, markdown, self._first)

        self._attempt(write)

    def write(self, row: Row) -> None:
        """Add one row."""
        self._attempt(lambda: self._add(json_row(row)))

    def close(self, has_failed: bool = False) -> None:
        """Close the file."""
        with suppress(OSError):
            if self._writer is not None:
                self._writer.close()
        self._writer = None

    def _start(self, folder: Path, metrics: Path) -> None:
        from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader
        from torch.utils.tensorboard import SummaryWriter

        rows, written = read_metrics(metrics), 0
        for path in sorted(folder.glob("events.out.tfevents.*"))[-1:]:  # it begins with the step before its rows
            for event in LegacyEventFileLoader(str(path)).Load():
                written = event.step
        self._first = min(written, max((row["step"] for row in rows), default=0))  # the last may be validated again
        self._writer = SummaryWriter(str(folder), purge_step=self._first)
        for row in rows:
            if row["step"] >= self._first:
                self._add(row)

    def _add(self, row: Mapping[str, Any]) -> None:
        for key, value in row.items():
            if key not in AXES and isinstance(value, int | float):
                self._writer.add_scalar(shown_name(key), value, row["step"])

    def _attempt(self, write: Callable[[], object]) -> None:
        """Write something; if that fails, say so once, and write no more."""
        if self.has_failed:
            return
        try:
            write()
            if self._writer is not None:
                self._writer.flush()
        except (OSError, ImportError) as error:
            self.has_failed = True
            self.close()
            with suppress(OSError):  # the log may be on the same full disk
                self._warn(redact(f"tensorboard: cannot write ({error}); metrics.jsonl has every row"))


def tensorboard_entry(folder: Path, file: TensorBoardFile | None = None) -> Entry:
    """Return the receipt's entry; a file that cannot be written is told there and ends no run."""
    stopped = file is not None and file.has_failed
    skipped = (Skipped("rows", "the file cannot be written", is_told=True),) if stopped else ()
    return Entry("metrics.tensorboard", True, {"folder": str(folder)}, count=1, skipped=skipped)
