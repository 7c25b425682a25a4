"""Device code of the gradient of `titanlite.kernels.rms_norm`. A thread block takes a few rows at a time, read once.

The weight's gradient is a sum over rows. Each thread block adds up its own rows in order, and a second kernel adds up
the sums of all thread blocks, so that two runs give the same bits.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from titanlite.kernels.device.channel import multiprocessors
from titanlite.kernels.device.launch import cdiv, launch

NUMBERS = 1024
"""Numbers that a thread block holds at a time, or a row if a row is longer; 16 per thread if D is a power of two."""
WARPS = 24
"""Warps per multiprocessor that compute gradients. Its registers have room for no more."""
COLUMNS = 8
"""Columns of the weight's gradient that a thread block of the second kernel adds up."""


@triton.jit
def _rms_norm_grad(
    grad, x, weight, mean, rest, out, parts, M, eps,
    HAS_REST: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Store the gradient of `x` plus `rest` in `out`, and each thread block's part of the weight's gradient in `parts`,
    [blocks, D] float32. mean: [M], mean square of each row."""
    d = tl.arange(0, WIDTH)[None, :]
    w = tl.load(weight + d, mask=d < D, other=0.0).to(tl.float32)
    of_weight = tl.zeros((ROWS, WIDTH), tl.float32)
    for block in range(tl.program_id(0), tl.cdiv(M, ROWS), tl.num_programs(0)):
        m = block * ROWS + tl.arange(0, ROWS)
        at, inside = m.to(tl.int64)[:, None] * D + d, (m < M)[:, None] & (d < D)
        g = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
        h = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.load(mean + m, mask=m < M, other=1.0) + eps)[:, None]
        h *= scale
        of_weight += g * h
        g *= w
        g = scale * (g - h * (tl.sum(g * h, 1) / D)[:, None])
        if HAS_REST:
            g += tl.load(rest + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(out + at, g.to(out.dtype.element_ty), mask=inside)
    d = tl.arange(0, WIDTH)
    tl.store(parts + tl.program_id(0) * D + d, tl.sum(of_weight, 0), mask=d < D)


@triton.jit
def _add_parts(parts, out, N, D: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr):
    """Add up `parts`, [N, D], over the N thread blocks of `_rms_norm_grad`, to the weight's gradient `out`, [D]."""
    d = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(0, N, ROWS):
        n = first + tl.arange(0, ROWS)
        total += tl.load(parts + n[:, None] * D + d[None, :], mask=(n < N)[:, None] & (d < D)[None, :], other=0.0)
    tl.store(out + d, tl.sum(total, 0).to(out.dtype.element_ty), mask=d < D)


def launch_rms_norm_grad(
    grad: Tensor, x: Tensor, weight: Tensor, mean: Tensor, rest: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    shape, D = x.shape, x.shape[-1]
    grad, x, rest = (None if t is None else t.reshape(-1, D).contiguous() for t in (grad, x, rest))
    M, weight, mean = len(x), weight.contiguous(), mean.contiguous()
    width = triton.next_power_of_2(D)
    rows = max(1, NUMBERS // width)
    warps = min(16, max(2, triton.next_power_of_2(D // 512 * rows)))
    blocks = min(cdiv(M, rows), max(1, min(8, WARPS // warps)) * multiprocessors(x.device))
    out, of_weight = torch.empty_like(x), torch.empty_like(weight)
    parts = x.new_empty(blocks, D, dtype=torch.float32)
    if not M:
        return out.view(shape), of_weight.zero_()
    tensors = grad, x, weight, mean, x if rest is None else rest, out, parts
    launch(
        _rms_norm_grad, (M, D, eps, *(t.dtype for t in tensors), rest is None), blocks, tensors,
        lambda: (*tensors, M, eps, rest is not None, D, width, rows), num_warps=warps,
    )  # fmt: skip
    launch(
        _add_parts, (blocks, D, weight.dtype), cdiv(D, COLUMNS), (parts, of_weight),
        lambda: (parts, of_weight, blocks, D, COLUMNS, 128), num_warps=8,
    )  # fmt: skip
    return out.view(shape), of_weight
