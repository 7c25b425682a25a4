"""Qwen3, dense: Llama's decoder with an RMSNorm over each head's queries and keys, and heads of a width of their own.

Axes as in `llama3.py`, whose feed-forward it has; H·E need not be D.

Source: Qwen Team 2025, "Qwen3 Technical Report", section 2.
"""

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor, nn

from titanlite.config.recipe_schema import ModelRecipe
from titanlite.kernels.rope import rope_table
from titanlite.models.layers import Embedding, Linear, QKNormAttention, RMSNorm
from titanlite.models.llama3 import INIT_STD, FeedForward


class Block(nn.Module):
    """One transformer block.

    Args:
        sizes: the model's dimensions.
    """

    def __init__(self, sizes: ModelRecipe) -> None:
        super().__init__()
        residual_std = INIT_STD / (2 * sizes.n_layers) ** 0.5  # as in Llama 3
        self.attention_norm = RMSNorm(sizes.dim, sizes.norm_eps)
        self.attention = QKNormAttention(sizes, INIT_STD, residual_std)
        self.ffn_norm = RMSNorm(sizes.dim, sizes.norm_eps)
        self.feed_forward = FeedForward(sizes, residual_std)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[M, D] → [M, D]."""
        attended = self.attention(self.attention_norm(x), cos, sin)
        normed, h = self.ffn_norm.add(attended, x)
        return h + self.feed_forward(normed)


class Qwen3(nn.Module):
    """The whole model.

    Args:
        sizes: its dimensions.
        seq_len: S; every sequence has this length.

    Attributes:
        sharding: weights by rows of heads, features and vocabulary; between the layers tokens are split.
    """

    sharding: ClassVar[Mapping[str, str]] = {
        "tok_embeddings.weight": "tp:0",
        "@tok_embeddings": "tp:0",
        "layers.*.attention.wqkv.weight": "tp:0",
        "layers.*.feed_forward.w13.weight": "tp:0",
        "output.weight": "tp:0",
    }

    def __init__(self, sizes: ModelRecipe, seq_len: int) -> None:
        super().__init__()
        self.sizes, self.seq_len = sizes, seq_len
        self.tok_embeddings = Embedding(sizes.vocab_size, sizes.dim, INIT_STD)
        self.layers = nn.ModuleList(Block(sizes) for _ in range(sizes.n_layers))
        self.norm = RMSNorm(sizes.dim, sizes.norm_eps)
        self.output = Linear(sizes.dim, {"output": sizes.vocab_size}, std=INIT_STD)
        if sizes.tied_embeddings:
            self.output.weight = self.tok_embeddings.weight
        self.register_buffer("cos", torch.empty(seq_len, sizes.head_width // 2), persistent=False)
        self.register_buffer("sin", torch.empty_like(self.cos), persistent=False)

    def fill_buffers(self) -> None:
        """Compute the rotary table; call once the model is off the meta device."""
        table = rope_table(self.seq_len, self.sizes.head_width, self.sizes.rope_theta, None)
        self.cos, self.sin = (t.to(self.cos.device) for t in table)

    def forward(self, tokens: Tensor) -> Tensor:
        """Predict the next token at every position.

        Args:
            tokens: [M] int64, M a multiple of S.

        Returns:
            Logits [M, V] in the compute dtype.
        """
        x = self.tok_embeddings(tokens)
        for block in self.layers:
            x = block(x, self.cos, self.sin)
        return self.output(self.norm(x))
