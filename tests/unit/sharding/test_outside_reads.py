"""Code that computes with a weight outside of its layer cannot run on a rank, and is refused by its line."""

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from titanlite import recipes
from titanlite.errors import ShardingError
from titanlite.kernels.rms_norm import rms_norm
from titanlite.models.layers import RMSNorm
from titanlite.models.llama3 import Block, Llama3
from titanlite.models.qwen3 import Qwen3
from titanlite.sharding.layers import plan_layers

TOKENS, RANKS = 128, 2
SIZES = dataclasses.replace(recipes.load("model", "llama3-debug"), n_layers=3)


class Mine(Llama3):
    """A model of one's own."""


class Tied(Mine):
    """Its head has the embedding's weight, and is no call of the layer."""

    def forward(self, tokens: Tensor) -> Tensor:
        """[M] → [M, V]."""
        x = self.tok_embeddings(tokens)
        for block in self.layers:
            x = block(x, self.cos, self.sin)
        return F.linear(self.norm(x), self.output.weight)


class Between(Block):
    """A block that does something of its own between its sublayers."""

    between: Callable[[Tensor, Block], Tensor]

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[M, D] → [M, D]."""
        h = x + self.attention(self.attention_norm(x), cos, sin)
        return h + self.feed_forward(self.between(h, self))


class Product(torch.autograd.Function):
    """Rows times a vector."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        """[M, D], [D] → [M, D]."""
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """[M, D] → [M, D], [D]."""
        x, w = ctx.saved_tensors
        return g * w, (g * x).sum(0)


def refused(between: Callable[[Tensor, Block], Tensor], kind: type[Llama3] = Mine) -> str:
    """What is said of a model with such blocks, or nothing."""
    with torch.device("meta"):
        model = kind(SIZES, TOKENS)
    for block in model.layers:
        block.__class__ = Between
        block.between = between  # type: ignore[assignment]
    try:
        plan_layers(model, TOKENS, RANKS)
    except ShardingError as error:
        return str(error)
    finally:  # the model is as it was
        assert not any({"forward", "add", "scale"} & vars(module).keys() for module in model.modules())
    return ""


def factor(h: Tensor, block: Block) -> Tensor:
    return block.ffn_norm(h) * block.ffn_norm.weight


def values(h: Tensor, block: Block) -> Tensor:
    return block.ffn_norm(h) * block.ffn_norm.weight.detach()


def kernel(h: Tensor, block: Block) -> Tensor:
    return rms_norm(h, block.ffn_norm.weight, 1e-5)


def function(h: Tensor, block: Block) -> Tensor:
    return Product.apply(block.ffn_norm(h), block.ffn_norm.weight)  # type: ignore[return-value]


def new(h: Tensor, block: Block) -> Tensor:
    return block.ffn_norm(h) + block.ffn_norm.weight.new_zeros(())


def by_its_class(h: Tensor, block: Block) -> Tensor:
    return RMSNorm.forward(block.ffn_norm, h)


def in_another_layer(h: Tensor, block: Block) -> Tensor:
    return rms_norm(block.ffn_norm(h), block.attention_norm.weight, 1e-5)


def of_what_is_split(h: Tensor, block: Block) -> Tensor:
    return block.ffn_norm(h) * (h @ block.attention.wqkv.weight.T).sum(-1, keepdim=True)


@pytest.mark.parametrize(
    ("between", "layer", "fix"),
    [
        *((read, "ffn_norm", "take layers.*.ffn_norm.scale()") for read in (factor, values, kernel, new)),
        (in_another_layer, "attention_norm", "take layers.*.attention_norm.scale()"),
        (of_what_is_split, "attention.wqkv", "call layers.*.attention.wqkv, or another layer"),
    ],
)
def test_it_is_refused_by_its_line(between: Callable[[Tensor, Block], Tensor], layer: str, fix: str) -> None:
    lines, first = inspect.getsourcelines(between)
    assert refused(between) == (
        f"{__file__}: 1 problem\n"
        f"  line {first + 1}  in {between.__name__}: {lines[1].strip()} = "
        f"computes with layers.*.{layer}.weight outside of its layer\n"
        "      want: weights that their own layers compute with: on a rank of several these take its part\n"
        f"      fix:  {fix}; or tensor_parallel_degree = 1"
    )


def test_it_is_refused_in_a_function_of_ones_own() -> None:
    said = refused(function)
    assert "in Product.forward: return x * w = computes with layers.*.ffn_norm.weight outside of its layer" in said
    assert said.startswith(f"{__file__}: 1 problem\n")


def called(h: Tensor, block: Block) -> Tensor:
    _, added = block.ffn_norm.add(h, h)
    return block.ffn_norm(block.ffn_norm.forward(added)) * block.ffn_norm.scale()


def what_it_is(h: Tensor, block: Block) -> Tensor:
    w = block.ffn_norm.weight
    assert w.shape == (SIZES.dim,) == w.size()
    assert w.requires_grad
    assert w.numel() == len(w)
    y = block.ffn_norm(h.to(w.dtype)).to(w).type_as(w)
    return y.to(torch.result_type(y, w)) + torch.zeros_like(h, dtype=w.dtype, device=w.device)


@pytest.mark.parametrize("between", [called, what_it_is, by_its_class])
def test_layers_may_be_called_and_asked_what_their_weights_are(between: Callable[[Tensor, Block], Tensor]) -> None:
    assert not refused(between)


def test_a_head_that_is_no_call_of_its_layer() -> None:
    said = refused(called, Tied)
    assert "return F.linear(self.norm(x), self.output.weight) = computes with output.weight outside of its" in said


class MineQwen3(Qwen3):
    """A model of one's own, of titanlite's attention."""


def test_a_scale_that_a_layer_hands_out_is_no_read() -> None:
    """`QKNormAttention` gives those of two norms to one kernel, and each is a rank's own."""
    with torch.device("meta"):
        model = MineQwen3(dataclasses.replace(recipes.load("model", "qwen3-debug"), n_layers=3), TOKENS)
    plan_layers(model, TOKENS, RANKS)
