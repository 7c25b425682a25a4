"""Matrices as TMA reads them: rows that lie together, at distances and from an address of whole 16 bytes.

Whether rows or columns lie so is told by strides alone, and those of a copy follow from them, because a compiled kernel
and its descriptors are found again by the strides.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor


def lies_in_rows(matrix: Tensor) -> bool:
    """Check that the rows of a matrix lie as TMA wants them, apart from where the first begins."""
    row, column = matrix.stride()
    return column == 1 and row > 0 and row * matrix.dtype.itemsize % 16 == 0


def aligned(matrix: Tensor) -> Tensor:
    """Return the tensor itself, or a copy with its strides if its first byte is not where TMA can begin."""
    if matrix.data_ptr() % 16:
        return matrix.new_empty_strided(matrix.shape, matrix.stride()).copy_(matrix)
    return matrix


class Rows(NamedTuple):
    """An operand [N, K] of a product as kernels read it: a row-major matrix."""

    shape: tuple[int, int]  # of that matrix: [N, K], or [K, N]
    stride: int  # from row to row
    k_major: bool  # whether it is [N, K]
    copied: bool  # whether it has to be copied to lie so

    def placed(self, operand: Tensor, transposed: bool = False) -> Tensor:
        """Return what to read in an operand's place, most often itself; `transposed` if it comes as [K, N]."""
        if self.copied:  # `contiguous()` keeps any stride of a dim of length 1
            return (operand.t() if transposed else operand).clone(memory_format=torch.contiguous_format)
        return aligned(operand)


def rows_of(operands: Sequence[Tensor], may_transpose: bool) -> list[Rows]:
    """Describe how kernels read operands [N, K]: all along K, or all the other way if they may.

    Depends on shapes and strides alone.
    """
    if all(lies_in_rows(x) for x in operands):
        return [Rows((x.shape[0], x.shape[1]), x.stride(0), True, False) for x in operands]
    if may_transpose and all(lies_in_rows(x.t()) for x in operands):
        return [Rows((x.shape[1], x.shape[0]), x.stride(1), False, False) for x in operands]
    return [Rows((x.shape[0], x.shape[1]), x.shape[1], True, True) for x in operands]


@triton.jit
def add_product(acc, a, b, BK: tl.constexpr, FAST: tl.constexpr):
    """Return `acc + a @ b` in float32, of blocks [M, BK] and [BK, N].

    Hopper's tensor cores add float8 products with about 14 bits. Unless that is allowed (FAST), what one step of BK has
    added is added to the sum in float32, as cuBLAS does without `use_fast_accum`.
    """
    if a.dtype.primitive_bitwidth == 8 and not FAST:
        return tl.dot(a, b, acc, max_num_imprecise_acc=BK)
    return tl.dot(a, b, acc)
