"""Device code of `titanlite.kernels.routing` that copies tokens to the rows of their experts, and adds up rows.

All kernels are bound by memory, and access 16 bytes of a row at once. A kernel whose thread blocks take tokens reads or
writes each token once. A kernel whose thread blocks take rows reads a token once for each of its rows.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.jit import JITFunction

from titanlite.kernels.device.launch import cdiv, launch
from titanlite.kernels.routing import as_bytes

WIDEST = 2048
"""Most columns of a row that a thread block takes at once."""
BEHIND = tl.constexpr(128)
"""Rows of zeros that are written after the last row with a token: as many as a grouped matmul's tile has rows."""
NUMBERS = 8192
"""Numbers that a thread block copies or multiplies at once, over all its rows."""


@triton.jit
def is_far_behind(slots, row):
    """Return whether rows lie more than BEHIND rows after the last row with a token, where no kernel reads them."""
    return tl.load(slots + row - BEHIND, mask=row >= BEHIND, other=0) < 0


@triton.jit
def _gather_rows(x, slots, out, R, K: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr):
    r, d = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)[None, :]
    slot = tl.load(slots + r, mask=r < R, other=-1)
    token = (slot // K).to(tl.int64)[:, None]
    is_read = (r < R) & ~is_far_behind(slots, tl.minimum(r, R - 1))
    found = tl.load(x + token * D + d, mask=(slot >= 0)[:, None] & (d < D), other=0)
    tl.store(out + r.to(tl.int64)[:, None] * D + d, found, mask=is_read[:, None] & (d < D))


@triton.jit
def _combine_rows(
    o, rows, weights, out, M,
    HAS_WEIGHTS: tl.constexpr, K: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    m, d = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS), tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)[None, :]
    total = tl.zeros((TOKENS, WIDTH), tl.float32)
    for k in tl.static_range(K):
        row = tl.load(rows + m * K + k, mask=m < M, other=-1)
        found = tl.load(o + row.to(tl.int64)[:, None] * D + d, mask=(row >= 0)[:, None] & (d < D), other=0.0)
        found = found.to(tl.float32)
        if HAS_WEIGHTS:
            found *= tl.load(weights + m * K + k, mask=m < M, other=0.0)[:, None]
        total += found
    inside = (m < M)[:, None] & (d < D)
    tl.store(out + m.to(tl.int64)[:, None] * D + d, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _spread_rows(
    x, rows, weights, out, M,
    HAS_WEIGHTS: tl.constexpr, K: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    m, d = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS), tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)[None, :]
    token = tl.load(x + m.to(tl.int64)[:, None] * D + d, mask=(m < M)[:, None] & (d < D))
    for k in tl.static_range(K):
        row = tl.load(rows + m * K + k, mask=m < M, other=-1)
        own = token
        if HAS_WEIGHTS:
            weight = tl.load(weights + m * K + k, mask=m < M, other=0.0)[:, None]
            own = (token.to(tl.float32) * weight).to(out.dtype.element_ty)
        tl.store(out + row.to(tl.int64)[:, None] * D + d, own, mask=(row >= 0)[:, None] & (d < D))


@triton.jit
def _row_dots(
    grad, o, rows, out,
    K: tl.constexpr, D: tl.constexpr, SLOTS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    m, k = tl.program_id(0).to(tl.int64), tl.arange(0, SLOTS)
    row = tl.load(rows + m * K + k, mask=k < K, other=-1)
    dots = tl.zeros((SLOTS, WIDTH), tl.float32)
    for start in range(0, D, WIDTH):
        d = start + tl.arange(0, WIDTH)[None, :]
        own = tl.load(grad + m * D + d, mask=d < D, other=0.0).to(tl.float32)
        found = tl.load(o + row.to(tl.int64)[:, None] * D + d, mask=(row >= 0)[:, None] & (d < D), other=0.0)
        dots += own * found.to(tl.float32)
    tl.store(out + m * K + k, tl.sum(dots, 1), mask=k < K)


def launch_gather_rows(x: Tensor, slots: Tensor, top_k: int, after: Tensor | None = None) -> Tensor:
    x, slots = _plain_rows(x), slots.contiguous()
    R, D = len(slots), x.shape[1]
    out = x.new_empty(R, D)
    if out.numel():
        width, rows = tile_of(D, NUMBERS)
        tensors = as_bytes(x), slots, as_bytes(out)
        launch(
            _gather_rows, (R, top_k, D, x.element_size()), (cdiv(R, rows), cdiv(D, width)), tensors,
            lambda: (*tensors, R, top_k, D, width, rows), num_warps=_warps_for(width * rows),
        )  # fmt: skip
    return out


def launch_combine(o: Tensor, rows: Tensor, weights: Tensor | None) -> Tensor:
    out = o.new_empty(len(rows), o.shape[1])
    _launch_by_token(_combine_rows, _plain_rows(o), rows, weights, out)
    return out


def launch_spread_rows(
    x: Tensor, rows: Tensor, weights: Tensor | None, n_rows: int, after: Tensor | None = None
) -> Tensor:
    out = x.new_empty(n_rows, x.shape[1])
    if weights is None:
        _launch_by_token(_spread_rows, as_bytes(_plain_rows(x)), rows, None, as_bytes(out))
    else:
        _launch_by_token(_spread_rows, _plain_rows(x), rows, weights, out)
    return out


def launch_row_dots(grad: Tensor, o: Tensor, rows: Tensor) -> Tensor:
    (M, K), D = rows.shape, o.shape[1]
    tensors = _plain_rows(grad), _plain_rows(o), rows.contiguous(), o.new_empty(M, K, dtype=torch.float32)
    if M:
        slots = triton.next_power_of_2(K)
        width = min(triton.next_power_of_2(D), max(128, NUMBERS // slots))
        launch(
            _row_dots, (M, K, D, grad.dtype, o.dtype), M, tensors,
            lambda: (*tensors, K, D, slots, width), num_warps=_warps_for(width * slots),
        )  # fmt: skip
    return tensors[-1]


def _launch_by_token(kernel: JITFunction, given: Tensor, rows: Tensor, weights: Tensor | None, out: Tensor) -> None:
    (M, K), D, rows = rows.shape, given.shape[1], rows.contiguous()
    if weights is not None and weights.dtype != torch.float32:
        raise TypeError(f"rows of experts: weights are {weights.dtype} on a GPU; want float32")
    if M * D == 0:
        return
    width, tokens = tile_of(D, WIDEST)
    tensors = given, rows, rows if weights is None else weights.contiguous(), out
    launch(
        kernel, (M, K, D, given.dtype, weights is None), (cdiv(M, tokens), cdiv(D, width)), tensors,
        lambda: (*tensors, M, weights is not None, K, D, width, tokens), num_warps=_warps_for(width * tokens),
    )  # fmt: skip


def tile_of(D: int, numbers: int) -> tuple[int, int]:
    """Return how many of D columns a thread block takes at once, and how many rows: `numbers` elements in all."""
    width = min(WIDEST, triton.next_power_of_2(D))
    return width, numbers // width


def _warps_for(numbers: int) -> int:
    """Return how many warps take `numbers` elements: with at least eight per thread, and at most eight warps."""
    return min(8, max(1, numbers // 256))


def _plain_rows(x: Tensor) -> Tensor:
    if x.dtype == torch.float64:
        raise TypeError("rows of experts: float64 on a GPU; want at most float32, of which sums are")
    return x.contiguous()
