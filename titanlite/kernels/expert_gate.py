"""The gate of experts: `swiglu` of each row with a token, its gradient with the router's weights, and both in float8.

A row is one token at one of its experts (`routing.py`).
"""

import torch
from torch import Tensor

from titanlite.kernels.float8_cast import cast_rows
from titanlite.kernels.operators import operator
from titanlite.kernels.swiglu import gated, swiglu_grad


@operator("expert_gate", "expert_gate.launch_expert_gate")
def expert_gate(a: Tensor, slots: Tensor) -> Tensor:
    """Return `swiglu` of each row, and zeros in rows without a token.

    Args:
        a: [R, 2F], alternating blocks of 128 columns of gate and up.
        slots: [R] int32, m·K + k for a row that is token m at its k-th expert; -1: no token.

    Returns:
        [R, F] in `a.dtype`.
    """
    return torch.where((slots >= 0)[:, None], gated(a), 0)


@operator("expert_gate_grad", "expert_gate.launch_expert_gate_grad")
def expert_gate_grad(grad: Tensor, a: Tensor, weights: Tensor, slots: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Differentiate `expert_gate(a, slots)` times the router's weights, and return this product, too.

    Args:
        grad: [R, F], gradient of the weighted results.
        a: [R, 2F].
        weights: [M, K] float32, of each token's experts.
        slots: see `expert_gate`.

    Returns:
        The gradient of `a`, [R, 2F] in its dtype; the weighted results, [R, F], both zeros in rows without a token; and
        the gradient of the weights, [M, K], zeros for a slot without a row.
    """
    is_row, at = slots >= 0, slots.clamp(min=0).long()
    weight = torch.where(is_row, weights.flatten()[at], 0)[:, None]
    h = torch.where(is_row[:, None], gated(a), 0)
    weighed = (grad * weight).to(grad.dtype)
    d_a = torch.where(is_row[:, None], swiglu_grad.definition(weighed, a), 0)
    dots = torch.where(is_row, (grad.to(weights.dtype) * h.to(weights.dtype)).sum(1), 0)
    d_weights = torch.zeros_like(weights).flatten().index_add(0, at, dots).view_as(weights)
    return d_a, (h * weight).to(h.dtype), d_weights


@operator("expert_gate_cast", "expert_gate.launch_expert_gate_cast")
def expert_gate_cast(a: Tensor, slots: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cast `expert_gate` to float8, each row by its own power of two. Return bytes [R, F] and inverse scales [R, 1]."""
    return cast_rows.definition(expert_gate.definition(a, slots), dtype)


@operator("expert_gate_grad_cast", "expert_gate.launch_expert_gate_grad_cast")
def expert_gate_grad_cast(
    grad: Tensor, a: Tensor, weights: Tensor, slots: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Cast the gradient of `a` from `expert_gate_grad`, and `expert_gate(a, slots)`, each row by its own power of two.

    Args:
        grad, a, weights, slots: see `expert_gate_grad`.
        dtype: float8.

    Returns:
        Bytes [R, 2F] of the gradient of `a`, and their inverse scales, [R, 1] float32; bytes [R, F] and inverse scales
        of `expert_gate(a, slots)`, bitwise equal to `expert_gate_cast`; and the gradient of the weights, [M, K].
    """
    d_a, _, d_weights = expert_gate_grad.definition(grad, a, weights, slots)
    return *cast_rows.definition(d_a, dtype), *expert_gate_cast.definition(a, slots, dtype), d_weights
