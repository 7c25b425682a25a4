"""Keep the samples of a run: samples.jsonl, with a row for each validation."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from titanlite.json_file import MALFORMED, as_type
from titanlite.observe.metrics import RowsFile, RunError, read_metrics
from titanlite.observe.observer import Sample


class SamplesFile(RowsFile):
    """Appends rows to `samples.jsonl`: the step, the tokens trained on, and each prompt with its continuation."""

    def samples(self, step: int, tokens: int, samples: Sequence[Sample]) -> None:
        """Append a row."""
        self.append({"step": step, "tokens": tokens, "samples": [sample._asdict() for sample in samples]})


def read_samples(path: Path) -> list[tuple[int, list[Sample]]]:
    """Return (step, samples) of each row of a `samples.jsonl`, none if there is no such file.

    Raises:
        RunError: a row is not as `SamplesFile` writes it.
    """
    found = list[tuple[int, list[Sample]]]()
    for row in read_metrics(path) if path.is_file() else []:
        try:
            given = as_type(Sequence[Mapping[str, str]], row["samples"])
            found.append((row["step"], [Sample(**sample) for sample in given]))
        except MALFORMED as error:
            want, fix = "texts with their continuations, as the run wrote them", "delete this row"
            raise RunError.of(str(path), f"samples of step {row['step']}", str(error), want, fix) from error
    return found
