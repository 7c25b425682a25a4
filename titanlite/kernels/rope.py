"""Rotary position embedding in real arithmetic.

Complex multiplication is shorter code, but no compiler fuses it: for Llama-3 8B it moves five times as many bytes. The
two halves of a head are rotated against each other, as in Hugging Face checkpoints.

The gradient of a fused projection is computed in one pass over memory. A compiler rotates the gradients of queries and
keys first, and then concatenates them with the gradient of the values (docs/performance.md).

Source: Su et al. 2021 (RoFormer), eq. 34; frequency scaling as in Llama 3.1.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from titanlite.config.recipe_schema import RopeScaling
from titanlite.kernels.operators import operator


def rope_table(seq_len: int, head_dim: int, theta: float, scaling: RopeScaling | None) -> tuple[Tensor, Tensor]:
    """Return cosines and sines of every position's angles.

    Args:
        seq_len: S, positions 0 … S−1.
        head_dim: E, even.
        theta: base of the frequencies.
        scaling: Llama 3.1 frequency scaling, or None.

    Returns:
        cos, sin: [S, E/2] float32 each, on the CPU. Angles are formed in float64, so that late positions are exact.
    """
    frequencies = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float64, device="cpu") / head_dim)
    if scaling is not None:
        turns = scaling.original_seq_len * frequencies / (2 * math.pi)  # full turns within the original context
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        kept = ((turns - low) / (high - low)).clamp(0, 1)  # 1: unchanged; 0: slowed by `factor`
        frequencies = frequencies * (kept + (1 - kept) / scaling.factor)
    angles = torch.outer(torch.arange(seq_len, dtype=torch.float64, device="cpu"), frequencies)
    return angles.cos().float(), angles.sin().float()


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the two halves of each head by its position's angle, in float32: [M, H, E] in `x.dtype`.

    Args:
        x: [M, H, E] queries or keys of whole sequences, one after the other; M a multiple of S.
        cos, sin: [S, E/2] float32, from `rope_table`.
    """
    low, high = x.unflatten(0, (-1, cos.shape[0])).float().chunk(2, dim=-1)  # [B, S, H, E/2] each
    cos, sin = cos[:, None], sin[:, None]  # [S, 1, E/2]: the same for every head
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1).to(x.dtype).flatten(0, 1)


def heads(qkv: Tensor, queries_per_kv: int, head_dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Split a fused projection into queries, keys and values.

    Args:
        qkv: [M, K·(R+2)·E]; for each of K key/value heads R queries, the key and the value.
        queries_per_kv: R.
        head_dim: E.

    Returns:
        Views of `qkv`: [M, K, R, E], [M, K, 1, E] and [M, K, 1, E].
    """
    q, k, v = qkv.unflatten(-1, (-1, queries_per_kv + 2, head_dim)).split([queries_per_kv, 1, 1], dim=-2)
    return q, k, v


def rotated_heads(qkv: Tensor, cos: Tensor, sin: Tensor, queries_per_kv: int) -> tuple[Tensor, Tensor, Tensor]:
    """Split a fused projection into queries, keys and values, and rotate queries and keys.

    Args:
        qkv: see `heads`; of whole sequences.
        cos, sin: see `rope`.
        queries_per_kv: R.

    Returns:
        Queries [M, K·R, E] and keys [M, K, E] in `qkv.dtype`; values [M, K, E], a view of `qkv`.
    """
    return _RotatedHeads.apply(qkv, cos, sin, queries_per_kv)  # type: ignore[no-any-return]


class _RotatedHeads(torch.autograd.Function):
    """Forward has no kernel: compilers fuse its operations."""

    @staticmethod
    def forward(ctx: Any, qkv: Tensor, cos: Tensor, sin: Tensor, queries_per_kv: int) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        q, k, v = heads(qkv, queries_per_kv, 2 * cos.shape[1])
        return rope(q.flatten(1, 2), cos, sin), rope(k.flatten(1, 2), cos, sin), v.squeeze(2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return rotated_heads_grad(*grads, *ctx.saved_tensors), None, None, None


@operator("rotated_heads_grad", "rope.launch_rotated_heads_grad")
def rotated_heads_grad(q_grad: Tensor, k_grad: Tensor, v_grad: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return the gradient of `qkv` in `rotated_heads` from the gradients of its results."""
    q, k = (rope(grad, cos, -sin).unflatten(1, (k_grad.shape[1], -1)) for grad in (q_grad, k_grad))
    return torch.cat((q, k, v_grad.unsqueeze(2)), dim=2).flatten(1)
