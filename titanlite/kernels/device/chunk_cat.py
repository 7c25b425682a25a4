"""Device code of `titanlite.kernels.chunk_cat`: one launch for each tensor copies its parts for all ranks."""

import triton
import triton.language as tl
from torch import Tensor

from titanlite.kernels.device.launch import cdiv, launch

BLOCK = 1024
"""Elements that one thread block copies."""


@triton.jit
def _chunk_cat(source, out, size, part, width, first, BLOCK: tl.constexpr):
    """Copy a block of one tensor's part for one rank into the rank's row of `out`.

    size, part: elements of the tensor, and for each rank; width: columns of `out`; first: the tensor's first column.
    """
    rank = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(source + rank * part + at, mask=(at < part) & (rank * part + at < size), other=0.0)
    tl.store(out + rank * width + first + at, value.to(out.dtype.element_ty), mask=at < part)


def launch_chunk_cat(tensors: list[Tensor], n_chunks: int, out: Tensor) -> None:
    first = 0
    for tensor in tensors:
        first += _put(tensor.contiguous(), n_chunks, out, first)


def _put(tensor: Tensor, n_chunks: int, out: Tensor, first: int) -> int:
    """Copy one tensor to the columns of `out` from `first` on, and return how many columns it takes."""
    size, rows = tensor.numel(), cdiv(tensor.shape[0], n_chunks)
    part = rows * (size // tensor.shape[0])
    numbers = size, part, out.shape[1], first
    launch(
        _chunk_cat, (*numbers, tensor.dtype, out.dtype), (cdiv(part, BLOCK), n_chunks), (tensor, out),
        lambda: (tensor, out, *numbers, BLOCK), num_warps=4,
    )  # fmt: skip
    return part
