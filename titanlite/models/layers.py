"""The layers that models are built from: plain, single-device, without code for the ways in which they can be split.

A projection fuses the weights that share an input into one matrix, so that one all-gather feeds one matmul. Each part
still has its own name, initialisation and export (`wq`, `wk`, `wv` of `wqkv`).

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
    """Return whether a module runs the forward of the class `kind`: neither a subclass nor the object replaces it."""
    return type(module).forward is kind.forward and "forward" not in vars(module)


class Projection(nn.Module):
    """A base class that holds one weight, or several fused by rows, and has no forward.

    Args:
        in_features: K, the width of the input.
        parts: rows of each part within one group, in order; one part for a plain layer.
        groups: how often the pattern of parts repeats. The width of the output is N = groups · Σ parts.
        std: standard deviation of the initial weights.
        bias: whether a learned bias is added to each output feature.

    Attributes:
        weight: [N, K].
        bias: [N], in the order of the weight's rows, or None.
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
        """Return the number of weights that a token is multiplied by."""
        return self.weight.numel()

    def fuse(self, parts: Mapping[str, Tensor]) -> Tensor:
        """Interleave separate weights, [groups · rows, K] each, into one [N, K]; or biases [groups · rows] into [N]."""
        return torch.cat([parts[name].unflatten(0, (self.groups, -1)) for name in self.parts], dim=1).flatten(0, 1)

    def split(self, weight: Tensor) -> dict[str, Tensor]:
        """Split a fused weight [N, K], or bias [N], into its parts by name: the inverse of `fuse`."""
        pieces = weight.unflatten(0, (self.groups, -1)).split(list(self.parts.values()), dim=1)
        return {name: piece.flatten(0, 1) for name, piece in zip(self.parts, pieces, strict=True)}


class Linear(Projection):
    """A linear layer, `x @ weight.T + bias`; arguments as in `Projection`.

    Attributes:
        matmul: the arithmetic; a float8 recipe replaces it.
    """

    def __init__(
        self, in_features: int, parts: Mapping[str, int], *, groups: int = 1, std: float, bias: bool = False
    ) -> None:
        super().__init__(in_features, parts, groups=groups, std=std, bias=bias)
        self.matmul: Matmul = F.linear

    def forward(self, x: Tensor) -> Tensor:
        """Return `x @ weight.T + bias` [M, N] for x [M, K]."""
        return add_bias(linear(x, self.weight, matmul=self.matmul), self.bias)


def add_bias(y: Tensor, bias: Tensor | None) -> Tensor:
    """Add the bias, if any, to each row of `y` [M, N]. Call this after partial sums are summed over ranks."""
    return y if bias is None else y + bias


@dataclass(frozen=True)
class Sequences:
    """The sequences that this rank's M packed tokens form. Each token attends within its sequence.

    With context parallelism the rank has M of the N tokens of a group of ranks, in order, and attends to keys and
    values of all N. Without it, N = M.

    Attributes:
        longest: S, the number of tokens in a sample; N is a multiple of S.
        starts: [M] int32, for each token the index, among the N, of the first token of its document. The first token of
            a sample begins a document. None: each sample is one document.
        bounds: document bounds by window of attention, given with `starts`. Without context parallelism the only key is
            0. With it, key 0 is for layers without a window, and bounds are for this rank's pieces of the sequence.
        places: [M] int32, given with context parallelism and `starts`: the index of each token among the N.
        exchanges: with context parallelism, the exchange of keys and values by window of attention.
        group: name of the process group that has the N tokens; "" without context parallelism.
    """

    longest: int
    starts: Tensor | None = None
    bounds: Mapping[int, Bounds] = field(default_factory=dict)
    places: Tensor | None = None
    exchanges: Mapping[int, KeyChunks] = field(default_factory=dict)
    group: str = ""

    def rows(self, x: Tensor) -> Tensor:
        """View M tokens [M, …] as B samples [B, S, …]. Raise ConfigError if one holds several documents or is split."""
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
        """Return the entries of a table [positions, …] for the tokens, [M, …]; or [S, …] if each sample is one document
        and token m uses entry m modulo S. Call it once for all blocks."""
        if self.starts is not None:
            return table[self.positions(self.starts)]
        return table if self.longest == len(table) else table[: self.longest]

    def attend(self, layer: "CausalAttention", q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend within each sequence, as `CausalAttention.forward` says."""
        S, starts, window = self.longest, self.starts, layer.window_in(self.longest)
        if self.group:
            of_window = self.bounds[window], self.places, self.exchanges[window], self.group
            return context_attention(q, k, v, S, window, starts, *of_window)  # type: ignore[arg-type]
        if starts is not None:
            return attention(q, k, v, S, window, starts, self.bounds[0])
        if window or attention_kernel(q, is_plain=True) != "torch":
            return attention(q, k, v, S, window)
        return _attend_in_rows(*(self.rows(x).transpose(1, 2) for x in (q, k, v))).transpose(1, 2).flatten(0, 1)


# Lets functions of pytree find these tensors among the arguments of a block.
pytree.register_pytree_node(
    Sequences,
    lambda given: (
        [given.starts, dict(given.bounds), given.places, dict(given.exchanges)],
        (given.longest, given.group),
    ),
    lambda tensors, others: Sequences(others[0], *tensors, others[1]),  # type: ignore[misc]
)


class CausalAttention(nn.Module):
    """Causal attention of a token to the last `window` tokens including itself; 0: all. A module, to have a name."""

    def __init__(self, window: int = 0) -> None:
        super().__init__()
        self.window = window

    def forward(self, q: Tensor, k: Tensor, v: Tensor, sequences: Sequences | None = None) -> Tensor:
        """Attend within each sequence: q [M, H, E], k and v [M, K, E] → [M, H, E].

        There are M tokens, H query heads, K key/value heads (H is a multiple of K), and E is the head width. Without
        `sequences`: q [B, H, S, E], k and v [B, K, S, E] → [B, H, S, E], and each of B samples is one document.
        """
        if sequences is None:
            S = q.shape[2]
            if not self.window_in(S) and attention_kernel(q, is_plain=True) == "torch":
                return _attend_in_rows(q, k, v)
            packed = [x.transpose(1, 2).flatten(0, 1) for x in (q, k, v)]
            return self(*packed, Sequences(S)).unflatten(0, (-1, S)).transpose(1, 2)
        return sequences.attend(self, q, k, v)

    def window_in(self, longest: int) -> int:
        """Return the window, or 0 if it covers all tokens of a sample of `longest` tokens."""
        return self.window if self.window < longest else 0


def _attend_in_rows(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attend in B samples of S tokens, q [B, H, S, E], by the first kernel of `training/attention.py` that can."""
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
        """Normalise each row of x [M, D] and multiply it by the scale."""
        return rms_norm(x, self.scale(), self.eps)

    def fork(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return `(self(x), x)`, [M, D] each. Backward adds both gradients in one pass. The norm's hooks do not run."""
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
        """Normalise each row of x [M, D], multiply it by the scale and add the shift."""
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
        """Attend within the sequences of M tokens of width D: [M, D] → [M, D]. `cos` and `sin` are rotary tables."""
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
        """Look up token ids [M] int64 → [M, D]."""
        return F.embedding(tokens, self.weight)
