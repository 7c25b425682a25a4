"""Device code of `titanlite.kernels.symmetric_product`: a thread block for each tile on or below the diagonal.

The thread block also writes the tile's transpose, which lies above the diagonal.
"""

import triton
import triton.language as tl
from torch import Tensor

from titanlite.kernels.device.launch import Blocks, cdiv, launch

TILE = 128
STEP = 64
STAGES = 5
WARPS = 8


@triton.jit
def _symmetric_product(
    x, y, added, out, alpha, beta, diagonal, R, C,
    TILE: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Store one tile of `alpha · x yᵀ + beta · added + diagonal · I`, and its transpose. x, y: descriptors of [B·R, C];
    if a tile reads rows of the next matrix, their results are not stored."""
    place = tl.program_id(0)  # number of the tile, row by row of the lower triangle
    i = ((tl.sqrt(8.0 * place + 1.0) - 1.0) / 2.0).to(tl.int32)
    i += ((i + 1) * (i + 2) // 2 <= place).to(tl.int32)  # correct i, because the root is rounded
    i -= (i * (i + 1) // 2 > place).to(tl.int32)
    j = place - i * (i + 1) // 2
    batch = tl.program_id(1)
    sums = tl.zeros((TILE, TILE), dtype=tl.float32)
    for k in range(0, C, STEP):
        a = x.load([batch * R + i * TILE, k])
        b = y.load([batch * R + j * TILE, k])
        sums = tl.dot(a, b.T, sums)
    rows = i * TILE + tl.arange(0, TILE)
    columns = j * TILE + tl.arange(0, TILE)
    first = batch.to(tl.int64) * R * R
    inside = (rows < R)[:, None] & (columns < R)[None, :]
    at = rows.to(tl.int64)[:, None] * R + columns[None, :]
    sums *= alpha
    if added is not None:
        sums += beta * tl.load(added + first + at, mask=inside, other=0.0).to(tl.float32)
    sums += tl.where(rows[:, None] == columns[None, :], diagonal, 0.0)
    values = sums.to(out.dtype.element_ty)
    if j < i:
        tl.store(out + first + at, values, mask=inside)
        turned = (columns < R)[:, None] & (rows < R)[None, :]
        above = columns.to(tl.int64)[:, None] * R + rows[None, :]
        tl.store(out + first + above, values.T, mask=turned)
    else:
        tl.store(out + first + at, values, mask=inside)


def launch_symmetric_product(
    x: Tensor, y: Tensor, added: Tensor | None, alpha: float, beta: float, diagonal: float
) -> Tensor:
    B, R, C = x.shape
    x, y, out = x.contiguous(), y.contiguous(), x.new_empty(B, R, R)
    added = None if added is None else added.contiguous()
    n_tiles, numbers = cdiv(R, TILE) * (cdiv(R, TILE) + 1) // 2, (alpha, beta, diagonal)
    launch(
        _symmetric_product, (B, R, C, numbers, added is None, x.dtype), (n_tiles, B), (x, y, added, out),
        lambda: (
            Blocks(x, (B * R, C), C, (TILE, STEP)), Blocks(y, (B * R, C), C, (TILE, STEP)), added, out, *numbers, R, C,
            TILE, STEP,
        ),
        num_warps=WARPS, num_stages=STAGES,
    )  # fmt: skip
    return out
