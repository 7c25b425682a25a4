"""Tables of the rows of many tensors, with their offsets in the flat memory that ranks exchange; tables of tensors."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from titanlite.device import has_memory

NOWHERE = -1
"""The offset of a row that is not exchanged."""


@dataclass(frozen=True, eq=False)
class RowTable:
    """A table of n rows of many tensors."""

    tensor: Tensor  # [n] int32, index of each row's tensor
    at: Tensor  # [n] int64, offset of each row in its tensor, which is contiguous; in elements
    columns: Tensor  # [n] int32, number of elements of each row
    flat: Tensor  # [n] int64, offset of each row in the flat memory, or `NOWHERE`; in elements
    widest: int = field(init=False)  # most elements of a row
    aligned: bool = field(init=False)  # whether all rows begin and end at multiples of 8 elements

    def __post_init__(self) -> None:
        together = torch.stack((self.at, self.columns.long(), self.flat.clamp(min=0)))
        object.__setattr__(self, "widest", int(self.columns.max()) if len(self) else 0)
        object.__setattr__(self, "aligned", not bool((together % 8).any()))

    def __len__(self) -> int:
        return len(self.tensor)

    def on(self, device: torch.device) -> "RowTable":
        """Return the table with its tensors on a device."""
        return RowTable(*(t.to(device) for t in (self.tensor, self.at, self.columns, self.flat)))


@dataclass(frozen=True, eq=False)
class TensorTable:
    """A table of the tensors that the rows of a `RowTable` belong to."""

    tensors: Sequence[Tensor]  # in the order of the indices in the `RowTable`; of one dtype, contiguous
    addresses: Tensor  # [n] int64, on the device of the tensors
    aligned: bool  # whether all tensors begin at multiples of 16 bytes


def tensor_table(kind: str, tensors: Sequence[Tensor]) -> TensorTable:
    """Make a table of one or more tensors, valid until one of them moves in memory. The host does not wait.

    Raises:
        ValueError: a tensor differs in dtype from the first, or is not contiguous; `kind` names it in the message.
    """
    first = tensors[0]
    for i, t in enumerate(tensors):
        if t.dtype != first.dtype or not t.is_contiguous():
            found = f"{t.dtype}, {list(t.shape)} with strides {t.stride()}"
            raise ValueError(f"rows: {kind} {i} is {found}; it must be {first.dtype} and contiguous")
    found = [t.data_ptr() if has_memory(t) else 0 for t in tensors]
    there = torch.tensor(found, pin_memory=first.is_cuda).to(first.device, non_blocking=True)
    return TensorTable(tensors, there, not any(a % 16 for a in found))


def table(runs: Iterable[tuple[int, Tensor, int, int]]) -> RowTable:
    """Make a table of runs of rows.

    Args:
        runs: for each run of m rows the index of its tensor; [m] int64, offsets of the rows in the tensor; elements of
            a row; and the offset of the first row in the flat memory, where the others follow it, or `NOWHERE`.
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
