"""Matrices for TMA: contiguous rows, whose address and stride are multiples of 16 bytes.

Strides alone decide whether rows or columns are read, and determine the strides of a copy, because they are part of a
compiled kernel's key.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor


def lies_in_rows(matrix: Tensor) -> bool:
    """Check that TMA can read the rows of a matrix, apart from its address."""
    row, column = matrix.stride()
    return column == 1 and row > 0 and row * matrix.dtype.itemsize % 16 == 0


def aligned(matrix: Tensor) -> Tensor:
    """Return the tensor, or a copy with its strides if TMA cannot begin at its address."""
    if matrix.data_ptr() % 16:
        return matrix.new_empty_strided(matrix.shape, matrix.stride()).copy_(matrix)
    return matrix


class Rows(NamedTuple):
    """The row-major matrix in which kernels read an operand [N, K] of a product."""

    shape: tuple[int, int]  # of that matrix: [N, K], or [K, N]
    stride: int  # from row to row
    k_major: bool  # whether it is [N, K]
    copied: bool  # whether it has to be copied

    def placed(self, operand: Tensor, transposed: bool = False) -> Tensor:
        """Return an operand, [K, N] if `transposed`, or a copy that kernels can read."""
        if self.copied:  # `contiguous()` keeps any stride of a dim of length 1
            return (operand.t() if transposed else operand).clone(memory_format=torch.contiguous_format)
        return aligned(operand)


def rows_of(operands: Sequence[Tensor], may_transpose: bool) -> list[Rows]:
    """Describe how kernels read operands [N, K]: all along K, or all along N if they may. Depends only on shapes and
    strides."""
    if all(lies_in_rows(x) for x in operands):
        return [Rows((x.shape[0], x.shape[1]), x.stride(0), True, False) for x in operands]
    if may_transpose and all(lies_in_rows(x.t()) for x in operands):
        return [Rows((x.shape[1], x.shape[0]), x.stride(1), False, False) for x in operands]
    return [Rows((x.shape[0], x.shape[1]), x.shape[1], True, True) for x in operands]


@triton.jit
def add_product(acc, a, b, BK: tl.constexpr, FAST: tl.constexpr):
    """Return `acc + a @ b` in float32, of blocks [M, BK] and [BK, N].

    Hopper's tensor cores add float8 products with about 14 bits. Without FAST, the sum of each step of BK is added in
    float32, as by cuBLAS without `use_fast_accum`.
    """
    if a.dtype.primitive_bitwidth == 8 and not FAST:
        return tl.dot(a, b, acc, max_num_imprecise_acc=BK)
    return tl.dot(a, b, acc)
