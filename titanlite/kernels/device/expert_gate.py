"""Device code of `titanlite.kernels.expert_gate`. A thread block takes a row: one token at one expert."""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.jit import JITFunction

from titanlite.kernels.device.expert_rows import is_far_behind
from titanlite.kernels.device.float8_cast import scale_from_amax
from titanlite.kernels.device.launch import launch
from titanlite.kernels.device.swiglu import (
    BLOCK,
    PART,
    fast_sigmoid,
    gate_blocks,
    greatest_size,
    larger_or_nan,
    rounded,
    store_blocks,
)


@triton.jit
def _expert_gate(a, slots, out, blocks, BLOCKS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    if is_far_behind(slots, row):
        return
    is_row = tl.load(slots + row) >= 0
    for first in range(0, blocks, BLOCKS):
        n = first + tl.arange(0, BLOCKS)[:, None]
        gate, up = gate_blocks(a + row * blocks * 2 * BLOCK, blocks, first, BLOCKS)
        h = gate * fast_sigmoid(gate) * up
        at = out + row * blocks * BLOCK + n * BLOCK + tl.arange(0, BLOCK)[None, :]
        tl.store(at, rounded(tl.where(is_row, h, 0.0), out.dtype.element_ty), mask=n < blocks)


@triton.jit
def _expert_gate_grad(grad, a, weights, slots, d_a, h, d_weights, blocks, BLOCKS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    if is_far_behind(slots, row):
        return
    slot = tl.load(slots + row)
    is_row = slot >= 0
    weight = tl.load(weights + slot, mask=is_row, other=0.0)
    dots = tl.zeros((BLOCKS, BLOCK), tl.float32)
    dtype: tl.constexpr = a.dtype.element_ty
    for first in range(0, blocks, BLOCKS):
        n = first + tl.arange(0, BLOCKS)[:, None]
        column = tl.arange(0, BLOCK)[None, :]
        inside = n < blocks
        at = row * blocks * BLOCK + n * BLOCK + column
        g = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
        gate, up = gate_blocks(a + row * blocks * 2 * BLOCK, blocks, first, BLOCKS)
        sigmoid = fast_sigmoid(gate)
        silu = gate * sigmoid
        result = rounded(silu * up, dtype).to(tl.float32)
        dots += g * result
        g = rounded(g * weight, dtype).to(tl.float32)
        d_gate = g * up * sigmoid * (1 + gate * (1 - sigmoid))
        of_a = d_a + row * blocks * 2 * BLOCK + n * 2 * BLOCK + column
        tl.store(of_a, rounded(tl.where(is_row, d_gate, 0.0), dtype), mask=inside)
        tl.store(of_a + BLOCK, rounded(tl.where(is_row, g * silu, 0.0), dtype), mask=inside)
        tl.store(h + at, rounded(tl.where(is_row, result * weight, 0.0), dtype), mask=inside)
    tl.store(d_weights + slot, tl.sum(tl.sum(dots, 1), 0), mask=is_row)


@triton.jit
def _expert_gate_cast(a, slots, out, scale_invs, blocks, most, BLOCKS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    if is_far_behind(slots, row):
        return
    dtype: tl.constexpr = a.dtype.element_ty
    gate, up = gate_blocks(a + row * blocks * 2 * BLOCK, blocks, 0, BLOCKS)
    h = tl.where(tl.load(slots + row) >= 0, gate * fast_sigmoid(gate) * up, 0.0)
    scale, scale_inv = scale_from_amax(greatest_size(h, dtype), most, True)
    store_blocks(out + row * blocks * BLOCK, rounded(h, dtype), scale, blocks, 0, 1, BLOCKS)
    tl.store(scale_invs + row, scale_inv)


@triton.jit
def _expert_gate_grad_cast(
    grad, a, weights, slots, d_a, d_a_scale_invs, h, h_scale_invs, d_weights, blocks, most, BLOCKS: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    if is_far_behind(slots, row):
        return
    dtype: tl.constexpr = a.dtype.element_ty
    slot = tl.load(slots + row)
    is_row = slot >= 0
    weight = tl.load(weights + slot, mask=is_row, other=0.0)
    n = tl.arange(0, BLOCKS)[:, None]
    at = row * blocks * BLOCK + n * BLOCK + tl.arange(0, BLOCK)[None, :]
    g = tl.load(grad + at, mask=n < blocks, other=0.0).to(tl.float32)
    gate, up = gate_blocks(a + row * blocks * 2 * BLOCK, blocks, 0, BLOCKS)
    sigmoid = fast_sigmoid(gate)
    silu = gate * sigmoid
    result = tl.where(is_row, silu * up, 0.0)
    h_scale, h_scale_inv = scale_from_amax(greatest_size(result, dtype), most, True)
    result = rounded(result, dtype)
    tl.store(d_weights + slot, tl.sum(tl.sum(g * result.to(tl.float32), 1), 0), mask=is_row)
    store_blocks(h + row * blocks * BLOCK, result, h_scale, blocks, 0, 1, BLOCKS)
    g = rounded(g * weight, dtype).to(tl.float32)
    d_gate = tl.where(is_row, g * up * sigmoid * (1 + gate * (1 - sigmoid)), 0.0)
    d_up = tl.where(is_row, g * silu, 0.0)
    amax = greatest_size(larger_or_nan(tl.abs(d_gate), tl.abs(d_up)), dtype)
    scale, scale_inv = scale_from_amax(amax, most, True)
    d_a += row * blocks * 2 * BLOCK
    store_blocks(d_a, rounded(d_gate, dtype), scale, blocks, 0, 2, BLOCKS)
    store_blocks(d_a + BLOCK, rounded(d_up, dtype), scale, blocks, 0, 2, BLOCKS)
    tl.store(d_a_scale_invs + row, scale_inv)
    tl.store(h_scale_invs + row, h_scale_inv)


def launch_expert_gate(a: Tensor, slots: Tensor) -> Tensor:
    a = a.contiguous()
    out = a.new_empty(len(a), a.shape[1] // 2)
    _launch_by_row(_expert_gate, a, (a, slots, out), (a.dtype,))
    return out


def launch_expert_gate_grad(grad: Tensor, a: Tensor, weights: Tensor, slots: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    grad, a, weights = grad.contiguous(), a.contiguous(), weights.contiguous()
    d_a, h, d_weights = torch.empty_like(a), torch.empty_like(grad), torch.zeros_like(weights)
    _launch_by_row(_expert_gate_grad, a, (grad, a, weights, slots, d_a, h, d_weights), (a.dtype, grad.dtype))
    return d_a, h, d_weights


def launch_expert_gate_cast(a: Tensor, slots: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    a = a.contiguous()
    out, scale_inv = _empty_rows(a, a.shape[1] // 2, dtype)
    _launch_by_row(_expert_gate_cast, a, (a, slots, out, scale_inv), (a.dtype, dtype), torch.finfo(dtype).max)
    return out, scale_inv


def launch_expert_gate_grad_cast(
    grad: Tensor, a: Tensor, weights: Tensor, slots: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    grad, a, weights = grad.contiguous(), a.contiguous(), weights.contiguous()
    of_a, of_h = _empty_rows(a, a.shape[1], dtype), _empty_rows(a, grad.shape[1], dtype)
    d_weights = torch.zeros_like(weights)
    tensors = grad, a, weights, slots, *of_a, *of_h, d_weights
    _launch_by_row(_expert_gate_grad_cast, a, tensors, (a.dtype, grad.dtype, dtype), torch.finfo(dtype).max)
    return *of_a, *of_h, d_weights


def _empty_rows(a: Tensor, columns: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Allocate float8 rows of `columns` numbers, as many as `a` has, and an inverse scale for each."""
    return a.new_empty(len(a), columns, dtype=dtype), a.new_empty(len(a), 1, dtype=torch.float32)


def _launch_by_row(kernel: JITFunction, a: Tensor, tensors: tuple[Tensor, ...], dtypes: tuple, *most: float) -> None:
    """Launch a kernel with a thread block for each row of `a`. most: the greatest float8 number, if the kernel casts.
    Such a kernel keeps the whole row in registers."""
    blocks = a.shape[1] // (2 * BLOCK.value)
    n = triton.next_power_of_2(blocks) if most else min(triton.next_power_of_2(blocks), PART)
    warps = min(32, n // 4) if most else min(8, n // 2)  # at least 8 numbers per thread; 16 for a cast
    launch(kernel, (blocks, *dtypes), len(a), tensors, lambda: (*tensors, blocks, *most, n), num_warps=max(1, warps))
