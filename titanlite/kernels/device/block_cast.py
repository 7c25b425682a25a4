"""Device code of `titanlite.kernels.float8_cast.cast_blocks`: a matrix and its transpose cast by blocks."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from titanlite.kernels.device.float8_cast import scale_from_amax, to_bytes
from titanlite.kernels.device.launch import launch
from titanlite.kernels.float8_scales import BLOCK, empty_blocks

_WORD = (
    "{{ .reg .b16 low, high; cvt.rn.satfinite.{0}x2.f32 low, $2, $1; cvt.rn.satfinite.{0}x2.f32 high, $4, $3;"
    " mov.b32 $0, {{low, high}}; }}"
)
E4M3_WORD, E5M2_WORD = tl.constexpr(_WORD.format("e4m3")), tl.constexpr(_WORD.format("e5m2"))


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def _larger_each(a, b):
    """Return the elementwise maximum. For 16-bit integers one instruction compares two pairs (SM90 and later)."""
    if a.dtype.primitive_bitwidth == 16:
        larger = tl.inline_asm_elementwise(
            "max.s16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.int16, is_pure=True, pack=2
        )
    else:
        larger = tl.maximum(a, b)
    return larger


@triton.jit
def _bits(value):
    """Return the bits of a number's absolute value, as an integer of the same width."""
    if value.dtype.primitive_bitwidth == 16:
        size = value.to(tl.int16, bitcast=True) & 0x7FFF
    else:
        size = value.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    return size


@triton.jit
def _greatest(size, axis: tl.constexpr, dtype: tl.constexpr):
    """Return the maximum of `_bits` along an axis, as the bits of a float32. `tl.max` would widen integers first."""
    return tl.reduce(size, axis, _larger).to(dtype, bitcast=True).to(tl.float32).to(tl.int32, bitcast=True)


@triton.jit
def _word(a, b, c, d, dtype: tl.constexpr):
    """Cast four float32 numbers to float8, saturating as `to_bytes` does, and pack them in a word, `a` lowest."""
    asm: tl.constexpr = E4M3_WORD if dtype == tl.float8e4nv else E5M2_WORD
    return tl.inline_asm_elementwise(asm, "=r,f,f,f,f", [a, b, c, d], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def _cast_blocks(
    x, out, scale_invs, out_transposed, scale_invs_transposed, M, K, stride, most,
    ROWS: tl.constexpr, ROWS_TRANSPOSED: tl.constexpr, POW2: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Cast one block of 128×128 and its transpose. The scales depend only on the block.

    ROWS, ROWS_TRANSPOSED: rows that share a scale, in the block and in its transpose: 1 or 128; 0: it is not cast.
    The block is read as four matrices, each of every fourth row. So a thread has four consecutive bytes of the
    transpose, and threads exchange words instead of bytes.
    """
    i, j = tl.program_id(0), tl.program_id(1)
    q = tl.arange(0, BLOCK // 4)
    m, k = i * BLOCK + 4 * q, j * BLOCK + tl.arange(0, BLOCK)
    at = x + m[:, None].to(tl.int64) * stride + k[None, :]
    a = tl.load(at)
    b = tl.load(at + stride)
    c = tl.load(at + 2 * stride)
    d = tl.load(at + 3 * stride)
    dtype: tl.constexpr = x.dtype.element_ty
    if ROWS_TRANSPOSED:
        sizes = _larger_each(_larger_each(_bits(a), _bits(b)), _larger_each(_bits(c), _bits(d)))
        amax = _greatest(sizes, 0, dtype)
        if ROWS_TRANSPOSED == 1:
            at_scale_inv = i * K + k
        else:
            amax, at_scale_inv = tl.zeros_like(amax) + tl.max(amax, 0), k * 0 + j * (M // BLOCK) + i
        scale, scale_inv = scale_from_amax(amax, most, POW2)
        tl.store(scale_invs_transposed + at_scale_inv, scale_inv)
        by = scale[None, :]
        word = _word(
            a.to(tl.float32) * by,
            b.to(tl.float32) * by,
            c.to(tl.float32) * by,
            d.to(tl.float32) * by,
            out_transposed.dtype.element_ty,
        )
        words = out_transposed.to(tl.pointer_type(tl.int32))
        tl.store(words + k[:, None].to(tl.int64) * (M // 4) + (i * (BLOCK // 4) + q)[None, :], word.T)
    if ROWS:
        even = tl.join(_greatest(_bits(a), 1, dtype), _greatest(_bits(c), 1, dtype))
        odd = tl.join(_greatest(_bits(b), 1, dtype), _greatest(_bits(d), 1, dtype))
        amax = tl.join(even, odd).reshape([BLOCK])  # rows in order: one of a, b, c and d in turn
        row = i * BLOCK + tl.arange(0, BLOCK)
        if ROWS == 1:
            at_scale_inv = j * M + row
        else:
            amax, at_scale_inv = tl.zeros_like(amax) + tl.max(amax, 0), row * 0 + i * (K // BLOCK) + j
        scale, scale_inv = scale_from_amax(amax, most, POW2)
        tl.store(scale_invs + at_scale_inv, scale_inv)
        even, odd = tl.split(scale.reshape([BLOCK // 4, 2, 2]))
        of_a, of_c = tl.split(even)
        of_b, of_d = tl.split(odd)
        qdata: tl.constexpr = out.dtype.element_ty
        at = out + m[:, None].to(tl.int64) * K + k[None, :]
        tl.store(at, to_bytes(a.to(tl.float32) * of_a[:, None], qdata))
        tl.store(at + K, to_bytes(b.to(tl.float32) * of_b[:, None], qdata))
        tl.store(at + 2 * K, to_bytes(c.to(tl.float32) * of_c[:, None], qdata))
        tl.store(at + 3 * K, to_bytes(d.to(tl.float32) * of_d[:, None], qdata))


def launch_cast_blocks(
    x: Tensor, rows: int, rows_transposed: int, dtype: torch.dtype, pow2: bool, after: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    M, K = x.shape
    if M % BLOCK or K % BLOCK:
        raise ValueError(f"cast_blocks: {tuple(x.shape)}; want multiples of {BLOCK}")
    out = *empty_blocks(x, rows, dtype), *empty_blocks(x.t(), rows_transposed, dtype)
    x = x if x.stride(1) == 1 else x.contiguous()
    tensors, stride = (x, *out), x.stride(0)
    launch(
        _cast_blocks, (M, K, stride, x.dtype, dtype, rows, rows_transposed, pow2),
        (M // BLOCK, K // BLOCK), tensors,
        lambda: (*tensors, M, K, stride, torch.finfo(dtype).max, rows, rows_transposed, pow2, BLOCK), num_warps=4,
    )  # fmt: skip
    return out
