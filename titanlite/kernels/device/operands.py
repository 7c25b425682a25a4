"""Matrices as TMA reads them: rows that lie together, at distances and from an address of whole 16 bytes.

Whether rows or columns lie so is told by strides alone, and those of a copy follow from them, because a compiled kernel
and its descriptors are found again by the strides.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor


def lies_in_rows(matrix: Tensor) -> bool:
    """Whether the rows of a matrix lie as TMA wants them, apart from where the first begins."""
    row, column = matrix.stride()
    return column == 1 and row > 0 and row * matrix.dtype.itemsize % 16 == 0


def aligned(matrix: Tensor) -> Tensor:
    """The tensor itself, or a copy with its strides if its first byte is not where TMA can begin."""
    if matrix.data_ptr() % 16:
        return matrix.new_empty_strided(matrix.shape, matrix.stride()).copy_(matrix)
    return matrix


def compact(matrix: Tensor) -> Tensor:
    """A copy with the strides of a new tensor: `contiguous()` keeps any stride of a dim of length 1."""
    return matrix.clone(memory_format=torch.contiguous_format)


@triton.jit
def add_product(acc, a, b, BK: tl.constexpr, FAST: tl.constexpr):
    """`acc + a @ b` in float32, of blocks [M, BK] and [BK, N].

    Hopper's tensor cores add float8 products with about 14 bits. Unless that is allowed (FAST), what one step of BK has
    added is added to the sum in float32, as cuBLAS does without `use_fast_accum`.
    """
    if a.dtype.primitive_bitwidth == 8 and not FAST:
        return tl.dot(a, b, acc, max_num_imprecise_acc=BK)
    return tl.dot(a, b, acc)
