"""Device code of `titanlite.kernels.float8_cast`: maxima, casts and transposes. `block_cast` has casts by blocks."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from titanlite.kernels.device.launch import cdiv, launch
from titanlite.kernels.float8_scales import EPS as LEAST

EPS = tl.constexpr(LEAST)
ROWS, COLUMNS = 128, 128
"""Sizes of a tile of float8 numbers, such that threads write 128 consecutive bytes together."""
CHUNK, WIDTH = 1024, 128
"""Rows and columns of which a thread block finds the maxima."""


@triton.jit
def _inverse(x):
    """Return 1 / x in float32, correctly rounded if x and 1 / x are normal: an approximation and two Newton steps.

    For a mantissa of all ones the result is only as exact as the approximation. All mantissas are checked by
    `tests/unit/kernels/test_float8_cast.py`. `tl.div_rn` has branches, at each of which threads wait
    (scripts/bench/float8_cast.py, 1×128 both ways).
    """
    y = tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    y = tl.fma(tl.fma(-x, y, 1.0), y, y)
    return tl.fma(tl.fma(-x, y, 1.0), y, y)


@triton.jit
def _quotient(most, value):
    """Return `most` / `value`, correctly rounded, for values from 1e-12 to infinity.

    Values are scaled first, because the greatest have no normal inverse. The result equals the quotient in float64
    rounded to float32, since 53 ≥ 2·24 + 2 bits.
    """
    value_scaled = value * 2.0**-30
    y = _inverse(value_scaled)
    quotient = most * y
    quotient = tl.fma(tl.fma(-quotient, value_scaled, most), y, quotient) * 2.0**-30
    return tl.where(value == float("inf"), 0.0, quotient)


@triton.jit
def scale_from_amax(amax, most, POW2: tl.constexpr):
    """Return scales and their inverses as `float8_scales.scale_of` does. amax: maxima, as bits of float32; most: the
    greatest float8 number; POW2: round scales down to powers of two."""
    if POW2:
        amax = tl.maximum(amax, tl.full((), EPS, tl.float32).to(tl.int32, bitcast=True))
        top = most.to(tl.int32, bitcast=True)
        exponent = 254 + (top >> 23) - 127 - ((amax + (0x7FFFFF - (top & 0x7FFFFF))) >> 23)
        scale = tl.where(amax < 0x7F800000, exponent << 23, 0x7FC00000).to(tl.float32, bitcast=True)
        scale_inv = tl.where(amax < 0x7F800000, (254 - exponent) << 23, 0x7FC00000).to(tl.float32, bitcast=True)
    else:
        value = amax.to(tl.float32, bitcast=True)
        # In float64, 1 / EPS is exactly 10¹², and a division would have branches.
        least = (most.to(tl.float64) * tl.full((), 1 / EPS, tl.float64)).to(tl.float32)
        scale = tl.where(value <= EPS, least, _quotient(most, value))  # as a float32, EPS is rounded down
        scale_inv = tl.where(scale == 0, float("inf"), _inverse(scale))
    return scale, scale_inv


@triton.jit
def to_bytes(value, dtype: tl.constexpr):
    """Cast float32 to float8. Numbers out of range saturate and NaN stays NaN, as with PTX's `.satfinite` (SM89 and
    later). Triton's interpreter does not ensure that."""
    return value.to(dtype)


@triton.jit
def _of_greater_size(a, b):
    """Return the greater absolute value of two float32 numbers, with an arbitrary sign; NaN if either is NaN."""
    return tl.inline_asm_elementwise(
        "max.NaN.xorsign.abs.f32 $0, $1, $2;", "=f,f,f", [a, b], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def _source(sources, m, M, NAMED: tl.constexpr):
    """Return the source rows of the result's rows `m`, and which of them exist. NAMED: they are `sources[m]`, -1 for
    none; otherwise they are `m`, of M in all."""
    row, there = m, m < M
    if NAMED:
        row = tl.load(sources + m, mask=there, other=-1)
        there = row >= 0
    return row, there


@triton.jit
def _cast_amax(
    x, factors, sources, out, M, K, stride,
    BY_COLUMN: tl.constexpr, NAMED: tl.constexpr, CHUNK: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Store the maximum of |x · factors|, BY_COLUMN or of the whole matrix, as bits of a float32. NaN is greatest."""
    k = tl.program_id(0) * BK + tl.arange(0, BK)
    most = tl.zeros([BM, BK], tl.float32)
    first = tl.program_id(1) * CHUNK
    for start in tl.static_range(0, CHUNK, BM):  # unrolled, so that the loads of all iterations are in flight together
        m = first + start + tl.arange(0, BM)
        row, there = _source(sources, m, M, NAMED)
        inside = there[:, None] & (k < K)[None, :]
        value = tl.load(x + row[:, None].to(tl.int64) * stride + k[None, :], mask=inside, other=0.0).to(tl.float32)
        most = _of_greater_size(most, value * tl.load(factors + m, mask=m < M, other=0.0)[:, None])
    by_column = tl.max(most.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0)
    if BY_COLUMN:
        tl.atomic_max(out + k, by_column, mask=k < K, sem="relaxed")
    else:
        tl.atomic_max(out, tl.max(by_column, 0), sem="relaxed")


@triton.jit
def _cast_transpose(
    x, factors, sources, amax, out, scale_invs, M, K, stride, most,
    BY_COLUMN: tl.constexpr, POW2: tl.constexpr, NAMED: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    k = tl.program_id(1) * BK + tl.arange(0, BK)
    row, there = _source(sources, m, M, NAMED)
    inside = there[:, None] & (k < K)[None, :]
    at = k if BY_COLUMN else k * 0
    scale, scale_inv = scale_from_amax(tl.load(amax + at, mask=k < K, other=0), most, POW2)
    value = tl.load(x + row[:, None].to(tl.int64) * stride + k[None, :], mask=inside, other=0.0).to(tl.float32)
    value = value * tl.load(factors + m, mask=m < M, other=0.0)[:, None]
    byte = to_bytes(value * scale[None, :], out.dtype.element_ty)
    tl.store(out + k[:, None].to(tl.int64) * M + m[None, :], byte.T, mask=(k < K)[:, None] & (m < M)[None, :])
    if tl.program_id(0) == 0:
        tl.store(scale_invs + at, scale_inv, mask=k < K)


@triton.jit
def _transpose(x, sources, out, M, K, NAMED: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr):
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    k = tl.program_id(1) * BK + tl.arange(0, BK)
    row, there = _source(sources, m, M, NAMED)
    byte = tl.load(x + row[:, None].to(tl.int64) * K + k[None, :], mask=there[:, None] & (k < K)[None, :], other=0)
    tl.store(out + k[:, None].to(tl.int64) * M + m[None, :], byte.T, mask=(k < K)[:, None] & (m < M)[None, :])


@triton.jit
def _cast_rows(x, scale, out, scale_invs, K, most, KNOWN: tl.constexpr, BK: tl.constexpr):
    row = tl.program_id(0)
    k = tl.arange(0, BK)
    x += row.to(tl.int64) * K
    out += row.to(tl.int64) * K
    first = tl.load(x + k, mask=k < K, other=0.0).to(tl.float32)  # the whole row, if K ≤ BK
    if KNOWN:
        by = tl.load(scale)
    else:
        amax = tl.abs(first).to(tl.int32, bitcast=True)
        for start in range(BK, K, BK):
            value = tl.abs(tl.load(x + start + k, mask=start + k < K, other=0.0).to(tl.float32))
            amax = tl.maximum(amax, value.to(tl.int32, bitcast=True))
        by, scale_inv = scale_from_amax(tl.max(amax, 0), most, POW2=True)
        tl.store(scale_invs + row, scale_inv)
    tl.store(out + k, to_bytes(first * by, out.dtype.element_ty), mask=k < K)
    for start in range(BK, K, BK):
        value = tl.load(x + start + k, mask=start + k < K, other=0.0).to(tl.float32) * by
        tl.store(out + start + k, to_bytes(value, out.dtype.element_ty), mask=start + k < K)


def launch_cast_rows(x: Tensor, dtype: torch.dtype, after: Tensor | None = None) -> tuple[Tensor, Tensor]:
    out = torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)
    return out, launch_cast_into(x, None, out)


def launch_cast_into(x: Tensor, scale: Tensor | None, out: Tensor) -> Tensor:
    x, known = x.contiguous(), scale is not None
    M, K = x.shape
    scale_inv = x.new_empty((0 if known else M, 1), dtype=torch.float32)
    tensors, BK = (x, scale, out, scale_inv), min(triton.next_power_of_2(K), 4096)
    launch(
        _cast_rows, (K, x.dtype, out.dtype, known), M, tensors,
        lambda: (*tensors, K, torch.finfo(out.dtype).max, known, BK), num_warps=8,
    )  # fmt: skip
    return scale_inv


def launch_cast_transpose(
    x: Tensor,
    factors: Tensor,
    by_column: bool,
    dtype: torch.dtype,
    pow2: bool,
    after: Tensor | None = None,
    sources: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    x, factors = x if x.stride(1) == 1 else x.contiguous(), factors.contiguous()
    M, K, named = len(factors), x.shape[1], sources is not None
    amax = torch.zeros(K if by_column else 1, dtype=torch.int32, device=x.device)
    out, scale_inv = x.new_empty((K, M), dtype=dtype), factors.new_empty((K, 1) if by_column else ())
    stride = x.stride(0)
    key = M, K, stride, x.dtype, dtype, by_column, pow2, named
    launch(
        _cast_amax, key, (cdiv(K, WIDTH), cdiv(M, CHUNK)), (x, factors, sources, amax),
        lambda: (x, factors, sources, amax, M, K, stride, by_column, named, CHUNK, 32, WIDTH), num_warps=4,
    )  # fmt: skip
    tensors = x, factors, sources, amax, out, scale_inv
    launch(
        _cast_transpose, key, (cdiv(M, ROWS), cdiv(K, COLUMNS)), tensors,
        lambda: (*tensors, M, K, stride, torch.finfo(dtype).max, by_column, pow2, named, ROWS, COLUMNS), num_warps=4,
    )  # fmt: skip
    return out, scale_inv


def launch_transpose(x: Tensor, after: Tensor | None = None, sources: Tensor | None = None) -> Tensor:
    x = x.contiguous()
    M, K = len(x) if sources is None else len(sources), x.shape[1]
    out = x.new_empty((K, M))
    tensors = x.view(torch.uint8), sources, out.view(torch.uint8)
    key, grid = (M, K, sources is not None), (cdiv(M, ROWS), cdiv(K, 128))
    launch(_transpose, key, grid, tensors, lambda: (*tensors, *key, ROWS, 128), num_warps=8)
    return out
