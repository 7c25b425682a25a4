"""Write the rows of metrics.jsonl for TensorBoard. A failure never ends a run: the first one becomes a warning.

A restarted run trains some steps again. `purge_step` makes TensorBoard drop the points of these steps in all files.
Rows that the last file lacks, because it could not be written or TensorBoard was off, are written first.

The x axis is the step, and `tokens` is not drawn. A number that is NaN or infinite has no point.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tomli_w

from titanlite.config.schema import Config
from titanlite.config.write import toml_table
from titanlite.observe.metric_table import AXES, shown_name
from titanlite.observe.metrics import Row, json_row, read_metrics
from titanlite.observe.observer import Observer, Sample
from titanlite.observe.samples_file import read_samples
from titanlite.receipt import Entry, Skipped
from titanlite.redact import redact, redact_tree
from titanlite.streams import escaped

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class TensorBoardFile(Observer):
    """Writes the event file of one start of a run, beside those of earlier starts. Used on rank 0 if
    `metrics.tensorboard` is true. `metrics` and `texts`: paths of metrics.jsonl and samples.jsonl, whose rows go first.
    `warn` is called with a text at the first failure.
    """

    def __init__(self, folder: Path, metrics: Path, texts: Path, warn: Callable[[str], object]) -> None:
        self._warn, self.has_failed = warn, False  # once true, nothing more is written
        self._writer: SummaryWriter | Any = None
        self._attempt(lambda: self._start(folder, metrics, texts))

    def describe(self, config: Config, facts: Mapping[str, Any]) -> None:
        """Write the config and the run's facts as two texts, without secrets."""

        def write() -> None:
            for name, table in {"config": toml_table(config), "run": dict(facts)}.items():
                toml = tomli_w.dumps(redact_tree(table))
                markdown = "".join(f"    {line}\n" for line in toml.splitlines())  # as a code block
                self._writer.add_text(name, markdown, self._first)

        self._attempt(write)

    def write(self, row: Row) -> None:
        """Write the numbers of a row as points."""
        self._attempt(lambda: self._add(json_row(row)))

    def samples(self, step: int, tokens: int, samples: Sequence[Sample]) -> None:
        """Show each prompt with its continuation as a text."""
        self._attempt(lambda: self._add_samples(step, samples))

    def close(self, has_failed: bool = False) -> None:
        """Close the file. `has_failed` is ignored."""
        with suppress(OSError):
            if self._writer is not None:
                self._writer.close()
        self._writer = None

    def _start(self, folder: Path, metrics: Path, texts: Path) -> None:
        from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader
        from torch.utils.tensorboard import SummaryWriter

        rows, written = read_metrics(metrics), 0
        for path in sorted(folder.glob("events.out.tfevents.*"))[-1:]:  # without rows it has an event at `purge_step`
            for event in LegacyEventFileLoader(str(path)).Load():
                written = event.step
        self._first = min(written, max((row["step"] for row in rows), default=0))  # it may be validated again
        self._writer = SummaryWriter(str(folder), purge_step=self._first)
        for row in rows:
            if row["step"] >= self._first:
                self._add(row)
        for step, samples in read_samples(texts):
            if step >= self._first:
                self._add_samples(step, samples)

    def _add_samples(self, step: int, samples: Sequence[Sample]) -> None:
        for number, sample in enumerate(samples):
            lines = escaped(f"{sample.prompt}{sample.text}").splitlines()
            self._writer.add_text(f"samples/{number}", "".join(f"    {line}\n" for line in lines), step)

    def _add(self, row: Mapping[str, Any]) -> None:
        for key, value in row.items():
            if key not in AXES and isinstance(value, int | float):
                self._writer.add_scalar(shown_name(key), value, row["step"])

    def _attempt(self, write: Callable[[], object]) -> None:
        """Call `write`. If it fails, warn, close the file and write no more."""
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
    """Return the receipt's entry for TensorBoard. It lists the rows as skipped if the file could not be written."""
    stopped = file is not None and file.has_failed
    skipped = (Skipped("rows", "the file cannot be written", is_told=True),) if stopped else ()
    return Entry("metrics.tensorboard", True, {"folder": str(folder)}, count=1, skipped=skipped)
