"""Write metrics.jsonl: the record of a run, one JSON object per line, from which all else that is shown can be derived.

A row is of a training step that is logged, of a validation, of an evaluation of tasks or of a look at float8's numerics
after that step; each of these has an interval of its own. Its numbers have the keys of `metric_table.py`. Rates and
times of a step's row, and what routers have seen, are of the steps since the row before, or since a validation, a
checkpoint or a trace came in between, this step included; losses and norms are of this step.

A number that is NaN or infinite is `null`, so that each line is strict JSON and a column is numeric for whoever loads
it (pandas reads NaN). The log line of that step says whether it was NaN or Inf.

The file continues across restarts. Rows after the step that training resumes from are dropped, because those steps are
trained again; so is a last line that a crash cut short. What remains is rewritten beside the file and renamed over it,
so a crash here loses nothing either. A start at step 0 drops nothing: a file that is there is renamed to
`metrics.earlier-1.jsonl`, or `-2` and so on. Each line is at once the operating system's, so a killed process loses
none; `sync`, called before a checkpoint is published, puts them on disk, so that a power cut loses none either.
"""

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from titanlite.durable import append_plain, earlier, read_plain, write_durably
from titanlite.errors import Problem, TitanliteError, describe
from titanlite.json_file import MALFORMED, as_type, parse_json
from titanlite.observe.metric_table import AXES, METRICS
from titanlite.observe.observer import Observer

_READ = {*AXES, *METRICS}  # each alone, or before a dot; another key may have what is no number


class RunError(TitanliteError):
    """A run's folder is missing, is not one, or holds a damaged file."""


Row = Mapping[str, float]
"""Numbers that are logged at once, by key: a step, the tokens until then, and others, some of them NaN or infinite."""


class MetricsFile(Observer):
    """Appends rows to `metrics.jsonl`, of which it has dropped what will be trained again. Rank 0 owns it.

    The file and its folder are created if need be. Rows up to `resume_step` are kept, without the validation and the
    evaluation of that step if it validates again; at step 0 a file of its own begins.

    Raises:
        RunError: a line before the last one is not a JSON object.
        OSError: it cannot be read or written, or something else than a plain file is in its place.
    """

    def __init__(self, path: Path, resume_step: int, validates_again: bool = False) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.earlier: Path | None = None  # what has the rows of an earlier start from now on, at a start at step 0
        self.last_step = 0  # the last training step whose row is kept
        has_rows = os.path.lexists(path) and len(read_plain(path)) > 0
        if has_rows and resume_step == 0:
            self.earlier = path.rename(*earlier(path))
        elif has_rows:
            kept = [row for row in read_metrics(path) if row["step"] <= resume_step]
            if validates_again:
                again = {"validation_loss", "validation_loss_ema", "evaluation_seconds"}
                kept = [row for row in kept if row["step"] < resume_step or not again & row.keys()]
            self.last_step = max((row["step"] for row in kept if is_of_step(row)), default=0)
            write_durably(path, "".join(json.dumps(row) + "\n" for row in kept))
        self._file = append_plain(path)

    def write(self, row: Row) -> None:
        """Append one row and hand it to the operating system."""
        self._append(json_row(row))

    def _append(self, row: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(row) + "\n")

    def sync(self) -> None:
        """Wait until all rows are on disk."""
        os.fsync(self._file.fileno())

    def close(self, has_failed: bool = False) -> None:
        """Close the file."""
        self._file.close()


def json_row(row: Row) -> dict[str, float | None]:
    """Return a row with None for each number that is not finite."""
    return {key: value if math.isfinite(value) else None for key, value in row.items()}


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Read the rows of a `metrics.jsonl`; it may be growing: a last line without its newline is left out.

    Returns:
        One dict per row, each with an integer "step"; None stands for a number that was not finite. Only keys of
        another version have what is no number.

    Raises:
        RunError: a complete line is not a JSON object with a step, or one of its own keys has no number of 64 bits.
        OSError: the file cannot be read.
    """
    lines = path.read_bytes().split(b"\n")[:-1]  # what follows the last newline is empty, or half a row
    rows, problems = [], []
    for number, line in enumerate(lines, start=1):
        try:
            row = parse_json(line)
            as_type(Mapping[str, Sequence[int]], row.get("experts", {}))
            if type(row["step"]) is not int or not all(map(_is_as_read, row.values(), row)):
                raise ValueError("no row of numbers")
            lost = [key for key, value in row.items() if isinstance(value, float) and not math.isfinite(value)]
            rows.append(row | dict.fromkeys(lost))
        except MALFORMED:  # of JSON, of a byte that is no text, or of what is no number
            saw = json.dumps(line[:60].decode(errors="replace"))
            problems.append(
                Problem("row", saw, "a JSON object with a step, of numbers of 64 bits", "delete this line", number)
            )
    if problems:
        raise RunError(describe(str(path), problems))
    return rows


def is_of_step(row: Mapping[str, Any]) -> bool:
    """Return whether a row is of a training step; a step in which no token had a target has no loss."""
    return "loss" in row or "experts" in row or row.get("targets") == 0


def _is_as_read(value: Any, key: str) -> bool:
    """Return whether a value is a number of 64 bits, or None, as far as it is read; quickly, for a run has millions."""
    kind = type(value)
    if kind is float or value is None:
        return True
    return -(2**63) <= value < 2**63 if kind is int else key.partition(".")[0] not in _READ
