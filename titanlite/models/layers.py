"""The layers that models are built from: plain, single-device, and unaware of how they will be split.

A projection holds the weights that share its input as one fused matrix, so that one gather feeds one matmul. Its parts
keep their identity: each is initialised, exported and named by itself (`wq`, `wk`, `wv` of `wqkv`).

    fused rows of wqkv, H = 4 query heads, K = 2 key/value heads:   q0 q1 k0 v0 | q2 q3 k1 v1      (2 groups)
    fused rows of w13, in blocks of 128:                            w1 w3 | w1 w3 | …            (F/128 groups)

Rows come in groups, and a group is never cut: any split into equal runs of whole groups is a legal tensor-parallel
shard.
"""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titanlite.kernels.linear import Matmul, linear
from titanlite.kernels.rms_norm import add_rms_norm, rms_norm


class Linear(nn.Module):
    """`x @ weight.T` for one weight, or several fused by rows.

    Args:
        in_features: K.
        parts: rows of each part within one group, in order; one part for a plain layer.
        groups: how often the pattern of parts repeats. N = groups · Σ parts.
        std: standard deviation of the initial weights.

    Attributes:
        weight: [N, K].
        matmul: the arithmetic; a float8 recipe replaces it.
    """

    def __init__(self, in_features: int, parts: Mapping[str, int], *, groups: int = 1, std: float) -> None:
        super().__init__()
        self.parts, self.groups, self.std = dict(parts), groups, std
        self.weight = nn.Parameter(torch.empty(groups * sum(parts.values()), in_features))
        self.matmul: Matmul = F.linear

    def forward(self, x: Tensor) -> Tensor:
        """[M, K] → [M, N]."""
        return linear(x, self.weight, matmul=self.matmul)

    def fuse(self, parts: Mapping[str, Tensor]) -> Tensor:
        """Interleave the separate weights, [groups · rows, K] each, to one [N, K]."""
        return torch.cat([parts[name].unflatten(0, (self.groups, -1)) for name in self.parts], dim=1).flatten(0, 1)

    def split(self, weight: Tensor) -> dict[str, Tensor]:
        """The inverse of `fuse`."""
        pieces = weight.unflatten(0, (self.groups, -1)).split(list(self.parts.values()), dim=1)
        return {name: piece.flatten(0, 1) for name, piece in zip(self.parts, pieces, strict=True)}


class CausalAttention(nn.Module):
    """Attention of each token to those before it and itself. A module without weights, so that it has a place."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """[B, H, S, E], [B, K, S, E], [B, K, S, E] → [B, H, S, E]; H is a multiple of K."""
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] > k.shape[1])


class RMSNorm(nn.Module):
    """RMSNorm with a learned scale.

    Args:
        dim: D.
        eps: added to the mean square.
    """

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[M, D] → [M, D]."""
        return rms_norm(x, self.weight, self.eps)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Normalise `x + residual`; returns that and the sum, [M, D] each."""
        return add_rms_norm(x, residual, self.weight, self.eps)


class Embedding(nn.Module):
    """Rows of a table.

    Args:
        vocab_size: V.
        dim: D.
        std: standard deviation of the initial weights.
    """

    def __init__(self, vocab_size: int, dim: int, std: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, dim))
        self.std = std

    def forward(self, tokens: Tensor) -> Tensor:
        """[M] int64 → [M, D]."""
        return F.embedding(tokens, self.weight)
