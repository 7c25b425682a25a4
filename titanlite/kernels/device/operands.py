"""Operands as TMA can read them: matrices with contiguous rows, whose address and stride are multiples of 16 bytes.

Whether an operand is read by rows or by columns, and how a copy of it is laid out, depends on its strides alone, not on
its address: strides are part of a compiled kernel's key.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor


def lies_in_rows(matrix: Tensor) -> bool:
    """Return whether TMA can read the rows of a matrix. Its address is not checked."""
    row, column = matrix.stride()
    return column == 1 and row > 0 and row * matrix.dtype.itemsize % 16 == 0


def aligned(matrix: Tensor) -> Tensor:
    """Return the matrix, or a copy with the same strides if its address is not a multiple of 16 bytes."""
    if matrix.data_ptr() % 16:
        return matrix.new_empty_strided(matrix.shape, matrix.stride()).copy_(matrix)
    return matrix


class Rows(NamedTuple):
    """The row-major matrix that kernels read for an operand [N, K] of a product."""

    shape: tuple[int, int]  # of the matrix: [N, K], or [K, N] if not `k_major`
    stride: int  # elements from row to row
    k_major: bool  # whether rows are along K
    copied: bool  # whether the operand must be copied first

    def placed(self, operand: Tensor, transposed: bool = False) -> Tensor:
        """Return an operand, or a copy of it, as kernels can read it. transposed: the operand is passed as [K, N]."""
        if self.copied:  # not `contiguous()`, which keeps any stride of a dim of length 1
            return (operand.t() if transposed else operand).clone(memory_format=torch.contiguous_format)
        return aligned(operand)


def rows_of(operands: Sequence[Tensor], may_transpose: bool) -> list[Rows]:
    """Choose how kernels read operands [N, K]: all along K, all along N if `may_transpose`, or all as copies.
    Depends only on shapes and strides."""
    if all(lies_in_rows(x) for x in operands):
        return [Rows((x.shape[0], x.shape[1]), x.stride(0), True, False) for x in operands]
    if may_transpose and all(lies_in_rows(x.t()) for x in operands):
        return [Rows((x.shape[1], x.shape[0]), x.stride(1), False, False) for x in operands]
    return [Rows((x.shape[0], x.shape[1]), x.shape[1], True, True) for x in operands]


@triton.jit
def add_product(acc, a, b, BK: tl.constexpr, FAST: tl.constexpr):
    """Return `acc + a @ b` in float32, for blocks a [M, BK] and b [BK, N].

    Hopper's tensor cores add float8 products with a precision of about 14 bits. Without FAST, each sum of BK products
    is added in float32, as in cuBLAS without `use_fast_accum`.
    """
    if a.dtype.primitive_bitwidth == 8 and not FAST:
        return tl.dot(a, b, acc, max_num_imprecise_acc=BK)
    return tl.dot(a, b, acc)
