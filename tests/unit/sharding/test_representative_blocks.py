"""Two blocks of a kind stand for all of them, unless a model's own code needs all."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from titanlite.config.recipe_schema import ModelDims
from titanlite.models.block_kinds import kind_of
from titanlite.models.layers import Sequences
from titanlite.models.llama3 import Block, Llama3
from titanlite.sharding import layers
from titanlite.sharding.graph import export
from titanlite.sharding.layers import plan_layers
from titanlite.sharding.representative_blocks import representative_blocks

TOKENS = 16
DIMS = ModelDims("", 4, dim=64, n_heads=8, n_kv_heads=4, ffn_dim=512, vocab_size=32, rope_theta=1e4, norm_eps=1e-5)

Through = Callable[["Mine", Tensor], Tensor]


class Mine(Llama3):
    """A model of one's own that takes tokens through its blocks as one of the functions below does."""

    through: Through

    def forward(self, tokens: Tensor) -> Tensor:
        """[M] → [M, V]."""
        return self.output(self.norm(self.through(self, self.tok_embeddings(tokens))))


def on_meta(through: Through) -> Mine:
    with torch.device("meta"):
        model = Mine(DIMS, TOKENS // 2)
    model.through = through
    return model


def one_by_one(model: Mine, x: Tensor) -> Tensor:
    for block in model.layers:
        x = block(x, model.cos, model.sin, Sequences(model.seq_len))
    return x


def by_keyword(model: Mine, x: Tensor) -> Tensor:
    x = x * model.dims.dim**0.5
    for block in model.layers:
        x = block(x, sequences=Sequences(model.seq_len), sin=model.sin, cos=model.cos)
    return x * torch.tensor(0.5, device=x.device)


def with_the_first_once_more(model: Mine, x: Tensor) -> Tensor:
    results = [x]
    for block in model.layers:
        results.append(block(results[-1], model.cos, model.sin, Sequences(model.seq_len)))
    return results[-1] + results[1]


def by_number(model: Mine, x: Tensor) -> Tensor:
    for n in range(DIMS.n_layers):
        x = model.layers[n](x, model.cos, model.sin, Sequences(model.seq_len))
    return x


@pytest.mark.parametrize(
    ("through", "blocks"),
    [(one_by_one, [2]), (by_keyword, [2]), (with_the_first_once_more, [2]), (by_number, [2, 4])],
)
def test_which_blocks_are_planned(through: Through, blocks: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    planned: list[int] = []

    def counted(model: nn.Module, inputs: list[Tensor]) -> object:
        planned.append(len(model.layers))  # type: ignore[arg-type]
        return export(model, inputs)

    monkeypatch.setattr(layers, "export", counted)
    model = on_meta(through)
    held, few = dict(model.named_parameters()), plan_layers(model, TOKENS, 2).layers
    assert all(held[name] is parameter for name, parameter in model.named_parameters())
    assert planned == blocks
    monkeypatch.setattr(layers, "representative_blocks", lambda model: (model, [[n] for n in range(len(model.layers))]))
    assert plan_layers(model, TOKENS, 2).layers == few


def test_a_block_that_holds_its_number_is_of_a_kind_of_its_own() -> None:
    model = on_meta(one_by_one)
    for n, block in enumerate(model.layers):
        block._number = n  # type: ignore[assignment]
    assert representative_blocks(model)[0] is model


def _own_class(block: nn.Module) -> None:
    block.__class__ = type("Block", (Block,), {"__module__": Block.__module__})


def _own_width(block: nn.Module) -> None:
    block.feed_forward.w2.weight = nn.Parameter(torch.empty(64, 256, device="meta"))  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "change",
    [
        _own_class,
        _own_width,
        lambda block: block.register_buffer("more", torch.empty(2)),
        lambda block: block.register_forward_hook(lambda *_: None),
        lambda block: setattr(block.attention_norm, "eps", 1e-6),
    ],
)
def test_what_makes_a_kind(change: Callable[[nn.Module], object]) -> None:
    first, second = on_meta(one_by_one).layers[:2]
    assert kind_of(first) == kind_of(second)
    change(second)
    assert kind_of(first) != kind_of(second)
