"""SwiGLU gate over one fused projection whose columns interleave gate and up in blocks.

Backward has a kernel with one pass over memory; compilers compute both halves of the gradient for each element. For a
result in float8, gate and cast are one pass, and so are backward and its cast. Compilers read a row of 28,672 numbers
at least twice (`titanlite/kernels/device/swiglu.py`).

Source: Shazeer 2020, "GLU Variants Improve Transformer", eq. 6.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from titanlite.kernels.float8_scales import cast_by_amax
from titanlite.kernels.operators import operator

BLOCK = 128
"""Columns of the gate (w1) and of the up projection (w3) alternate in blocks of this width. So the fused weight can be
cut into tensor-parallel shards after any pair of blocks."""


def swiglu(x: Tensor) -> Tensor:
    """Return `silu(gate) * up`, computed in float32.

    Args:
        x: [M, 2F], alternating blocks of 128 columns of gate and up.

    Returns:
        [M, F] in `x.dtype`.
    """
    return _SwiGLU.apply(x)  # type: ignore[no-any-return]


class _SwiGLU(torch.autograd.Function):
    """Forward has no kernel: compilers fuse its operations."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return gated(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return swiglu_grad(grad, *ctx.saved_tensors)


def gated(x: Tensor) -> Tensor:
    """Return `swiglu(x)`, without a gradient."""
    gate, up = gate_and_up(x)
    return (F.silu(gate) * up).to(x.dtype).flatten(-2)


@operator("swiglu_grad", "swiglu.launch_swiglu_grad")
def swiglu_grad(grad: Tensor, x: Tensor) -> Tensor:
    """Return the gradient of `x` in `swiglu`, [M, 2F], computed in float32; `grad`: gradient of the result, [M, F]."""
    gate, up = gate_and_up(x)
    grad = grad.unflatten(-1, (-1, BLOCK)).to(gate.dtype)
    sigmoid = gate.sigmoid()
    silu = gate * sigmoid
    parts = grad * up * sigmoid * (1 + gate * (1 - sigmoid)), grad * silu
    return torch.stack(parts, -2).to(x.dtype).flatten(-3)


@operator("swiglu_cast", "swiglu.launch_swiglu_cast")
def swiglu_cast(x: Tensor, by_row: bool, dtype: torch.dtype, pow2: bool) -> tuple[Tensor, Tensor]:
    """Cast `swiglu(x)` to float8.

    Args:
        x: [M, 2F].
        by_row: whether each row has its own scale; otherwise one scale is for all.
        dtype: float8.
        pow2: round scales down to a power of two.

    Returns:
        Bytes [M, F], and their inverse scales, [M, 1] or [] float32.
    """
    return cast_by_amax(gated(x), by_row, dtype, pow2)


@operator("swiglu_grad_cast", "swiglu.launch_swiglu_grad_cast")
def swiglu_grad_cast(
    grad: Tensor, x: Tensor, by_row: bool, dtype: torch.dtype, result_dtype: torch.dtype, pow2: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Cast `swiglu_grad(grad, x)` to float8, and repeat `swiglu_cast`, so that its result need not be kept.

    Args:
        grad: [M, F], gradient of `swiglu(x)`.
        x, by_row, pow2: see `swiglu_cast`.
        dtype: float8 dtype of the gradient.
        result_dtype: float8 dtype of `swiglu(x)`.

    Returns:
        Bytes [M, 2F] of the gradient, and their inverse scales, [M, 1] or [] float32; bytes [M, F] and inverse scales
        of `swiglu(x)`, bitwise equal to `swiglu_cast`'s.
    """
    of_grad = cast_by_amax(swiglu_grad.definition(grad, x), by_row, dtype, pow2)
    return *of_grad, *cast_by_amax(gated(x), by_row, result_dtype, pow2)


def gate_and_up(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return gate and up, [M, F/128, 128] float32 each; float64 for float64."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    blocks = x.unflatten(-1, (-1, 2, BLOCK))  # `unbind` would not be recomputed in a compiled backward
    return blocks.select(-2, 0).to(dtype), blocks.select(-2, 1).to(dtype)
