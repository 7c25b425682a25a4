"""Write metrics.jsonl, the record of a run with one JSON object per line. All charts and tables are derived from it.

A row belongs to a logged training step, or to a validation, an evaluation of tasks or a measurement of float8 numerics
after it. Each kind of row is logged at its own interval. `metric_table.py` declares the keys. Losses and norms in the
row of a step are of this step alone. Rates, times and router statistics cover all steps up to this one since the
previous row, or since the last validation, checkpoint or trace if that was later.

A number that is NaN or infinite is written as `null`, so that each line is strict JSON and columns are numeric for
programs such as pandas, which reads NaN. The log line of the step shows whether it was NaN or Inf.

The file continues across restarts. Rows after the step that training resumes from are dropped, because those steps are
trained again, and so is a last line that a crash cut short. The remaining rows are written to a new file, which then
replaces the old one by a rename, so that a crash meanwhile loses nothing. A start at step 0 drops nothing: it renames
an existing file to `metrics.earlier-1.jsonl`, or `-2` and so on. Each line is handed to the operating system at once,
so a killed process loses none. `sync`, called before a checkpoint is published, puts them on disk, so that a power cut
loses none either.
"""

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from titanlite.durable import append_plain, earlier, named, read_plain, write_durably
from titanlite.errors import Problem, TitanliteError, describe
from titanlite.json_file import MALFORMED, as_type, parse_json
from titanlite.observe.metric_table import AXES, METRICS
from titanlite.observe.observer import Observer

_READ = {*AXES, *METRICS}  # keys, up to a dot, whose values must be numbers


class RunError(TitanliteError):
    """Raised if a run's folder is missing, is not the folder of a run, or holds a damaged file."""


Row = Mapping[str, float]
"""Numbers logged together, by key: the step, the tokens trained on up to it, and metrics, which may be NaN or inf."""


class RowsFile(Observer):
    """Appends rows to a file of JSON lines, on rank 0. First it drops the rows of steps that will be trained again.

    The file and its folder are created if missing. Rows up to `resume_step` are kept; with `validates_again`, without
    the validation and evaluation of that step, which are repeated. With `resume_step` 0 a new file begins.

    Raises:
        RunError: a line before the last one is not a JSON object.
        OSError: the file cannot be read or written, or its path does not name a plain file.
    """

    def __init__(self, path: Path, resume_step: int, validates_again: bool = False) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.earlier: Path | None = None  # new path of an existing file, after a start at step 0
        self.last_step = 0  # the last training step whose row is kept
        has_rows = os.path.lexists(path) and len(read_plain(path)) > 0
        if has_rows and resume_step == 0:
            self.earlier = path.rename(*earlier(path))
        elif has_rows:
            kept = [row for row in read_metrics(path) if row["step"] <= resume_step]
            if validates_again:
                again = {"validation_loss", "validation_loss_ema", "evaluation_seconds", "samples"}
                kept = [row for row in kept if row["step"] < resume_step or not again & row.keys()]
            self.last_step = max((row["step"] for row in kept if is_of_step(row)), default=0)
            write_durably(path, "".join(json.dumps(row) + "\n" for row in kept))
        self._path, self._file = path, append_plain(path)

    def append(self, row: Mapping[str, Any]) -> None:
        """Append one row and hand it to the operating system."""
        with named(self._path):
            self._file.write(json.dumps(row) + "\n")

    def sync(self) -> None:
        """Wait until all rows are on disk."""
        with named(self._path):
            os.fsync(self._file.fileno())

    def close(self, has_failed: bool = False) -> None:
        """Close the file. `has_failed` is ignored."""
        with named(self._path):
            self._file.close()


class MetricsFile(RowsFile):
    """Appends the rows of metrics to `metrics.jsonl`."""

    def write(self, row: Row) -> None:
        """Append one row."""
        self.append(json_row(row))


def json_row(row: Row) -> dict[str, float | None]:
    """Return a copy of a row with None in place of each number that is not finite."""
    return {key: value if math.isfinite(value) else None for key, value in row.items()}


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Read the rows of a `metrics.jsonl`. A run may still be writing it: a last line without a newline is skipped.

    Returns:
        One dict per row, each with an integer "step". None stands for a number that was not finite. Only keys that
        `metric_table.py` does not declare may have values of other types.

    Raises:
        RunError: a complete line is not a JSON object with a step, or a declared key has no 64-bit number.
        OSError: the file cannot be read.
    """
    lines = path.read_bytes().split(b"\n")[:-1]  # the last part is empty or an incomplete row
    rows, problems = [], []
    for number, line in enumerate(lines, start=1):
        try:
            row = parse_json(line)
            as_type(Mapping[str, Sequence[int]], row.get("experts", {}))
            if type(row["step"]) is not int or not all(map(_is_as_read, row.values(), row)):
                raise ValueError("no row of numbers")
            lost = [key for key, value in row.items() if isinstance(value, float) and not math.isfinite(value)]
            rows.append(row | dict.fromkeys(lost))
        except MALFORMED:  # invalid JSON, invalid UTF-8, or a value that is not a number
            saw = json.dumps(line[:60].decode(errors="replace"))
            problems.append(
                Problem("row", saw, "a JSON object with a step, of numbers of 64 bits", "delete this line", number)
            )
    if problems:
        raise RunError(describe(str(path), problems))
    return rows


def is_of_step(row: Mapping[str, Any]) -> bool:
    """Return whether a row is of a training step, not of a validation, say. A step without any target has no loss."""
    return "loss" in row or "experts" in row or row.get("targets") == 0


def _is_as_read(value: Any, key: str) -> bool:
    """Return whether a value is None or a 64-bit number; undeclared keys may also have values of other types."""
    kind = type(value)
    if kind is float or value is None:
        return True
    return -(2**63) <= value < 2**63 if kind is int else key.partition(".")[0] not in _READ
