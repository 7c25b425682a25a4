"""Device code of `titanlite.kernels.swiglu`: the gradient of the gate, and gate and gradient cast to float8.

With a scale for each row, a thread block computes a row once and keeps it in registers until its maximum is known.
With one scale for all rows, a first pass finds the maximum and stores nothing else.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from titanlite.kernels.device.float8_cast import scale_from_amax, to_bytes
from titanlite.kernels.device.launch import cdiv, launch
from titanlite.kernels.swiglu import BLOCK as COLUMNS

BLOCK = tl.constexpr(COLUMNS)
WIDEST = 128
"""Most blocks of 128 columns that a thread block keeps in registers. Wider rows are computed twice."""
PART, ROWS = 16, 16
"""Blocks of 128 columns, and rows, of which a thread block finds the maximum."""


@triton.jit
def gate_blocks(x, blocks, first, BLOCKS: tl.constexpr):
    """Load gate and up, [BLOCKS, 128] float32 each, from block `first` of a row on; zeros beyond block `blocks`."""
    n = first + tl.arange(0, BLOCKS)[:, None]
    at = x + n * 2 * BLOCK + tl.arange(0, BLOCK)[None, :]
    gate = tl.load(at, mask=n < blocks, other=0.0)
    up = tl.load(at + BLOCK, mask=n < blocks, other=0.0)
    return gate.to(tl.float32), up.to(tl.float32)


@triton.jit
def fast_sigmoid(x):
    """Return the sigmoid with an error of at most (2 + |x|) units in the last place. Subnormal results become zero; to
    keep them, `tl.sigmoid` takes twice the instructions."""
    return tl.inline_asm_elementwise(
        "{ .reg .f32 e; mul.f32 e, $1, 0fBFB8AA3B; ex2.approx.ftz.f32 e, e; add.f32 e, e, 0f3F800000;"
        " rcp.approx.ftz.f32 $0, e; }",
        "=f,f",
        [x],
        dtype=tl.float32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def rounded(x, dtype: tl.constexpr):
    """Round float32 to `dtype`; to bfloat16 by pairs, since an instruction for each takes as long as an exponential."""
    if dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [x], dtype=tl.bfloat16, is_pure=True, pack=2
        )
    return x.to(dtype)


@triton.jit
def _result(x, blocks, first, BLOCKS: tl.constexpr):
    gate, up = gate_blocks(x, blocks, first, BLOCKS)
    return gate * fast_sigmoid(gate) * up


@triton.jit
def _gradients(grad, x, blocks, first, BLOCKS: tl.constexpr):
    """Return the gradients of gate and up, and the result silu(gate) · up, [BLOCKS, 128] float32 each."""
    n = first + tl.arange(0, BLOCKS)[:, None]
    gate, up = gate_blocks(x, blocks, first, BLOCKS)
    d = tl.load(grad + n * BLOCK + tl.arange(0, BLOCK)[None, :], mask=n < blocks, other=0.0).to(tl.float32)
    sigmoid = fast_sigmoid(gate)
    silu = gate * sigmoid
    return d * up * sigmoid * (1 + gate * (1 - sigmoid)), d * silu, silu * up


@triton.jit
def _swiglu_grad(grad, x, out, blocks, BLOCKS: tl.constexpr):
    row, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCKS
    a, b, _ = _gradients(grad + row * blocks * BLOCK, x + row * blocks * 2 * BLOCK, blocks, first, BLOCKS)
    n = first + tl.arange(0, BLOCKS)[:, None]
    at = out + row * blocks * 2 * BLOCK + n * 2 * BLOCK + tl.arange(0, BLOCK)[None, :]
    tl.store(at, rounded(a, x.dtype.element_ty), mask=n < blocks)
    tl.store(at + BLOCK, rounded(b, x.dtype.element_ty), mask=n < blocks)


@triton.jit
def larger_or_nan(a, b):
    """Return the larger of two numbers; NaN if either is NaN."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def greatest_size(a, dtype: tl.constexpr):
    """Return the greatest absolute value of `a`, rounded to `dtype`, as the bits of a float32. NaN is greatest."""
    most = tl.reduce(tl.reduce(tl.abs(a), 1, larger_or_nan), 0, larger_or_nan)
    return most.to(dtype).to(tl.float32).to(tl.int32, bitcast=True)


@triton.jit
def store_blocks(out, a, scale, blocks, first, STEP: tl.constexpr, BLOCKS: tl.constexpr):
    """Scale blocks of a row, cast them to float8, and store them `STEP` blocks apart, from block `first` on."""
    n = first + tl.arange(0, BLOCKS)[:, None]
    byte = to_bytes(a.to(tl.float32) * scale, out.dtype.element_ty)
    tl.store(out + n * STEP * BLOCK + tl.arange(0, BLOCK)[None, :], byte, mask=n < blocks)


@triton.jit
def _swiglu_rows(x, out, scale_invs, blocks, most, POW2: tl.constexpr, BLOCKS: tl.constexpr, WHOLE: tl.constexpr):
    dtype: tl.constexpr = x.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    x += row * blocks * 2 * BLOCK
    out += row * blocks * BLOCK
    a = _result(x, blocks, 0, BLOCKS)
    amax = greatest_size(a, dtype)
    a = rounded(a, dtype)
    if not WHOLE:
        for first in range(BLOCKS, blocks, BLOCKS):
            amax = tl.maximum(amax, greatest_size(_result(x, blocks, first, BLOCKS), dtype))
    scale, scale_inv = scale_from_amax(amax, most, POW2)
    store_blocks(out, a, scale, blocks, 0, 1, BLOCKS)
    if not WHOLE:
        for first in range(BLOCKS, blocks, BLOCKS):
            a = rounded(_result(x, blocks, first, BLOCKS), dtype)
            store_blocks(out, a, scale, blocks, first, 1, BLOCKS)
    tl.store(scale_invs + row, scale_inv)


@triton.jit
def _swiglu_grad_rows(
    grad, x, out, scale_invs, h, h_scale_invs, blocks, most, h_most,
    POW2: tl.constexpr, BLOCKS: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    dtype: tl.constexpr = x.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    x += row * blocks * 2 * BLOCK
    out += row * blocks * 2 * BLOCK
    grad += row * blocks * BLOCK
    h += row * blocks * BLOCK
    a, b, c = _gradients(grad, x, blocks, 0, BLOCKS)
    amax, h_amax = greatest_size(larger_or_nan(tl.abs(a), tl.abs(b)), dtype), greatest_size(c, dtype)
    a, b, c = rounded(a, dtype), rounded(b, dtype), rounded(c, dtype)
    if not WHOLE:
        for first in range(BLOCKS, blocks, BLOCKS):
            d, e, f = _gradients(grad, x, blocks, first, BLOCKS)
            amax = tl.maximum(amax, greatest_size(larger_or_nan(tl.abs(d), tl.abs(e)), dtype))
            h_amax = tl.maximum(h_amax, greatest_size(f, dtype))
    scale, scale_inv = scale_from_amax(amax, most, POW2)
    h_scale, h_scale_inv = scale_from_amax(h_amax, h_most, POW2)
    store_blocks(out, a, scale, blocks, 0, 2, BLOCKS)
    store_blocks(out + BLOCK, b, scale, blocks, 0, 2, BLOCKS)
    store_blocks(h, c, h_scale, blocks, 0, 1, BLOCKS)
    if not WHOLE:
        for first in range(BLOCKS, blocks, BLOCKS):
            d, e, f = _gradients(grad, x, blocks, first, BLOCKS)
            store_blocks(out, rounded(d, dtype), scale, blocks, first, 2, BLOCKS)
            store_blocks(out + BLOCK, rounded(e, dtype), scale, blocks, first, 2, BLOCKS)
            store_blocks(h, rounded(f, dtype), h_scale, blocks, first, 1, BLOCKS)
    tl.store(scale_invs + row, scale_inv)
    tl.store(h_scale_invs + row, h_scale_inv)


@triton.jit
def _swiglu_amax(grad, x, amax, M, blocks, BACKWARD: tl.constexpr, BLOCKS: tl.constexpr, ROWS: tl.constexpr):
    """Find the greatest absolute value of the results (`amax[0]`), and with BACKWARD of the gradients (`amax[1]`)."""
    dtype: tl.constexpr = x.dtype.element_ty
    first, start = tl.program_id(1) * BLOCKS, tl.program_id(0).to(tl.int64) * ROWS
    result, gradient = tl.full((), 0, tl.int32), tl.full((), 0, tl.int32)
    for row in range(start, min(start + ROWS, M)):
        at = x + row * blocks * 2 * BLOCK
        if BACKWARD:
            a, b, c = _gradients(grad + row * blocks * BLOCK, at, blocks, first, BLOCKS)
            gradient = tl.maximum(gradient, greatest_size(larger_or_nan(tl.abs(a), tl.abs(b)), dtype))
        else:
            c = _result(at, blocks, first, BLOCKS)
        result = tl.maximum(result, greatest_size(c, dtype))
    tl.atomic_max(amax, result, sem="relaxed")
    if BACKWARD:
        tl.atomic_max(amax + 1, gradient, sem="relaxed")


@triton.jit
def _swiglu_by(x, amax, out, scale_inv, blocks, most, POW2: tl.constexpr, BLOCKS: tl.constexpr):
    row, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCKS
    scale, one = scale_from_amax(tl.load(amax), most, POW2)
    a = _result(x + row * blocks * 2 * BLOCK, blocks, first, BLOCKS)
    store_blocks(out + row * blocks * BLOCK, rounded(a, x.dtype.element_ty), scale, blocks, first, 1, BLOCKS)
    if (row == 0) & (first == 0):
        tl.store(scale_inv, one)


@triton.jit
def _swiglu_grad_by(
    grad, x, amax, out, scale_inv, h, h_scale_inv, blocks, most, h_most, POW2: tl.constexpr, BLOCKS: tl.constexpr
):
    row, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCKS
    scale, one = scale_from_amax(tl.load(amax + 1), most, POW2)
    h_scale, h_one = scale_from_amax(tl.load(amax), h_most, POW2)
    a, b, c = _gradients(grad + row * blocks * BLOCK, x + row * blocks * 2 * BLOCK, blocks, first, BLOCKS)
    dtype: tl.constexpr = x.dtype.element_ty
    out += row * blocks * 2 * BLOCK
    store_blocks(out, rounded(a, dtype), scale, blocks, first, 2, BLOCKS)
    store_blocks(out + BLOCK, rounded(b, dtype), scale, blocks, first, 2, BLOCKS)
    store_blocks(h + row * blocks * BLOCK, rounded(c, dtype), h_scale, blocks, first, 1, BLOCKS)
    if (row == 0) & (first == 0):
        tl.store(scale_inv, one)
        tl.store(h_scale_inv, h_one)


def launch_swiglu_grad(grad: Tensor, x: Tensor) -> Tensor:
    grad, x = grad.contiguous(), x.contiguous()
    M, blocks = len(x), x.shape[1] // (2 * BLOCK.value)
    out = torch.empty_like(x)
    tensors = grad, x, out
    grid = M, cdiv(blocks, PART)
    launch(_swiglu_grad, (blocks, grad.dtype, x.dtype), grid, tensors, lambda: (*tensors, blocks, PART), num_warps=4)
    return out


def launch_swiglu_cast(x: Tensor, by_row: bool, dtype: torch.dtype, pow2: bool) -> tuple[Tensor, Tensor]:
    x = x.contiguous()
    M, blocks = len(x), x.shape[1] // (2 * BLOCK.value)
    out, most = x.new_empty((M, x.shape[1] // 2), dtype=dtype), torch.finfo(dtype).max
    scale_inv = x.new_empty((M, 1) if by_row else (), dtype=torch.float32)
    if by_row:
        n = min(triton.next_power_of_2(blocks), WIDEST)
        launch(
            _swiglu_rows, (blocks, x.dtype, dtype, pow2), M, (x, out, scale_inv),
            lambda: (x, out, scale_inv, blocks, most, pow2, n, blocks <= n), num_warps=_warps(n),
        )  # fmt: skip
        return out, scale_inv
    amax, parts = torch.zeros(1, dtype=torch.int32, device=x.device), cdiv(blocks, PART)
    launch(
        _swiglu_amax, (M, blocks, x.dtype), (cdiv(M, ROWS), parts), (x, amax),
        lambda: (x, x, amax, M, blocks, False, PART, ROWS), num_warps=4,
    )  # fmt: skip
    tensors = x, amax, out, scale_inv
    launch(
        _swiglu_by, (blocks, x.dtype, dtype, pow2), (M, parts), tensors,
        lambda: (*tensors, blocks, most, pow2, PART), num_warps=4,
    )  # fmt: skip
    return out, scale_inv


def launch_swiglu_grad_cast(
    grad: Tensor, x: Tensor, by_row: bool, dtype: torch.dtype, result_dtype: torch.dtype, pow2: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    grad, x = grad.contiguous(), x.contiguous()
    M, blocks = len(x), x.shape[1] // (2 * BLOCK.value)
    out, h = x.new_empty(x.shape, dtype=dtype), x.new_empty(grad.shape, dtype=result_dtype)
    most = torch.finfo(dtype).max, torch.finfo(result_dtype).max
    scale_inv, h_scale_inv = (x.new_empty((M, 1) if by_row else (), dtype=torch.float32) for _ in range(2))
    key = blocks, grad.dtype, x.dtype, dtype, result_dtype, pow2
    if by_row:
        tensors = grad, x, out, scale_inv, h, h_scale_inv
        n = min(triton.next_power_of_2(blocks), WIDEST)
        launch(
            _swiglu_grad_rows, key, M, tensors,
            lambda: (*tensors, blocks, *most, pow2, n, blocks <= n), num_warps=_warps(n),
        )  # fmt: skip
        return out, scale_inv, h, h_scale_inv
    amax, parts = torch.zeros(2, dtype=torch.int32, device=x.device), cdiv(blocks, PART)
    launch(
        _swiglu_amax, (M, blocks, grad.dtype, x.dtype), (cdiv(M, ROWS), parts), (grad, x, amax),
        lambda: (grad, x, amax, M, blocks, True, PART, ROWS), num_warps=4,
    )  # fmt: skip
    tensors = grad, x, amax, out, scale_inv, h, h_scale_inv
    launch(
        _swiglu_grad_by, key, (M, parts), tensors, lambda: (*tensors, blocks, *most, pow2, PART), num_warps=4
    )  # fmt: skip
    return out, scale_inv, h, h_scale_inv


def _warps(blocks: int) -> int:
    """Return the number of warps for a row of `blocks` blocks of 128 columns: 16 numbers per thread."""
    return max(1, blocks // 4)
