"""Split a fused projection into queries, keys and values; normalise queries and keys head by head, and rotate them.

Forward and backward are one pass over memory each, and backward writes the gradient of the whole projection. A compiler
reads queries twice to normalise them, and takes one more pass for each gradient (docs/performance.md). A head is
rounded once, after its rotation.

Source: `rms_norm.py` and `rope.py`, which define the two operations.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from titanlite.kernels.operators import Split, operator
from titanlite.kernels.rms_norm import rms_norm
from titanlite.kernels.rope import heads, rope


def norm_rope(
    qkv: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor, queries_per_kv: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Split a projection into queries, keys and values, and normalise and rotate queries and keys.

    Args:
        qkv, cos, sin, queries_per_kv: see `rope.rotated_heads`, which also describes the results.
        q_weight: [E], scale of normalised queries.
        k_weight: [E], scale of normalised keys.
        eps: added to the mean square.
    """
    return _NormRope.apply(qkv, q_weight, k_weight, cos, sin, queries_per_kv, eps)  # type: ignore[no-any-return]


class _NormRope(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, qkv: Tensor, *given: Any) -> tuple[Tensor, Tensor, Tensor]:
        *tensors, ctx.queries_per_kv, ctx.eps = given
        ctx.save_for_backward(qkv, *tensors)
        q, k = _normed_and_rotated(qkv, *given)
        return q, k, heads(qkv, ctx.queries_per_kv, q.shape[-1])[2].squeeze(2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        given = *ctx.saved_tensors, ctx.queries_per_kv, ctx.eps
        return *torch.ops.titanlite.norm_rope_grad(*grads, *given), None, None, None, None


# Tensor-parallel ranks split the heads: a key head with all of its query heads.
@operator("norm_rope", "norm_rope.launch_norm_rope", splits=(Split((1, None, None, None, None), 1),))
def _normed_and_rotated(
    qkv: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor, queries_per_kv: int, eps: float
) -> tuple[Tensor, Tensor]:
    q, k, _ = heads(qkv, queries_per_kv, 2 * cos.shape[1])
    q, k = (rms_norm(x.float(), weight, eps).flatten(1, 2) for x, weight in ((q, q_weight), (k, k_weight)))
    return rope(q, cos, sin).to(qkv.dtype), rope(k, cos, sin).to(qkv.dtype)


@operator("norm_rope_grad", "norm_rope.launch_norm_rope_grad")
def _heads_grad(
    q_grad: Tensor,
    k_grad: Tensor,
    v_grad: Tensor,
    qkv: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    queries_per_kv: int,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of `qkv` and of both weights, from those of queries, keys and values."""
    q, k, _ = heads(qkv, queries_per_kv, 2 * cos.shape[1])
    parts: list[Tensor] = []
    of_weights: list[Tensor] = []
    for grad, x, weight in ((q_grad, q, q_weight), (k_grad, k, k_weight)):
        d = rope(grad.float(), cos, -sin).unflatten(1, x.shape[1:3])
        scale = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)
        normed = x.float() * scale
        of_weights.append((d * normed).sum((0, 1, 2)).to(weight.dtype))
        d = d * weight.float()
        parts.append((scale * (d - normed * (d * normed).mean(-1, keepdim=True))).to(qkv.dtype))
    of_qkv = torch.cat((*parts, v_grad.unsqueeze(2)), dim=2).flatten(1)
    return of_qkv, of_weights[0], of_weights[1]
