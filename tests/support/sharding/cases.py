"""The cases of nvFuser's sharding propagation, as modules: what is annotated, and what must follow.

Each case has the sizes of nvFuser's own test for planning on the meta device, and small ones for four real ranks.
Expected placements are written as in a plan's table, "R", "S(1)"; collectives are counted by kind, forward only.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Case(NamedTuple):
    """One graph and what is known of its plan.

    Attributes:
        build: makes the model and the shapes of its inputs; True for small sizes.
        ranks: of the mesh; small sizes are for four at most.
        annotations: as a person writes them.
        placements: of tensors.
        forward: collectives by kind.
        backward: likewise, if all inputs and weights need a gradient.
    """

    build: Callable[[bool], tuple[nn.Module, list[tuple[int, ...]]]]
    ranks: int
    annotations: dict[str, str]
    placements: dict[str, str]
    forward: dict[str, int]
    backward: dict[str, int]


class Function(nn.Module):
    def __init__(self, function: Callable[..., Tensor], **weights: tuple[int, ...]) -> None:
        super().__init__()
        self.function = function
        for name, shape in weights.items():
            self.register_parameter(name, nn.Parameter(torch.empty(shape)))

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.function(*inputs, *self.parameters())


class Mlp(nn.Module):
    def __init__(self, dim: int, hidden: int, residual: bool = False) -> None:
        super().__init__()
        self.up, self.down, self.residual = nn.Linear(dim, hidden), nn.Linear(hidden, dim), residual

    def forward(self, x: Tensor) -> Tensor:
        y = self.down(F.gelu(self.up(x)))
        return x + y if self.residual else y


class Attention(nn.Module):
    """Heads are formed before q, k and v are taken apart, so that no shard is cut."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        B, S, D = x.shape
        qkv = self.qkv(x).view(B, S, self.heads, 3 * D // self.heads).transpose(1, 2)
        q, k, v = qkv.split(D // self.heads, dim=-1)
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(B, S, D))


class SeparateAttention(nn.Module):
    """Queries, keys and values of a weight each, grouped heads, and the residual stream."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.width = dim // heads
        self.wq, self.wo = (nn.Linear(dim, dim, bias=False) for _ in range(2))
        self.wk, self.wv = (nn.Linear(dim, dim // 2, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (w(x).unflatten(-1, (-1, self.width)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return x + self.wo(out.transpose(1, 2).flatten(2))


class TransformerBlock(nn.Module):
    """The block of GPT-2, as in nvFuser's test_transformer_forward."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.norm_1, self.attention = nn.LayerNorm(dim), Attention(dim, heads)
        self.norm_2, self.mlp = nn.LayerNorm(dim), Mlp(dim, 4 * dim)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_1(x))
        return x + self.mlp(self.norm_2(x))


class Tied(nn.Module):
    """An embedding whose table is also the output's weight."""

    def __init__(self, vocabulary: int, dim: int) -> None:
        super().__init__()
        self.embedding, self.up = nn.Embedding(vocabulary, dim), nn.Linear(dim, dim, bias=False)
        self.output = nn.Linear(dim, vocabulary, bias=False)
        self.output.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        return self.output(x + self.up(x))


def function(body: Callable[..., Tensor], *shapes: tuple[int, ...]) -> Callable[[bool], tuple[nn.Module, list]]:
    return lambda small: (Function(body), list(shapes))


def mlp(small: bool) -> tuple[nn.Module, list[tuple[int, ...]]]:
    return (Mlp(12, 48), [(2, 8, 12)]) if small else (Mlp(768, 3072), [(2, 128, 768)])


def residual_mlp(small: bool) -> tuple[nn.Module, list[tuple[int, ...]]]:
    return (Mlp(12, 48, True), [(2, 8, 12)]) if small else (Mlp(768, 3072, True), [(2, 128, 768)])


def attention(small: bool) -> tuple[nn.Module, list[tuple[int, ...]]]:
    return (Attention(16, 4), [(2, 8, 16)]) if small else (Attention(768, 16), [(2, 128, 768)])


def row_parallel(_: bool) -> tuple[nn.Module, list[tuple[int, ...]]]:
    return Function(lambda x, r, w: r + F.linear(x.relu(), w), weight=(6, 8)), [(4, 8), (4, 6)]


def two_weights(_: bool) -> tuple[nn.Module, list[tuple[int, ...]]]:
    return Function(lambda x, p, q: x * (p @ q), p=(12, 12), q=(12, 12)), [(12, 12)]


def separate(small: bool) -> tuple[nn.Module, list[tuple[int, ...]]]:
    return (SeparateAttention(32, 8), [(2, 8, 32)]) if small else (SeparateAttention(768, 16), [(2, 128, 768)])


def block(small: bool) -> tuple[nn.Module, list[tuple[int, ...]]]:
    return (TransformerBlock(16, 4), [(1, 8, 16)]) if small else (TransformerBlock(12288, 96), [(1, 2048, 12288)])


def tied(small: bool) -> tuple[nn.Module, list[tuple[int, ...]]]:
    return (Tied(32, 8), [(16,)]) if small else (Tied(4096, 64), [(1024,)])


MLP = {"up.weight": "tp:0", "up.bias": "tp:0", "down.weight": "tp:1"}
BLOCK = {
    "attention.qkv.weight": "tp:0",
    "attention.qkv.bias": "tp:0",
    "attention.out.weight": "tp:1",
    "mlp.up.weight": "tp:0",
    "mlp.up.bias": "tp:0",
    "mlp.down.weight": "tp:1",
}
HEADS = {
    "view": "S(2)",
    "getitem": "S(1)",
    "getitem_1": "S(1)",
    "getitem_2": "S(1)",
    "scaled_dot_product_attention": "S(1)",
}
CASES = {
    "loop-split MLP": Case(
        mlp, 4, MLP,
        {"linear": "S(2)", "linear_and_bias": "S(2)", "gelu": "S(2)", "linear_1": "R", "linear_1_and_bias": "R"},
        {"all_reduce": 1}, {"all_reduce": 1},
    ),
    "MLP, bias and second weight inferred": Case(
        mlp, 4, {"up.weight": "tp:0"},
        {"up.bias": "S(0)", "down.weight": "S(1)", "down.bias": "R", "gelu": "S(2)", "linear_1_and_bias": "R"},
        {"all_reduce": 1}, {"all_reduce": 1},
    ),
    "MLP, sequence-parallel": Case(
        residual_mlp, 4, MLP | {"x": "tp:1"},
        {"linear": "S(2)", "gelu": "S(2)", "linear_1": "S(1)", "linear_1_and_bias": "S(1)", "add": "S(1)"},
        {"all_gather": 1, "reduce_scatter": 1},
        {"reduce_scatter": 1, "all_gather": 1, "all_reduce": 1},  # the last one: of down.bias, which sees some tokens
    ),
    "loop-split attention": Case(
        attention, 4, {"qkv.weight": "tp:0", "qkv.bias": "tp:0", "out.weight": "tp:1"},
        HEADS | {"linear_1": "R"},
        {"all_reduce": 1}, {"all_reduce": 1},
    ),
    # Were tokens as strong as weights, they would be first at the keys and values.
    "weights before activations": Case(
        separate, 4, {"wq.weight": "tp:0", "x": "tp:1"},
        {"wk.weight": "S(0)", "wv.weight": "S(0)", "wo.weight": "S(1)", "linear_1": "S(2)", "linear_3": "S(1)",
         "scaled_dot_product_attention": "S(1)", "add": "S(1)"},
        {"all_gather": 1, "reduce_scatter": 1}, {"all_gather": 1, "reduce_scatter": 1},
    ),
    "the right operand before the left": Case(
        function(torch.matmul, (4, 8), (8, 4)), 2, {"inputs_0": "tp:0", "inputs_1": "tp:1"},
        {"matmul": "S(1)"}, {"all_gather": 1}, {"reduce_scatter": 1},
    ),
    "a weight stays while its output is placed": Case(
        row_parallel, 2, {"weight": "tp:1", "inputs_1": "tp:0"},
        {"linear": "S(0)", "relu": "R"}, {"reduce_scatter": 1}, {"all_gather": 2},
    ),
    "pieces along the dim that they are cut from": Case(
        function(lambda x, y: y + x.split([2, 6])[1], (8, 4), (6, 4)), 2, {"inputs_1": "tp:0"},
        {"split_with_sizes": "R", "getitem_1": "S(0)", "add": "S(0)"}, {}, {"all_gather": 1},
    ),
    "residual add of random numbers": Case(
        function(lambda x: x + torch.rand(4, 6, device=x.device, dtype=x.dtype), (4, 6)), 2, {"inputs_0": "tp:0"},
        {"rand": "S(0)", "add": "S(0)"}, {}, {},
    ),
    "an axis once": Case(
        function(lambda a, b: a + b, (4, 4), (4, 4)), 2, {"inputs_0": "tp:0", "inputs_1": "tp:1"},
        {"inputs_1": "S(1)", "add": "S(0)"}, {"all_to_all": 1}, {"all_to_all": 1},
    ),
    "a reduced axis does not count": Case(
        function(lambda a, w, c: c + F.linear(a, w), (6, 8), (4, 8), (6, 4)), 2,
        {"inputs_0": "tp:1", "inputs_1": "tp:1", "inputs_2": "tp:1"},
        {"linear": "S(1)", "add": "S(1)"}, {"reduce_scatter": 1}, {"all_gather": 1},
    ),
    "reshape, split": Case(
        function(lambda x: x.view(2, 3, 16, 4), (2, 3, 64)), 4, {"inputs_0": "tp:2"}, {"view": "S(2)"}, {}, {},
    ),
    "reshape, merge": Case(
        function(lambda x: x.reshape(2, 3, 64), (2, 3, 16, 4)), 4, {"inputs_0": "tp:2"},
        {"reshape": "S(2)"}, {}, {},
    ),
    "reshape, merge of the first": Case(
        function(lambda x: x.flatten(0, 1) * 2, (4, 3, 32)), 4, {"inputs_0": "tp:0"},
        {"flatten": "S(0)", "mul": "S(0)"}, {}, {},
    ),
    "reshape, several of each": Case(
        function(lambda x: x.reshape(12, 2, 16), (4, 3, 32)), 4, {"inputs_0": "tp:0"}, {"reshape": "S(0)"}, {}, {},
    ),
    "reshape, backward": Case(
        function(lambda x, y: x + (y * 1).reshape(4, 6), (4, 6), (2, 2, 6)), 2, {"inputs_0": "tp:0"},
        {"reshape": "S(0)", "mul": "S(0)", "inputs_1": "R"}, {}, {"all_gather": 1},
    ),
    "mean over a sharded dim": Case(
        function(lambda x: x.mean(1), (6, 8)), 2, {"inputs_0": "tp:1"}, {"mean": "R"}, {"all_reduce": 1}, {},
    ),
    "cat and slice beside the shard": Case(
        function(lambda x: torch.cat((-x[..., 4:], x[..., :4]), -1), (4, 8)), 2, {"inputs_0": "tp:0"},
        {"cat": "S(0)", "slice_1": "S(0)"}, {}, {},
    ),
    "transformer, tensor-parallel": Case(
        block, 8, BLOCK,
        {"norm_1.weight": "R", "linear": "S(2)", "scaled_dot_product_attention": "S(1)",
         "linear_1": "R", "gelu": "S(2)", "add_1": "R"},
        {"all_reduce": 2}, {"all_reduce": 2},
    ),
    "transformer, sequence-parallel": Case(
        block, 8, BLOCK | {"x": "tp:1"},
        {"layer_norm": "S(1)", "linear": "S(2)", "scaled_dot_product_attention": "S(1)", "linear_1": "S(1)",
         "add": "S(1)", "layer_norm_1": "S(1)", "gelu": "S(2)", "add_1": "S(1)"},
        {"all_gather": 2, "reduce_scatter": 2},
        {"all_gather": 2, "reduce_scatter": 2, "all_reduce": 6},  # norms' weights and biases, two biases
    ),
    "tied weights": Case(
        tied, 4, {"embedding.weight": "tp:0", "@embedding": "tp:0", "up.weight": "replicate"},
        {"embedding.weight": "S(0)", "embedding": "S(0)", "linear": "S(0)", "linear_1": "S(1)"},
        {"reduce_scatter": 1, "all_gather": 1}, {"reduce_scatter": 1, "all_gather": 1, "all_reduce": 1},
    ),
}  # fmt: skip
