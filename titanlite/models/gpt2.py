"""GPT-2: learned positions, LayerNorm, biases, and a GELU feed-forward; no dropout.

Axes as in `llama3.py`, with K = H. The bias of a projection that writes to the residual stream is added after the
partial sums of tensor-parallel ranks are summed.

Source: Radford et al. 2019, "Language Models are Unsupervised Multitask Learners", section 2.3.
"""

from collections.abc import Mapping
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from titanlite.config.recipe_schema import ModelDims
from titanlite.kernels.rope import heads
from titanlite.models.layers import CausalAttention, Embedding, LayerNorm, Linear, Sequences

INIT_STD = 0.02
POSITION_STD = 0.01


class GPT2Attention(nn.Module):
    """Causal attention with biases, grouped-query if the recipe has fewer key/value heads than query heads.

    `residual_std` is the standard deviation of the initial weights of `wo`.
    """

    def __init__(self, dims: ModelDims, residual_std: float) -> None:
        super().__init__()
        self.head_dim, self.queries_per_kv = dims.head_width, dims.n_heads // dims.n_kv_heads
        E, R = self.head_dim, self.queries_per_kv
        parts = {"wq": R * E, "wk": E, "wv": E}
        self.wqkv = Linear(dims.dim, parts, groups=dims.n_kv_heads, std=INIT_STD, bias=True)
        self.attend = CausalAttention()
        self.wo = Linear(dims.n_heads * E, {"wo": dims.dim}, std=residual_std, bias=True)

    def forward(self, x: Tensor, sequences: Sequences) -> Tensor:
        """Attend within the sequences of M tokens of width D: [M, D] → [M, D]."""
        q, k, v = heads(self.wqkv(x), self.queries_per_kv, self.head_dim)
        return self.wo(self.attend(q.flatten(1, 2), k.squeeze(2), v.squeeze(2), sequences).flatten(1))


class GeluFeedForward(nn.Module):
    """Feed-forward with tanh GELU. `residual_std`: standard deviation of the initial weights of `w2`."""

    def __init__(self, dims: ModelDims, residual_std: float) -> None:
        super().__init__()
        self.w1 = Linear(dims.dim, {"w1": dims.ffn_dim}, std=INIT_STD, bias=True)
        self.w2 = Linear(dims.ffn_dim, {"w2": dims.dim}, std=residual_std, bias=True)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the feed-forward to M tokens of width D: [M, D] → [M, D]."""
        return self.w2(F.gelu(self.w1(x), approximate="tanh"))


class GPT2Block(nn.Module):
    """One transformer block."""

    def __init__(self, dims: ModelDims) -> None:
        super().__init__()
        residual_std = INIT_STD / (2 * dims.n_layers) ** 0.5
        self.attention_norm = LayerNorm(dims.dim, dims.norm_eps)
        self.attention = GPT2Attention(dims, residual_std)
        self.ffn_norm = LayerNorm(dims.dim, dims.norm_eps)
        self.feed_forward = GeluFeedForward(dims, residual_std)

    def forward(self, x: Tensor, sequences: Sequences) -> Tensor:
        """Apply the block to M tokens of width D: [M, D] → [M, D]."""
        h = x + self.attention(self.attention_norm(x), sequences)
        return h + self.feed_forward(self.ffn_norm(h))


class GPT2(nn.Module):
    """The GPT-2 model; arguments as in `Llama3`. Tensor-parallel ranks each hold the embeddings of all positions."""

    sharding: ClassVar[Mapping[str, str]] = {
        "tok_embeddings.weight": "tp:0",
        "@tok_embeddings": "tp:0",
        "positions.weight": "replicate",
        "layers.*.attention.wqkv.weight": "tp:0",
        "layers.*.feed_forward.w1.weight": "tp:0",
        "output.weight": "tp:0",
    }

    def __init__(self, dims: ModelDims, seq_len: int) -> None:
        super().__init__()
        self.dims, self.seq_len = dims, seq_len
        self.tok_embeddings = Embedding(dims.vocab_size, dims.dim, INIT_STD)
        self.positions = Embedding(dims.max_seq_len, dims.dim, POSITION_STD)
        self.layers = nn.ModuleList(GPT2Block(dims) for _ in range(dims.n_layers))
        self.norm = LayerNorm(dims.dim, dims.norm_eps)
        self.output = Linear(dims.dim, {"output": dims.vocab_size}, std=INIT_STD)
        if dims.tied_embeddings:
            self.output.weight = self.tok_embeddings.weight

    def fill_buffers(self) -> None:
        """Do nothing: the model has no buffers."""

    def forward(self, tokens: Tensor, sequences: Sequences | None = None) -> Tensor:
        """See `Llama3.forward`."""
        sequences = sequences or Sequences(self.seq_len)
        x = self.tok_embeddings(tokens) + self.positions(sequences.positions(tokens))
        for block in self.layers:
            x = block(x, sequences)
        return self.output(self.norm(x))
