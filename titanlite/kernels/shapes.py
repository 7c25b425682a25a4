"""The split of a dim over ranks, and the layout of a split tensor in memory.

A dim of `size` is split into chunks of ⌈size/ranks⌉; the last ranks may hold less, or nothing (`torch.chunk`'s rule).
A tensor of any number of dims is seen as `[outer, dim, inner]`: a shard is a block with one row for each outer index,
contiguous over dim and inner. Every gather and scatter of the runtime is a copy between such blocks.
"""

import math
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Size, Tensor


class DimSplit(NamedTuple):
    """A tensor whose dim is split over ranks."""

    outer: int  # product of the dims before
    size: int  # the whole dim
    inner: int  # product of the dims after
    ranks: int  # how many chunks

    @property
    def chunk(self) -> int:
        """Return the length of a full chunk."""
        return -(-self.size // self.ranks)

    @property
    def even(self) -> bool:
        """Check that all chunks are full."""
        return self.chunk * self.ranks == self.size

    def length(self, rank: int) -> int:
        """Return the length of one rank's chunk."""
        return max(0, min(self.chunk, self.size - rank * self.chunk))


def split(shape: Size | list[int], dim: int, size: int, ranks: int) -> DimSplit:
    """Describe a tensor whose `dim`, which may be negative, is `size` long over all ranks; `shape[dim]` is not read."""
    dim %= len(shape)
    return DimSplit(math.prod(shape[:dim]), size, math.prod(shape[dim + 1 :]), ranks)


def unviewed(x: Tensor, shape: Size | list[int]) -> Tensor:
    """View a new tensor, which nobody else holds, in another shape so that torch does not take it for a view.

    A module should not return a view: FSDP hooks onto its result, and warns that an in-place operation would lose the
    hook.
    """
    return torch.ops.aten._unsafe_view(x, list(shape))


def shapes_of(*tensors: Tensor) -> str:
    """Write the shapes of tensors: "8×6, 6×3"."""
    return ", ".join(dims(t.shape) for t in tensors)


def dims(shape: Iterable[int]) -> str:
    """Write a shape: "8×6"."""
    return "×".join(map(str, shape))
