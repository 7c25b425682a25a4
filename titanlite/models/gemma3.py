"""Gemma 3, text only: norms before and after each sublayer, GeGLU, tied embeddings that are scaled by sqrt(D), and
layers that attend to a window of tokens, with layers that attend to all tokens between them.

Axes as in `llama3.py`. A norm's weight is the factor itself; published checkpoints store the factor minus 1.

Source: Gemma Team 2025, "Gemma 3 Technical Report", section 2.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from titanlite.config.recipe_schema import ModelDims
from titanlite.kernels.geglu import geglu
from titanlite.kernels.rope import rope_table
from titanlite.models import llama3
from titanlite.models.layers import QKNormAttention, RMSNorm, Sequences
from titanlite.models.llama3 import INIT_STD


class GegluFeedForward(llama3.FeedForward):
    """GeGLU feed-forward."""

    def forward(self, x: Tensor) -> Tensor:
        """Apply the feed-forward to M tokens of width D: [M, D] → [M, D]."""
        return self.w2(geglu(self.w13(x)))


class Gemma3Block(nn.Module):
    """A transformer block with a norm before and after each sublayer. A token attends to `window` tokens; 0: all."""

    def __init__(self, dims: ModelDims, window: int) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(dims.dim, dims.norm_eps)
        self.attention = QKNormAttention(dims, INIT_STD, INIT_STD, window)
        self.post_attention_norm = RMSNorm(dims.dim, dims.norm_eps)
        self.ffn_norm = RMSNorm(dims.dim, dims.norm_eps)
        self.feed_forward = GegluFeedForward(dims, INIT_STD)
        self.post_ffn_norm = RMSNorm(dims.dim, dims.norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, sequences: Sequences) -> Tensor:
        """Apply the block to M tokens of width D: [M, D] → [M, D]. `cos` and `sin` are rotary tables."""
        normed, x = self.attention_norm.fork(x)
        attended = self.post_attention_norm(self.attention(normed, cos, sin, sequences))
        normed, h = self.ffn_norm.add(attended, x)
        return h + self.post_ffn_norm(self.feed_forward(normed))


class Gemma3(llama3.Llama3):
    """Llama's model with `Gemma3Block`s, and a second rotary table for layers with a window."""

    def __init__(self, dims: ModelDims, seq_len: int) -> None:
        super().__init__(dims, seq_len)
        for name in ("local_cos", "local_sin"):
            self.register_buffer(name, torch.empty_like(self.cos), persistent=False)

    def make_blocks(self, dims: ModelDims) -> Iterable[nn.Module]:
        """See `Llama3.make_blocks`."""
        return (Gemma3Block(dims, window) for window in dims.windows)

    def fill_buffers(self) -> None:
        """Compute the rotary tables. Call this when the model is no longer on the meta device."""
        super().fill_buffers()
        local = rope_table(self.seq_len, self.dims.head_width, self.dims.local_rope_theta, None)
        self.local_cos, self.local_sin = (t.to(self.cos.device) for t in local)

    def forward(self, tokens: Tensor, sequences: Sequences | None = None) -> Tensor:
        """See `Llama3.forward`."""
        sequences = sequences or Sequences(self.seq_len)
        everywhere = [sequences.begin(table) for table in (self.cos, self.sin)]
        local = [sequences.begin(table) for table in (self.local_cos, self.local_sin)]
        x = self.tok_embeddings(tokens) * self.dims.dim**0.5
        for block in self.layers:
            is_local = block.attention.attend.window > 0  # type: ignore[union-attr,operator]
            x = block(x, *(local if is_local else everywhere), sequences)
        return self.output(self.norm(x))
