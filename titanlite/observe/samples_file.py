"""Keep the samples of a run: samples.jsonl, with a row for each validation."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from titanlite.observe.metrics import MetricsFile, Row, read_metrics
from titanlite.observe.observer import Sample


class SamplesFile(MetricsFile):
    """Appends rows to `samples.jsonl`: the step, the tokens trained on, and each prompt with its continuation."""

    def write(self, row: Row) -> None:
        """Leave rows of metrics to their own file."""

    def samples(self, step: int, tokens: int, samples: Sequence[Sample]) -> None:
        """Append a row."""
        self._append({"step": step, "tokens": tokens, "samples": [sample._asdict() for sample in samples]})


def read_samples(path: Path) -> list[tuple[int, list[Sample]]]:
    """Return (step, samples) of each row of a `samples.jsonl`, none if there is no such file.

    Raises:
        RunError: a row is none of a `SamplesFile`.
    """
    rows: list[dict[str, Any]] = read_metrics(path) if path.exists() else []
    return [(row["step"], [Sample(**sample) for sample in row["samples"]]) for row in rows]
