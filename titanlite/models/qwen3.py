"""Qwen3, dense: Llama's decoder with an RMSNorm over each head's queries and keys, and heads of any width.

Axes as in `llama3.py`; H·E need not be D.

Source: Qwen Team 2025, "Qwen3 Technical Report", section 2.
"""

from typing import ClassVar

from torch import nn

from titanlite.config.recipe_schema import ModelDims
from titanlite.models import llama3
from titanlite.models.layers import QKNormAttention


class Block(llama3.Block):
    """Llama's block with `QKNormAttention`."""

    def __init__(self, dims: ModelDims) -> None:
        super().__init__(dims)
        self.attention = QKNormAttention(dims, llama3.INIT_STD, self.feed_forward.w2.std)


class Qwen3(llama3.Llama3):
    """Llama's model with Qwen3's blocks."""

    block: ClassVar[type[nn.Module]] = Block
