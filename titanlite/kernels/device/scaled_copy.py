"""Device code of `titanlite.kernels.scaled_copy`. Each thread block reads, perhaps transposes, and writes a tile.

It reads and writes rows of at least 128 bytes.
"""

import triton
import triton.language as tl
from torch import Tensor

from titanlite.kernels.device.launch import cdiv, launch

TILE = (16, 256)
TRANSPOSED = (64, 64)
"""Rows and columns of a tile of `x` that is transposed. Other tiles have the shape `TILE`."""
WARPS = 4


@triton.jit
def _scaled_copy(
    x, out, norms, factor, eps, R, C, x_batch, x_row, x_column, out_batch, out_row, out_column,
    TRANSPOSE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Scale one tile of a matrix [R, C] and store it in `out`. x_batch to out_column: strides, of which x_column and
    out_column (with TRANSPOSE, out_row) are usually 1."""
    across = tl.cdiv(C, COLUMNS)
    place, batch = tl.program_id(0), tl.program_id(1).to(tl.int64)
    rows = (place // across).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = (place % across).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    scale = factor
    if norms is not None:
        scale = tl.div_rn(factor, tl.maximum(tl.load(norms + batch), eps, propagate_nan=tl.PropagateNan.ALL))
    inside = (rows < R)[:, None] & (columns < C)[None, :]
    taken = tl.load(x + batch * x_batch + rows[:, None] * x_row + columns[None, :] * x_column, mask=inside)
    values = (taken.to(tl.float32) * scale).to(out.dtype.element_ty)
    out += batch * out_batch
    if TRANSPOSE:
        inside = (columns < C)[:, None] & (rows < R)[None, :]
        tl.store(out + columns[:, None] * out_column + rows[None, :] * out_row, values.T, mask=inside)
    else:
        tl.store(out + rows[:, None] * out_row + columns[None, :] * out_column, values, mask=inside)


def launch_scaled_copy(x: Tensor, out: Tensor, factor: float, norm: Tensor | None, eps: float) -> Tensor:
    given, norm = (x, out), None if norm is None else norm.contiguous()
    if x.stride(2) != 1:
        given = x.mT, out.mT
    (B, R, C), strides = given[0].shape, (*given[0].stride(), *given[1].stride())
    transpose = strides[-1] != 1
    rows, columns = tile = TRANSPOSED if transpose else TILE
    numbers = factor, eps, R, C, *strides
    launch(
        _scaled_copy, (B, numbers, norm is None, x.dtype, out.dtype), (cdiv(R, rows) * cdiv(C, columns), B),
        (x, out, norm), lambda: (x, out, norm, *numbers, transpose, *tile), num_warps=WARPS,
    )  # fmt: skip
    return out
