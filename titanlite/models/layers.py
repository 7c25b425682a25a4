"""The layers that models are built from: plain, single-device, and unaware of how they will be split.

A projection holds the weights that share its input as one fused matrix, so that one gather feeds one matmul. Its parts
keep their identity: each is initialised, exported and named by itself (`wq`, `wk`, `wv` of `wqkv`).

    fused rows of wqkv, H = 4 query heads, K = 2 key/value heads:   q0 q1 k0 v0 | q2 q3 k1 v1      (2 groups)
    fused rows of w13, in blocks of 128:                            w1 w3 | w1 w3 | …            (F/128 groups)

Rows come in groups, and a group is never cut: any split into equal runs of whole groups is a legal tensor-parallel
shard.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from titanlite.config.recipe_schema import ModelDims
from titanlite.errors import ConfigError, Problem, describe
from titanlite.kernels.attention import Bounds, attention, attention_kernel
from titanlite.kernels.context_attention import KeyChunks, context_attention
from titanlite.kernels.layer_norm import layer_norm
from titanlite.kernels.linear import Matmul, linear
from titanlite.kernels.norm_rope import norm_rope
from titanlite.kernels.rms_norm import fork_rms_norm, rms_norm


def runs_forward_of(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Return whether a module's forward is that of a class, replaced neither by a subclass nor on the object."""
    return type(module).forward is kind.forward and "forward" not in vars(module)


class Projection(nn.Module):
    """One weight, or several fused by rows, without the arithmetic.

    Args:
        in_features: K.
        parts: rows of each part within one group, in order; one part for a plain layer.
        groups: how often the pattern of parts repeats. N = groups · Σ parts.
        std: standard deviation of the initial weights.
        bias: add a learned one to each output feature.

    Attributes:
        weight: [N, K].
        bias: [N], with rows as those of the weight, or None.
    """

    def __init__(
        self, in_features: int, parts: Mapping[str, int], *, groups: int = 1, std: float, bias: bool = False
    ) -> None:
        super().__init__()
        self.parts, self.groups, self.std = dict(parts), groups, std
        self.weight = nn.Parameter(torch.empty(groups * sum(parts.values()), in_features))
        self.bias = nn.Parameter(torch.empty(len(self.weight))) if bias else None

    @property
    def used_by_a_token(self) -> int:
        """Count the weights that each token is multiplied by."""
        return self.weight.numel()

    def fuse(self, parts: Mapping[str, Tensor]) -> Tensor:
        """Interleave the separate weights, [groups · rows, K] each, to one [N, K]; or biases, without K."""
        return torch.cat([parts[name].unflatten(0, (self.groups, -1)) for name in self.parts], dim=1).flatten(0, 1)

    def split(self, weight: Tensor) -> dict[str, Tensor]:
        """The inverse of `fuse`."""
        pieces = weight.unflatten(0, (self.groups, -1)).split(list(self.parts.values()), dim=1)
        return {name: piece.flatten(0, 1) for name, piece in zip(self.parts, pieces, strict=True)}


class Linear(Projection):
    """`x @ weight.T`; arguments as of `Projection`.

    Attributes:
        matmul: the arithmetic; a float8 recipe replaces it.
    """

    def __init__(
        self, in_features: int, parts: Mapping[str, int], *, groups: int = 1, std: float, bias: bool = False
    ) -> None:
        super().__init__(in_features, parts, groups=groups, std=std, bias=bias)
        self.matmul: Matmul = F.linear

    def forward(self, x: Tensor) -> Tensor:
        """[M, K] → [M, N]."""
        return add_bias(linear(x, self.weight, matmul=self.matmul), self.bias)


def add_bias(y: Tensor, bias: Tensor | None) -> Tensor:
    """Add a bias to each row of `y` [M, N], if there is one; after a matmul's partial sums are summed over ranks."""
    return y if bias is None else y + bias


@dataclass(frozen=True)
class Sequences:
    """The sequences that M packed tokens form; tokens attend within their sequence.

    With context parallelism a rank has M of its group's N tokens, in order; keys and values are those of all N.

    Attributes:
        longest: tokens of a sample (S), which divides M, or N.
        starts: [M] int32, where each token's document begins among the M, or N, tokens; the first token of a sample
            begins one. None: each sample is one document.
        bounds: document bounds, given with `starts`: under 0; with context parallelism by the window of a layer (0:
            none), of this rank's pieces and the tokens that they see.
        places: [M] int32, with context parallelism, and with `starts`: each token's place among the N.
        exchanges: the exchange of keys by the window of a layer.
        group: name of the process group that has the N tokens; "" without context parallelism.
    """

    longest: int
    starts: Tensor | None = None
    bounds: Mapping[int, Bounds] = field(default_factory=dict)
    places: Tensor | None = None
    exchanges: Mapping[int, KeyChunks] = field(default_factory=dict)
    group: str = ""

    def rows(self, x: Tensor) -> Tensor:
        """View [M, …] as [B, S, …]; raise ConfigError if samples hold several documents, which rows would join."""
        if self.starts is not None:
            want = "samples that are one document each: attention within rows crosses documents"
            fix = "self.attend(q, k, v, sequences) of [M, heads, E], as in titanlite/models/llama3.py"
            saw, other = "called with documents", "data.document_mask = false"
            if self.group:
                saw, other = "called with a part of each sample", "parallelism.context_parallel_degree = 1"
            raise ConfigError(describe("attention", [Problem("sequences.rows", saw, want, f"{fix}; or {other}")]))
        return x.unflatten(0, (-1, self.longest))

    def positions(self, tokens: Tensor) -> Tensor:
        """Return each token's position in its document, [M] int64, on the device of `tokens` [M]."""
        if self.places is not None and self.starts is not None:
            return (self.places - self.starts).long()
        places = torch.arange(len(tokens), device=tokens.device)
        return places % self.longest if self.starts is None else places - self.starts

    def begin(self, table: Tensor) -> Tensor:
        """Index a table [positions, …] by the tokens' positions: [M, …], or [S, …] if each sample is one document, so
        that token m has row m modulo S. Call it once for all blocks."""
        if self.starts is not None:
            return table[self.positions(self.starts)]
        return table if self.longest == len(table) else table[: self.longest]


# So that a search for tensors among a block's arguments finds these.
pytree.register_pytree_node(
    Sequences,
    lambda given: (
        [given.starts, dict(given.bounds), given.places, dict(given.exchanges)],
        (given.longest, given.group),
    ),
    lambda tensors, others: Sequences(others[0], *tensors, others[1]),  # type: ignore[misc]
)


class CausalAttention(nn.Module):
    """Causal attention to `window` tokens, itself included, 0: all; a module without weights, so that it has a name."""

    def __init__(self, window: int = 0) -> None:
        super().__init__()
        self.window = window

    def forward(self, q: Tensor, k: Tensor, v: Tensor, sequences: Sequences | None = None) -> Tensor:
        """Attend within each sequence, [M, H, E] and [M, K, E] each to [M, H, E]; H is a multiple of K.

        Without `sequences` they are [B, H, S, E] and [B, K, S, E], and each row of S is one document.
        """
        if sequences is None:
            S = q.shape[2]
            if not self.window_in(S) and attention_kernel(q, is_plain=True) == "torch":
                return _attend_in_rows(q, k, v)
            packed = [x.transpose(1, 2).flatten(0, 1) for x in (q, k, v)]
            return self(*packed, Sequences(S)).unflatten(0, (-1, S)).transpose(1, 2)
        S, starts, window = sequences.longest, sequences.starts, self.window_in(sequences.longest)
        if sequences.group:
            of_window = sequences.bounds[window], sequences.places, sequences.exchanges[window], sequences.group
            return context_attention(q, k, v, S, window, starts, *of_window)  # type: ignore[arg-type]
        if starts is not None:
            return attention(q, k, v, S, window, starts, sequences.bounds[0])
        if window or attention_kernel(q, is_plain=True) != "torch":
            return attention(q, k, v, S, window)
        return _attend_in_rows(*(sequences.rows(x).transpose(1, 2) for x in (q, k, v))).transpose(1, 2).flatten(0, 1)

    def window_in(self, longest: int) -> int:
        """Return the window, or 0 if it holds all tokens of a sample."""
        return self.window if self.window < longest else 0


def _attend_in_rows(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """[B, H, S, E], by a kernel that torch chooses; `training/attention.py` says in which order."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] > k.shape[1])


class RMSNorm(nn.Module):
    """RMSNorm with a learned scale [D]; `eps` is added to the mean square."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dim))
        self.eps = eps

    def scale(self) -> Tensor:
        """Return the learned scale [D]."""
        return self.weight

    def forward(self, x: Tensor) -> Tensor:
        """[M, D] → [M, D]."""
        return rms_norm(x, self.scale(), self.eps)

    def fork(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return `self(x), x`, [M, D] each, whose gradients are added in one pass; hooks of the module do not run."""
        if type(self).forward is not RMSNorm.forward:  # a user's class that computes something else
            return self(x), x
        return fork_rms_norm(x, self.scale(), self.eps)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Return `self.fork(x + residual)`."""
        return self.fork(x + residual)


class LayerNorm(nn.Module):
    """LayerNorm with a learned scale and shift [D]; `eps` is added to the variance."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dim))
        self.bias = nn.Parameter(torch.empty(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[M, D] → [M, D]."""
        return layer_norm(x, self.weight, self.bias, self.eps)


class QKNormAttention(nn.Module):
    """Causal grouped-query attention whose queries and keys are normalised, head by head, before they are rotated.

    `std` and `residual_std` are standard deviations of the initial weights of `wqkv` and `wo`.
    """

    def __init__(self, dims: ModelDims, std: float, residual_std: float, window: int = 0) -> None:
        super().__init__()
        E, R = dims.head_width, dims.n_heads // dims.n_kv_heads
        self.queries_per_kv = R
        self.wqkv = Linear(dims.dim, {"wq": R * E, "wk": E, "wv": E}, groups=dims.n_kv_heads, std=std)
        self.q_norm, self.k_norm = RMSNorm(E, dims.norm_eps), RMSNorm(E, dims.norm_eps)
        self.attend = CausalAttention(window)
        self.wo = Linear(dims.n_heads * E, {"wo": dims.dim}, std=residual_std)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, sequences: Sequences) -> Tensor:
        """[M, D] → [M, D]."""
        scales = self.q_norm.scale(), self.k_norm.scale()
        heads = norm_rope(self.wqkv(x), *scales, cos, sin, self.queries_per_kv, self.q_norm.eps)
        return self.wo(self.attend(*heads, sequences).flatten(1))


class Embedding(nn.Module):
    """A table [V, D] whose rows are looked up; `std` is the standard deviation of the initial weights."""

    def __init__(self, vocab_size: int, dim: int, std: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, dim))
        self.std = std

    def forward(self, tokens: Tensor) -> Tensor:
        """[M] int64 → [M, D]."""
        return F.embedding(tokens, self.weight)
