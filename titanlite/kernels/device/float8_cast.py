"""Device code of `titanlite.kernels.float8_cast`: maxima, and casts and transposes by tiles."""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from titanlite.kernels.float8_cast import EPS as LEAST

EPS = tl.constexpr(LEAST)

ROWS, COLUMNS = 128, 64
"""Of a tile: 128 bytes are written together."""
CHUNK, WIDTH = 512, 128
"""Rows and columns whose maxima a thread block takes."""


@triton.jit
def _amax(
    x, factors, out, M, K, stride, BY_COLUMN: tl.constexpr, CHUNK: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr
):
    """Greatest size of `x · factors` by column, or of all, as the bits of a float32: those of NaN are the greatest."""
    k = tl.program_id(0) * BK + tl.arange(0, BK)
    most = tl.zeros([BM, BK], tl.int32)
    first = tl.program_id(1) * CHUNK
    for start in range(first, min(first + CHUNK, M), BM):
        m = start + tl.arange(0, BM)
        inside = (m < M)[:, None] & (k < K)[None, :]
        value = tl.load(x + m[:, None].to(tl.int64) * stride + k[None, :], mask=inside, other=0.0).to(tl.float32)
        value = tl.abs(value * tl.load(factors + m, mask=m < M, other=0.0)[:, None])
        most = tl.maximum(most, value.to(tl.int32, bitcast=True))
    by_column = tl.max(most, 0)
    if BY_COLUMN:
        tl.atomic_max(out + k, by_column, mask=k < K, sem="relaxed")
    else:
        tl.atomic_max(out, tl.max(by_column, 0), sem="relaxed")


@triton.jit
def _cast_turned(
    x, factors, scale, out, M, K, stride, most, BY_COLUMN: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr
):
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    k = tl.program_id(1) * BK + tl.arange(0, BK)
    inside = (m < M)[:, None] & (k < K)[None, :]
    value = tl.load(x + m[:, None].to(tl.int64) * stride + k[None, :], mask=inside, other=0.0).to(tl.float32)
    value = value * tl.load(factors + m, mask=m < M, other=0.0)[:, None]
    if BY_COLUMN:
        value = value * tl.load(scale + k, mask=k < K, other=0.0)[None, :]
    else:
        value = value * tl.load(scale)
    value = tl.clamp(value, -most, most, propagate_nan=tl.PropagateNan.ALL)
    byte = value.to(out.dtype.element_ty)
    at = k[:, None].to(tl.int64) * M + m[None, :]
    tl.store(out + at, byte.T, mask=(k < K)[:, None] & (m < M)[None, :])


@triton.jit
def _turn(x, out, M, K, BM: tl.constexpr, BK: tl.constexpr):
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    k = tl.program_id(1) * BK + tl.arange(0, BK)
    byte = tl.load(x + m[:, None].to(tl.int64) * K + k[None, :], mask=(m < M)[:, None] & (k < K)[None, :])
    tl.store(out + k[:, None].to(tl.int64) * M + m[None, :], byte.T, mask=(k < K)[:, None] & (m < M)[None, :])


@triton.jit
def _cast_rows(x, scale, out, unit, K, most, KNOWN: tl.constexpr, BK: tl.constexpr):
    row = tl.program_id(0)
    k = tl.arange(0, BK)
    x += row.to(tl.int64) * K
    out += row.to(tl.int64) * K
    if KNOWN:
        by = tl.load(scale)
    else:
        amax = tl.zeros([BK], tl.int32)
        for start in range(0, K, BK):
            value = tl.abs(tl.load(x + start + k, mask=start + k < K, other=0.0).to(tl.float32))
            amax = tl.maximum(amax, value.to(tl.int32, bitcast=True))  # NaN is the greatest
        widest = tl.max(amax, 0).to(tl.float32, bitcast=True).to(tl.float64)
        by = (most.to(tl.float64) / tl.maximum(widest, EPS, propagate_nan=tl.PropagateNan.ALL)).to(tl.float32)
        by = libdevice.exp2(libdevice.floor(libdevice.log2(by)))
        tl.store(unit + row, tl.div_rn(1.0, by))
    for start in range(0, K, BK):
        value = tl.load(x + start + k, mask=start + k < K, other=0.0).to(tl.float32) * by
        value = tl.clamp(value, -most, most, propagate_nan=tl.PropagateNan.ALL)
        tl.store(out + start + k, value.to(out.dtype.element_ty), mask=start + k < K)


def cast_rows(x: Tensor, dtype: torch.dtype, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """`x · scale` as float8.

    Args:
        x: [M, K], contiguous.
        dtype: float8.
        scale: [] float32; for each row a power of two, so that it fits, if None.

    Returns:
        [M, K], and without a scale the value of one unit, [M, 1] float32.
    """
    M, K = x.shape
    out = torch.empty_like(x, dtype=dtype)
    unit = x.new_empty((0 if scale is not None else M, 1), dtype=torch.float32)
    BK = min(triton.next_power_of_2(K), 4096)
    _cast_rows[(M,)](x, scale, out, unit, K, torch.finfo(dtype).max, scale is not None, BK, num_warps=8)
    return out, unit


def amax(x: Tensor, factors: Tensor, by_column: bool) -> Tensor:
    """Greatest size of `x · factors`, float32.

    Args:
        x: [M, K], rows contiguous.
        factors: [M, 1], contiguous.
        by_column: or of all.

    Returns:
        [K, 1], or [].
    """
    M, K = x.shape
    out = factors.new_zeros((K, 1) if by_column else ())
    grid = triton.cdiv(K, WIDTH), triton.cdiv(M, CHUNK)
    bits = out.view(torch.int32)
    _amax[grid](x, factors, bits, M, K, x.stride(0), by_column, CHUNK, 64, WIDTH, num_warps=8)
    return out


def cast_turned(x: Tensor, factors: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """`(x · factors).T · scale` as float8.

    Args:
        x: [M, K], rows contiguous.
        factors: [M, 1], contiguous.
        scale: [K, 1] or [].
        dtype: float8.

    Returns:
        [K, M].
    """
    M, K = x.shape
    out = x.new_empty((K, M), dtype=dtype)
    grid = triton.cdiv(M, ROWS), triton.cdiv(K, COLUMNS)
    most = torch.finfo(dtype).max
    _cast_turned[grid](x, factors, scale, out, M, K, x.stride(0), most, scale.ndim > 0, ROWS, COLUMNS, num_warps=8)
    return out


def turn(x: Tensor) -> Tensor:
    """The transpose of float8 bytes [M, K], contiguous."""
    M, K = x.shape
    out = x.new_empty((K, M))
    grid = triton.cdiv(M, ROWS), triton.cdiv(K, 128)
    _turn[grid](x.view(torch.uint8), out.view(torch.uint8), M, K, ROWS, 128, num_warps=8)
    return out
