"""Gemma 3, text only: norms before and after each sublayer, GeGLU, tied embeddings that are scaled by sqrt(D), and
layers that attend to a window of tokens with one of all tokens between them.

Axes as in `llama3.py`. A norm's weight is the factor itself; published checkpoints hold it less one.

Source: Gemma Team 2025, "Gemma 3 Technical Report", section 2.
"""

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor, nn

from titanlite.config.recipe_schema import ModelDims
from titanlite.kernels.geglu import geglu
from titanlite.kernels.rope import rope_table
from titanlite.kernels.swiglu import BLOCK
from titanlite.models.layers import Embedding, Linear, QKNormAttention, RMSNorm, Sequences

INIT_STD = 0.02


class GegluFeedForward(nn.Module):
    """GeGLU feed-forward.

    Args:
        dims: the model's dimensions.
    """

    def __init__(self, dims: ModelDims) -> None:
        super().__init__()
        self.w13 = Linear(dims.dim, {"w1": BLOCK, "w3": BLOCK}, groups=dims.ffn_dim // BLOCK, std=INIT_STD)
        self.w2 = Linear(dims.ffn_dim, {"w2": dims.dim}, std=INIT_STD)

    def forward(self, x: Tensor) -> Tensor:
        """[M, D] → [M, D]."""
        return self.w2(geglu(self.w13(x)))


class Gemma3Block(nn.Module):
    """One transformer block. A norm behind each sublayer sets the size of what is added to the residual stream.

    Args:
        dims: the model's dimensions.
        window: tokens that its attention sees; 0: all.
    """

    def __init__(self, dims: ModelDims, window: int) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(dims.dim, dims.norm_eps)
        self.attention = QKNormAttention(dims, INIT_STD, INIT_STD, window)
        self.post_attention_norm = RMSNorm(dims.dim, dims.norm_eps)
        self.ffn_norm = RMSNorm(dims.dim, dims.norm_eps)
        self.feed_forward = GegluFeedForward(dims)
        self.post_ffn_norm = RMSNorm(dims.dim, dims.norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, sequences: Sequences) -> Tensor:
        """[M, D] → [M, D]."""
        normed, x = self.attention_norm.fork(x)
        attended = self.post_attention_norm(self.attention(normed, cos, sin, sequences))
        normed, h = self.ffn_norm.add(attended, x)
        return h + self.post_ffn_norm(self.feed_forward(normed))


class Gemma3(nn.Module):
    """The whole model.

    Args:
        dims: its dimensions.
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

    def __init__(self, dims: ModelDims, seq_len: int) -> None:
        super().__init__()
        self.dims, self.seq_len = dims, seq_len
        self.tok_embeddings = Embedding(dims.vocab_size, dims.dim, INIT_STD)
        self.layers = nn.ModuleList(Gemma3Block(dims, window) for window in dims.windows)
        self.norm = RMSNorm(dims.dim, dims.norm_eps)
        self.output = Linear(dims.dim, {"output": dims.vocab_size}, std=INIT_STD)
        if dims.tied_embeddings:
            self.output.weight = self.tok_embeddings.weight
        for name in ("cos", "sin", "local_cos", "local_sin"):
            self.register_buffer(name, torch.empty(seq_len, dims.head_width // 2), persistent=False)

    def fill_buffers(self) -> None:
        """Compute the rotary tables; call once the model is off the meta device."""
        E, device = self.dims.head_width, self.cos.device
        self.cos, self.sin = (t.to(device) for t in rope_table(self.seq_len, E, self.dims.rope_theta, None))
        local = rope_table(self.seq_len, E, self.dims.local_rope_theta, None)
        self.local_cos, self.local_sin = (t.to(device) for t in local)

    def forward(self, tokens: Tensor, sequences: Sequences | None = None) -> Tensor:
        """Predict the next token at every position.

        Args:
            tokens: [M] int64.
            sequences: that these are; None: each S tokens are one.

        Returns:
            Logits [M, V] in the compute dtype.
        """
        sequences = sequences or Sequences(self.seq_len)
        everywhere = [sequences.begin(table) for table in (self.cos, self.sin)]
        local = [sequences.begin(table) for table in (self.local_cos, self.local_sin)]
        x = self.tok_embeddings(tokens) * self.dims.dim**0.5
        for block in self.layers:
            is_local = block.attention.attend.window > 0  # type: ignore[union-attr,operator]
            x = block(x, *(local if is_local else everywhere), sequences)
        return self.output(self.norm(x))
