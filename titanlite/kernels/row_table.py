"""Tables of rows of many tensors, each with a place in memory where all that travel lie one behind the other."""

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

NOWHERE = -1
"""The place of a row that does not travel."""


@dataclass(frozen=True, eq=False)
class RowTable:
    """A table of n rows.

    Attributes:
        tensor: [n] int32, the number of the tensor that a row is of.
        at: [n] int64, its first element there; tensors are contiguous.
        columns: [n] int32, its elements.
        flat: [n] int64, its first element in the memory of all rows, or `NOWHERE`.
    """

    tensor: Tensor
    at: Tensor
    columns: Tensor
    flat: Tensor
    widest: int = field(init=False)
    aligned: bool = field(init=False)  # all begin and end at multiples of 8 elements

    def __post_init__(self) -> None:
        together = torch.stack((self.at, self.columns.long(), self.flat.clamp(min=0)))
        object.__setattr__(self, "widest", int(self.columns.max()) if len(self) else 0)
        object.__setattr__(self, "aligned", not bool((together % 8).any()))

    def __len__(self) -> int:
        return len(self.tensor)

    def on(self, device: torch.device) -> "RowTable":
        """Return the table in the memory of a device."""
        return RowTable(*(t.to(device) for t in (self.tensor, self.at, self.columns, self.flat)))


def table(runs: Iterable[tuple[int, Tensor, int, int]]) -> RowTable:
    """Make a table of rows that stand together.

    Args:
        runs: of each: the number of the tensor; [m] int64, first elements; columns; the place of the first row in the
            memory of all rows, behind which the others follow, or `NOWHERE`.
    """
    kept = [run for run in runs if len(run[1])]
    if not kept:
        none = torch.empty(0, dtype=torch.int64)
        return RowTable(none.int(), none, none.int(), none)
    numbers, ats, widths, firsts = zip(*kept, strict=True)
    counts = torch.tensor([len(at) for at in ats])
    places = [
        torch.full((len(at),), NOWHERE) if first == NOWHERE else first + width * torch.arange(len(at))
        for at, width, first in zip(ats, widths, firsts, strict=True)
    ]
    of_run = [torch.tensor(of, dtype=torch.int32).repeat_interleave(counts) for of in (numbers, widths)]
    return RowTable(of_run[0], torch.cat(ats), of_run[1], torch.cat(places))
