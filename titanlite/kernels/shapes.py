"""The split of a dim over ranks, and the layout of a split tensor in memory.

A dim of length `size` is split into chunks of ⌈size/ranks⌉. The last ranks may hold less, or nothing, as with
`torch.chunk`. A tensor of any number of dims is viewed as `[outer, dim, inner]`: a shard is a block with one row for
each outer index, contiguous over dim and inner. Gathers and scatters of the kernels are copies between such blocks.
"""

import math
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Size, Tensor


class DimSplit(NamedTuple):
    """The shape of a tensor that is split over ranks along one dim."""

    outer: int  # product of the dims before the split one
    size: int  # length of the split dim over all ranks
    inner: int  # product of the dims after the split one
    ranks: int  # number of chunks

    @property
    def chunk(self) -> int:
        """Return the length of a full chunk."""
        return -(-self.size // self.ranks)

    @property
    def even(self) -> bool:
        """Return whether all chunks are full."""
        return self.chunk * self.ranks == self.size

    def length(self, rank: int) -> int:
        """Return the length of one rank's chunk."""
        return max(0, min(self.chunk, self.size - rank * self.chunk))


def split(shape: Size | list[int], dim: int, size: int, ranks: int) -> DimSplit:
    """Return the split of a tensor whose `dim`, maybe negative, has length `size` over all ranks, not `shape[dim]`."""
    dim %= len(shape)
    return DimSplit(math.prod(shape[:dim]), size, math.prod(shape[dim + 1 :]), ranks)


def unviewed(x: Tensor, shape: Size | list[int]) -> Tensor:
    """Reshape a new tensor, to which there is no other reference, so that torch does not take the result for a view.

    A module should not return a view: FSDP registers a hook on its result, and warns that an in-place operation on a
    view would lose the hook.
    """
    return torch.ops.aten._unsafe_view(x, list(shape))


def shapes_of(*tensors: Tensor) -> str:
    """Return the shapes of tensors as text, such as "8×6, 6×3"."""
    return ", ".join(dims(t.shape) for t in tensors)


def dims(shape: Iterable[int]) -> str:
    """Return a shape as text, such as "8×6"."""
    return "×".join(map(str, shape))
