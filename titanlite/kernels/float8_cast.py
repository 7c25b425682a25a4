"""Float8 casts that compilers do badly, as those that transpose a matrix, or that stand outside of any graph.

Hopper multiplies float8 along rows only, so both operands of a weight-gradient GEMM must have tokens along their rows:
one is cast so, the other was cast before and is only transposed. Compilers write such a transpose byte by byte; the
kernels here write 128 together (`titanlite/kernels/device/float8_cast.py`).
"""

import torch
from torch import Tensor

from titanlite.kernels.float8_scales import BLOCK, cast_to, empty_blocks, scale_of
from titanlite.kernels.operators import operator


@operator("cast_transpose", "float8_cast.launch_cast_transpose")
def cast_transpose(
    x: Tensor,
    factors: Tensor,
    by_column: bool,
    dtype: torch.dtype,
    pow2: bool,
    after: Tensor | None = None,
    sources: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Cast the transpose of `x · factors`, of all rows of x or of those that are named.

    Args:
        x: [M, K], bfloat16, float16, float32 or float8; rows contiguous.
        factors: [M, 1] float32, one for each row of `x`.
        by_column: whether each of x's columns has a scale; one for all otherwise.
        dtype: float8.
        pow2: round scales down to a power of two.
        after: as for `transpose`.
        sources: as for `transpose`; there is a factor for each of them.

    Returns:
        Bytes [K, M], contiguous; and their inverse scales, [K, 1] or [] float32.
    """
    x = x if sources is None else _named_rows(x.float(), sources)
    transposed = (x.float() * factors).t()  # [K, M]
    amax = transposed.abs().amax(1, keepdim=True) if by_column else transposed.abs().amax()
    scale, scale_inv = scale_of(amax, dtype, pow2)
    return cast_to(transposed, scale, dtype).contiguous(), scale_inv


@operator("transpose", "float8_cast.launch_transpose")
def transpose(x: Tensor, after: Tensor | None = None, sources: Tensor | None = None) -> Tensor:
    """Transpose float8 bytes, of all rows or of those that are named.

    Args:
        x: [M, K] float8, contiguous.
        after: what must be there before, and is not read. Of a weight this is a gradient: a compiler would as soon
            transpose the weight in forward, and keep it until backward although FSDP gathers it anew.
        sources: [M'] int32, the row of x that each column of the result is; -1: zeros. None: one after the other.

    Returns:
        [K, M], or [K, M'], contiguous.
    """
    return (x if sources is None else _named_rows(x.float(), sources).to(x.dtype)).t().contiguous()


def _named_rows(x: Tensor, sources: Tensor) -> Tensor:
    return torch.where((sources >= 0)[:, None], x[sources.clamp(min=0).long()], 0)


@operator("cast_rows", "float8_cast.launch_cast_rows")
def cast_rows(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cast each row by a power of two of its own.

    Args:
        x: [M, K], bfloat16, float16 or float32; contiguous.
        dtype: float8.

    Returns:
        Bytes [M, K], and their inverse scales, [M, 1] float32.
    """
    scale, scale_inv = scale_of(x.abs().amax(1, keepdim=True), dtype, pow2=True)
    return cast_to(x, scale, dtype).contiguous(), scale_inv


@operator("cast_by", "float8_cast.launch_cast_by")
def cast_by(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast by a scale that is known.

    Args:
        x: [M, K], bfloat16, float16 or float32; contiguous.
        scale: [] float32.
        dtype: float8.

    Returns:
        Bytes [M, K] of `x · scale`.
    """
    return cast_to(x, scale, dtype).contiguous()


@operator("cast_blocks", "block_cast.launch_cast_blocks")
def cast_blocks(
    x: Tensor, rows: int, rows_transposed: int, dtype: torch.dtype, pow2: bool, after: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Cast a matrix by blocks, and its transpose, reading it once.

    Args:
        x: [M, K], bfloat16, float16 or float32; M and K are multiples of 128, rows contiguous.
        rows: of a block of `x`, 1 or 128, its columns being 128; 0 if it is not wanted.
        rows_transposed: the same of its transpose.
        dtype: float8.
        pow2: round scales down to a power of two.
        after: as for `transpose`.

    Returns:
        Bytes [M, K], and their inverse scales, [M/rows, K/128] float32; both again for the transpose. What is not
        wanted has no elements. By blocks of one row, scales are contiguous along their columns, as cuBLASLt has it.
    """

    def one(x: Tensor, rows: int) -> tuple[Tensor, Tensor]:
        qdata, scale_invs = empty_blocks(x, rows, dtype)
        if rows:
            blocks = x.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, rows))
            scale, scale_inv = scale_of(blocks.abs().amax((1, 3)), dtype, pow2)
            qdata.copy_(cast_to(blocks, scale[:, None, :, None], dtype).flatten(2).flatten(0, 1))
            scale_invs.copy_(scale_inv)
        return qdata, scale_invs

    return *one(x, rows), *one(x.t(), rows_transposed)
