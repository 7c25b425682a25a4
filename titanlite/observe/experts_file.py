"""Write experts.jsonl: how many tokens each expert of each layer processed over a run. `heat_map.py` draws them.

A row holds the sums over all steps since the previous row. There are about 300 rows however long a run is: a row per
step for 48 layers of 128 experts would take more room than the run's other files. A row is also written before each
checkpoint, so that a resumed run neither loses steps nor counts them twice.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from titanlite.observe.metrics import RowsFile, RunError, read_metrics

ROWS = 300


class ExpertsFile(RowsFile):
    """Appends rows to `experts.jsonl`: the step, the tokens trained on up to it, and by layer each expert's tokens."""

    def __init__(self, path: Path, resume_step: int, steps: int) -> None:
        super().__init__(path, resume_step)
        self._steps, self._since = steps, resume_step
        self._last: tuple[int, int] | None = None  # last step not yet in the file, and tokens up to it
        self._sums: Mapping[str, Sequence[int]] = {}

    def experts(self, step: int, tokens: int, experts: Mapping[str, Sequence[int]]) -> None:
        """Add each expert's tokens in the steps since the last call, by layer; write a row if one is due."""
        sums, self._last = self._sums, (step, tokens)
        self._sums = {
            name: [a + b for a, b in zip(sums[name], more, strict=True)] if sums else more
            for name, more in experts.items()
        }
        if step * ROWS // self._steps > self._since * ROWS // self._steps:
            self._write_sums()

    def sync(self) -> None:
        """Write the sums since the last row as a row, and wait until all rows are on disk."""
        self._write_sums()
        super().sync()

    def close(self, has_failed: bool = False) -> None:
        """Write the sums since the last row as a row, and close the file. `has_failed` is ignored."""
        self._write_sums()
        super().close()

    def _write_sums(self) -> None:
        if self._last is not None:
            step, tokens = self._last
            self.append({"step": step, "tokens": tokens, "experts": self._sums})
            self._since, self._last, self._sums = step, None, {}


def read_experts(path: Path) -> list[dict[str, Any]]:
    """Read the rows of an `experts.jsonl`. All have the same layers and experts, and increasing "tokens".

    Raises:
        RunError: a row has other layers or experts than the first row, or no more "tokens" than the previous row.
    """
    rows = read_metrics(path)
    shapes = [{name: [n >= 0 for n in tokens] for name, tokens in row.get("experts", {}).items()} for row in rows]
    tokens = [0, *(row.get("tokens") or 0 for row in rows)]
    is_alike = all(
        shape == shapes[0] and shape and all(each and all(each) for each in shape.values()) for shape in shapes
    )
    if not is_alike or tokens != sorted({*tokens}):
        want, fix = "rows of the same layers and experts, in order", "delete the file, to compare without its picture"
        raise RunError.of(str(path), "experts", "other rows", want, fix)
    return rows
