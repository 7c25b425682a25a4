"""Device code of `titanlite.kernels.symmetric_product`: a thread block for each tile on or below the diagonal.

It writes the tile, and the same turned above the diagonal. Blocks of tiles above it end at once.
"""

import triton
import triton.language as tl
from torch import Tensor

from titanlite.kernels.device.launch import Blocks, cdiv, launch

TILE = 128
STEP = 64
STAGES = 4
WARPS = 8


@triton.jit
def _symmetric_product(
    x, added, out, alpha, beta, R, C,
    TILE: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """x: descriptor of [B·R, C]; a tile that reaches into the next matrix stores nothing of it."""
    tiles = tl.cdiv(R, TILE)
    i = tl.program_id(0) // tiles
    j = tl.program_id(0) % tiles
    if j <= i:
        batch = tl.program_id(1)
        sums = tl.zeros((TILE, TILE), dtype=tl.float32)
        for k in range(0, C, STEP):
            a = x.load([batch * R + i * TILE, k])
            b = x.load([batch * R + j * TILE, k])
            sums = tl.dot(a, b.T, sums)
        rows = i * TILE + tl.arange(0, TILE)
        columns = j * TILE + tl.arange(0, TILE)
        first = batch.to(tl.int64) * R * R
        inside = (rows < R)[:, None] & (columns < R)[None, :]
        at = rows.to(tl.int64)[:, None] * R + columns[None, :]
        sums *= alpha
        if added is not None:
            sums += beta * tl.load(added + first + at, mask=inside, other=0.0).to(tl.float32)
        values = sums.to(out.dtype.element_ty)
        tl.store(out + first + at, values, mask=inside)
        if j < i:
            turned = (columns < R)[:, None] & (rows < R)[None, :]
            above = columns.to(tl.int64)[:, None] * R + rows[None, :]
            tl.store(out + first + above, values.T, mask=turned)


def launch_symmetric_product(x: Tensor, added: Tensor | None, alpha: float, beta: float) -> Tensor:
    """Launch the kernel; arguments as of `titanlite.kernels.symmetric_product.symmetric_product`."""
    B, R, C = x.shape
    x, out = x.contiguous(), x.new_empty(B, R, R)
    added = None if added is None else added.contiguous()
    launch(
        _symmetric_product, (B, R, C, alpha, beta, added is None, x.dtype), (cdiv(R, TILE) ** 2, B), (x, added, out),
        lambda: (Blocks(x, (B * R, C), C, (TILE, STEP)), added, out, alpha, beta, R, C, TILE, STEP),
        num_warps=WARPS, num_stages=STAGES,
    )  # fmt: skip
    return out
