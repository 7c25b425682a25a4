"""Llama 3: pre-norm decoder with grouped-query attention, rotary positions and a SwiGLU feed-forward.

Axes: M tokens of all sequences packed, S sequence length, D model width, F ffn width, H query heads, K key/value heads,
R = H/K query heads per key/value head, E head width, V vocabulary. Activations between modules are [M, D].

The file has no code for parallelism, float8 or checkpointing, except five annotations of a tensor-parallel layout
(`Llama3.sharding`; `titanlite/sharding` derives the rest). Head counts are derived from the widths of projections, so
that a rank that holds a part of the heads runs the same code.

Source: Llama Team 2024, "The Llama 3 Herd of Models", section 3.2.
"""

from collections.abc import Iterable, Mapping
from typing import ClassVar

import torch
from torch import Tensor, nn

from titanlite.config.recipe_schema import ModelDims
from titanlite.kernels.rope import rope_table, rotated_heads
from titanlite.kernels.swiglu import BLOCK, swiglu
from titanlite.models.layers import CausalAttention, Embedding, Linear, RMSNorm, Sequences

INIT_STD = 0.02


class Attention(nn.Module):
    """Causal grouped-query attention. `residual_std`: standard deviation of the initial weights of `wo`."""

    def __init__(self, dims: ModelDims, residual_std: float) -> None:
        super().__init__()
        E, R = dims.head_width, dims.n_heads // dims.n_kv_heads
        self.queries_per_kv = R
        self.wqkv = Linear(dims.dim, {"wq": R * E, "wk": E, "wv": E}, groups=dims.n_kv_heads, std=INIT_STD)
        self.attend = CausalAttention()
        self.wo = Linear(dims.dim, {"wo": dims.dim}, std=residual_std)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, sequences: Sequences) -> Tensor:
        """Attend within the sequences of M tokens of width D: [M, D] → [M, D]. `cos` and `sin` are rotary tables."""
        heads = rotated_heads(self.wqkv(x), cos, sin, self.queries_per_kv)
        return self.wo(self.attend(*heads, sequences).flatten(1))


class FeedForward(nn.Module):
    """SwiGLU feed-forward. `residual_std`: standard deviation of the initial weights of `w2`."""

    def __init__(self, dims: ModelDims, residual_std: float) -> None:
        super().__init__()
        self.w13 = Linear(dims.dim, {"w1": BLOCK, "w3": BLOCK}, groups=dims.ffn_dim // BLOCK, std=INIT_STD)
        self.w2 = Linear(dims.ffn_dim, {"w2": dims.dim}, std=residual_std)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the feed-forward to M tokens of width D: [M, D] → [M, D]."""
        return self.w2(swiglu(self.w13(x)))


class Block(nn.Module):
    """One transformer block."""

    def __init__(self, dims: ModelDims) -> None:
        super().__init__()
        # Two sublayers per block add to the residual stream. This std makes its final variance independent of depth.
        residual_std = INIT_STD / (2 * dims.n_layers) ** 0.5
        self.attention_norm = RMSNorm(dims.dim, dims.norm_eps)
        self.attention = Attention(dims, residual_std)
        self.ffn_norm = RMSNorm(dims.dim, dims.norm_eps)
        self.feed_forward = FeedForward(dims, residual_std)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, sequences: Sequences) -> Tensor:
        """Apply the block to M tokens of width D: [M, D] → [M, D]. `cos` and `sin` are rotary tables."""
        normed, x = self.attention_norm.fork(x)
        normed, h = self.ffn_norm.add(self.attention(normed, cos, sin, sequences), x)
        return h + self.feed_forward(normed)


class Llama3(nn.Module):
    """The Llama 3 model.

    Args:
        dims: dimensions of the model.
        seq_len: S; every sequence has this length.

    Attributes:
        block: the class of the model's blocks.
        sharding: layout under tensor parallelism: weights are split by rows (heads, features, vocabulary), and
            activations between layers by tokens.
    """

    block: ClassVar[type[nn.Module]] = Block
    sharding: ClassVar[Mapping[str, str]] = {
        "tok_embeddings.weight": "tp:0",
        "@tok_embeddings": "tp:0",
        "layers.*.attention.wqkv.weight": "tp:0",
        "layers.*.feed_forward.w13.weight": "tp:0",
        "output.weight": "tp:0",
    }

    def __init__(self, dims: ModelDims, seq_len: int) -> None:
        super().__init__()
        self.dims, self.seq_len = dims, seq_len
        self.tok_embeddings = Embedding(dims.vocab_size, dims.dim, INIT_STD)
        self.layers = nn.ModuleList(self.make_blocks(dims))
        self.norm = RMSNorm(dims.dim, dims.norm_eps)
        self.output = Linear(dims.dim, {"output": dims.vocab_size}, std=INIT_STD)
        if dims.tied_embeddings:
            self.output.weight = self.tok_embeddings.weight
        self.register_buffer("cos", torch.empty(seq_len, dims.head_width // 2), persistent=False)
        self.register_buffer("sin", torch.empty_like(self.cos), persistent=False)

    def make_blocks(self, dims: ModelDims) -> Iterable[nn.Module]:
        """Make the model's blocks, in order."""
        return (self.block(dims) for _ in range(dims.n_layers))

    def fill_buffers(self) -> None:
        """Compute the rotary table. Call this when the model is no longer on the meta device."""
        dims = self.dims
        table = rope_table(self.seq_len, dims.head_width, dims.rope_theta, dims.rope_scaling)
        self.cos, self.sin = (t.to(self.cos.device) for t in table)

    def forward(self, tokens: Tensor, sequences: Sequences | None = None) -> Tensor:
        """Predict the next token at every position.

        Args:
            tokens: [M] int64, token ids of all sequences.
            sequences: the sequences that the tokens form; None: every S tokens form one.

        Returns:
            Logits [M, V] for a vocabulary of V, in the compute dtype.
        """
        sequences = sequences or Sequences(self.seq_len)
        cos, sin = (sequences.begin(table) for table in (self.cos, self.sin))
        x = self.tok_embeddings(tokens)
        for block in self.layers:
            x = block(x, cos, sin, sequences)
        return self.output(self.norm(x))
