"""Qwen3-MoE, OLMoE and Mixtral: Llama's decoder with a mixture of experts in the place of each feed-forward.

They differ in their attention (Qwen3 normalises queries and keys head by head, OLMoE all heads together, Mixtral not at
all) and in recipe data (`models/experts.py`). Axes as in `llama3.py`.

Source: Qwen Team 2025, "Qwen3 Technical Report", section 2; Muennighoff et al. 2024, "OLMoE", section 2; Jiang et al.
2024, "Mixtral of Experts", section 2.
"""

from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor, nn

from titanlite.config.recipe_schema import ModelDims
from titanlite.kernels.rope import heads, rope
from titanlite.models import llama3
from titanlite.models.experts import MixtureOfExperts
from titanlite.models.layers import QKNormAttention, RMSNorm, Sequences


class WideNormAttention(llama3.Attention):
    """Llama's attention whose queries, and keys, are normalised over all heads at once before they are rotated."""

    def __init__(self, dims: ModelDims, residual_std: float) -> None:
        super().__init__(dims, residual_std)
        self.q_norm = RMSNorm(dims.n_heads * dims.head_width, dims.norm_eps)
        self.k_norm = RMSNorm(dims.n_kv_heads * dims.head_width, dims.norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, sequences: Sequences) -> Tensor:
        """Attend within the sequences of M tokens of width D: [M, D] → [M, D]. `cos` and `sin` are rotary tables."""
        E = 2 * cos.shape[1]
        q, k, v = heads(self.wqkv(x), self.queries_per_kv, E)
        q, k = self.q_norm(q.flatten(1)), self.k_norm(k.flatten(1))
        q, k = (rope(t.unflatten(1, (-1, E)), cos, sin) for t in (q, k))
        return self.wo(self.attend(q, k, v.squeeze(2), sequences).flatten(1))


class MixtralBlock(nn.Module):
    """A transformer block with a mixture of experts."""

    def __init__(self, dims: ModelDims) -> None:
        super().__init__()
        residual_std = llama3.INIT_STD / (2 * dims.n_layers) ** 0.5  # as in `llama3.Block`
        self.attention_norm = RMSNorm(dims.dim, dims.norm_eps)
        self.attention = self.attention_of(dims, residual_std)
        self.ffn_norm = RMSNorm(dims.dim, dims.norm_eps)
        self.experts = MixtureOfExperts(dims, llama3.INIT_STD, residual_std)

    def attention_of(self, dims: ModelDims, residual_std: float) -> nn.Module:
        """Make the attention."""
        return llama3.Attention(dims, residual_std)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, sequences: Sequences) -> Tensor:
        """Apply the block to M tokens of width D: [M, D] → [M, D]. `cos` and `sin` are rotary tables."""
        normed, x = self.attention_norm.fork(x)
        normed, h = self.ffn_norm.add(self.attention(normed, cos, sin, sequences), x)
        return h + self.experts(normed)


class Qwen3MoEBlock(MixtralBlock):
    """Mixtral's block with queries and keys that are normalised head by head."""

    def attention_of(self, dims: ModelDims, residual_std: float) -> nn.Module:
        """Make the attention."""
        return QKNormAttention(dims, llama3.INIT_STD, residual_std)


class OLMoEBlock(MixtralBlock):
    """Mixtral's block with queries and keys that are normalised over all heads."""

    def attention_of(self, dims: ModelDims, residual_std: float) -> nn.Module:
        """Make the attention."""
        return WideNormAttention(dims, residual_std)


class Mixtral(llama3.Llama3):
    """Llama's model with `MixtralBlock`s. Tensor parallelism does not split experts: ranks send them their tokens."""

    block: ClassVar[type[nn.Module]] = MixtralBlock
    sharding: Mapping[str, str] = {
        name: dim for name, dim in llama3.Llama3.sharding.items() if "feed_forward" not in name
    }

    def __init__(self, dims: ModelDims, seq_len: int) -> None:
        super().__init__(dims, seq_len)
        if dims.experts is not None and dims.experts.shared:
            self.sharding = {**self.sharding, "layers.*.experts.shared.w13.weight": "tp:0"}

    def fill_buffers(self) -> None:
        """Compute the rotary table, and zero the experts' buffers. Call this when the model is off the meta device."""
        super().fill_buffers()
        for block in self.layers:
            block.experts.fill_buffers()  # type: ignore[operator,union-attr]


class Qwen3MoE(Mixtral):
    """Mixtral's model with Qwen3's attention."""

    block: ClassVar[type[nn.Module]] = Qwen3MoEBlock


class OLMoE(Mixtral):
    """Mixtral's model with OLMoE's attention."""

    block: ClassVar[type[nn.Module]] = OLMoEBlock
