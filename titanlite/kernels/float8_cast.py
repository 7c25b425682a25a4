"""Float8 casts that are outside of compiled graphs, or that compilers make slow, such as casts with a transpose.

Hopper multiplies float8 matrices only along their rows, so both operands of a weight-gradient GEMM need the tokens
along their rows. One operand is transposed while it is cast; the other has been cast before, and its bytes are
transposed. Compilers write a transpose byte by byte. The kernels here write 128 bytes together
(`titanlite/kernels/device/float8_cast.py`).
"""

import torch
from torch import Tensor

from titanlite.kernels.float8_scales import BLOCK, cast_by_amax, cast_to, empty_blocks, scale_of
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
    """Cast the transpose of `x · factors`, of all rows of `x` or of selected ones.

    Args:
        x: [M, K], bfloat16, float16, float32 or float8; rows contiguous.
        factors: [M, 1] float32, one for each row of `x`, or for each of the `sources`.
        by_column: whether each column of `x` has its own scale; otherwise one scale is for all.
        dtype: float8.
        pow2: round scales down to a power of two.
        after, sources: see `transpose`.

    Returns:
        Bytes [K, M], contiguous; and their inverse scales, [K, 1] or [] float32.
    """
    x = x if sources is None else _named_rows(x.float(), sources)
    qdata, scale_inv = cast_by_amax((x.float() * factors).t(), by_column, dtype, pow2)
    return qdata.contiguous(), scale_inv


@operator("transpose", "float8_cast.launch_transpose")
def transpose(x: Tensor, after: Tensor | None = None, sources: Tensor | None = None) -> Tensor:
    """Transpose float8 bytes, of all rows or of selected ones.

    Args:
        x: [M, K] float8, contiguous.
        after: a tensor that must be computed first; it is not read. A weight is transposed after a gradient: otherwise
            a compiler might do so in forward and keep the result for backward, although FSDP gathers the weight again.
        sources: [M'] int32, the row of x for each column of the result; -1: zeros. None: all rows in order.

    Returns:
        [K, M], or [K, M'], contiguous.
    """
    return (x if sources is None else _named_rows(x.float(), sources).to(x.dtype)).t().contiguous()


def _named_rows(x: Tensor, sources: Tensor) -> Tensor:
    return torch.where((sources >= 0)[:, None], x[sources.clamp(min=0).long()], 0)


@operator("cast_rows", "float8_cast.launch_cast_rows")
def cast_rows(x: Tensor, dtype: torch.dtype, after: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Cast each row to float8, scaled by its own power of two.

    Args:
        x: [M, K], bfloat16, float16 or float32; contiguous.
        dtype: float8.
        after: see `transpose`.

    Returns:
        Bytes [M, K], and their inverse scales, [M, 1] float32.
    """
    qdata, scale_inv = cast_by_amax(x, True, dtype, pow2=True)
    return qdata.contiguous(), scale_inv


@operator("cast_into", "float8_cast.launch_cast_into", "(Tensor x, Tensor? scale, Tensor(a!) out) -> Tensor")
def cast_into(x: Tensor, scale: Tensor | None, out: Tensor) -> Tensor:
    """Cast to float8 into `out` with as many elements as `x`: `x · scale`, [] float32, or as `cast_rows` with None.

    Returns:
        Inverse scales of rows, [M, 1] float32, or [0, 1] if the scale is known.
    """
    if scale is None:
        qdata, scale_inv = cast_rows.definition(x, out.dtype)
    else:
        qdata, scale_inv = cast_to(x, scale, out.dtype), x.new_empty((0, 1), dtype=torch.float32)
    out.view_as(x).copy_(qdata)
    return scale_inv


@operator("cast_blocks", "block_cast.launch_cast_blocks")
def cast_blocks(
    x: Tensor, rows: int, rows_transposed: int, dtype: torch.dtype, pow2: bool, after: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Cast a matrix and its transpose to float8, with a scale per block. The matrix is read once.

    Args:
        x: [M, K], bfloat16, float16 or float32; M and K are multiples of 128, rows contiguous.
        rows: rows of a block of `x`, 1 or 128; a block has 128 columns. 0: `x` itself is not cast.
        rows_transposed: rows of a block of the transpose, 1 or 128. 0: the transpose is not cast.
        dtype: float8.
        pow2: round scales down to a power of two.
        after: see `transpose`.

    Returns:
        Bytes [M, K] and inverse scales [M/rows, K/128] float32; then bytes and inverse scales of the transpose. The
        results of a cast that is not made are empty. Scales of blocks of one row have contiguous columns, for cuBLASLt.
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
