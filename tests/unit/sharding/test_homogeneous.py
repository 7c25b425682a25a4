"""Two blocks of a kind stand for all in a model of a user's own that does nothing but repeat them, and in no other."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from titanlite.config.recipe_schema import ModelDims
from titanlite.errors import ShardingError
from titanlite.models.llama3 import Block, Llama3
from titanlite.sharding import layers
from titanlite.sharding.graph import export
from titanlite.sharding.homogeneous import only_repeats
from titanlite.sharding.layers import plan_layers
from titanlite.sharding.representative_blocks import stand_ins

TOKENS = 16
SIZES = ModelDims("", 4, dim=64, n_heads=8, n_kv_heads=4, ffn_dim=512, vocab_size=32, rope_theta=1e4, norm_eps=1e-5)

Through = Callable[["Mine", Tensor], Tensor]


class Mine(Llama3):
    """A model of one's own that takes tokens through its blocks as one of the functions below does."""

    through: Through

    def forward(self, tokens: Tensor) -> Tensor:
        """[M] → [M, V]."""
        return self.output(self.norm(self.through(self, self.tok_embeddings(tokens))))


def on_meta(through: Through) -> Mine:
    with torch.device("meta"):
        model = Mine(SIZES, TOKENS // 2)
    model.through = through
    return model


def one_by_one(model: Mine, x: Tensor) -> Tensor:
    for block in model.layers:
        x = block(x, model.cos, model.sin)
    return x


def by_keyword(model: Mine, x: Tensor) -> Tensor:
    x = x * model.dims.dim**0.5
    for block in model.layers:
        x = block(x, sin=model.sin, cos=model.cos)
    return x * torch.tensor(0.5, device=x.device)


def never(graph: object, _: object) -> Callable[..., object]:
    raise AssertionError(graph)


doubled = torch.compile(lambda x: x * 2, backend=never)


def with_something_compiled(model: Mine, x: Tensor) -> Tensor:
    return one_by_one(model, doubled(x))


@pytest.mark.parametrize("through", [one_by_one, by_keyword, with_something_compiled])
def test_two_blocks_stand_for_all(through: Through, monkeypatch: pytest.MonkeyPatch) -> None:
    planned: list[int] = []

    def counted(model: nn.Module, inputs: list[Tensor]) -> object:
        planned.append(len(model.layers))  # type: ignore[arg-type]
        return export(model, inputs)

    monkeypatch.setattr(layers, "export", counted)
    model = on_meta(through)
    held, few = dict(model.named_parameters()), plan_layers(model, TOKENS, 2).layers
    assert all(held[name] is parameter for name, parameter in model.named_parameters())
    assert not any("forward" in vars(module) for module in model.modules())
    monkeypatch.setattr(layers, "stand_ins", lambda model: (model, [[n] for n in range(len(model.layers))]))
    assert plan_layers(model, TOKENS, 2).layers == few
    assert planned == [2, 4]


def with_something_between(model: Mine, x: Tensor) -> Tensor:
    for n, block in enumerate(model.layers):
        x = block(x - x.mean(0) if n == 2 else x, model.cos, model.sin)
    return x


def with_another_table(model: Mine, x: Tensor) -> Tensor:
    for n, block in enumerate(model.layers):
        x = block(x, *((model.cos, model.sin) if n < 3 else (model.sin, model.cos)))
    return x


def by_their_count(model: Mine, x: Tensor) -> Tensor:
    return one_by_one(model, x) / len(model.layers)


def with_one_left_out(model: Mine, x: Tensor) -> Tensor:
    for n, block in enumerate(model.layers):
        x = block(x, model.cos, model.sin) if n != 2 else x
    return x


def with_one_twice(model: Mine, x: Tensor) -> Tensor:
    return model.layers[0](one_by_one(model, x), model.cos, model.sin)


def backwards(model: Mine, x: Tensor) -> Tensor:
    for block in reversed(model.layers):  # type: ignore[arg-type]
        x = block(x, model.cos, model.sin)
    return x


def with_one_that_learns_nothing(model: Mine, x: Tensor) -> Tensor:
    for n, block in enumerate(model.layers):
        with torch.set_grad_enabled(n != 2):
            x = block(x, model.cos, model.sin)
    return x


def with_the_first_once_more(model: Mine, x: Tensor) -> Tensor:
    results = [x]
    for block in model.layers:
        results.append(block(results[-1], model.cos, model.sin))
    return results[-1] + results[1]


def with_one_of_the_third(model: Mine, x: Tensor) -> Tensor:
    results = [x]
    for block in model.layers:
        results.append(block(results[-1], model.cos, model.sin))
    return results[-1] + results[3 if len(results) > 3 else 1]


def by_number(model: Mine, x: Tensor) -> Tensor:
    for n in range(SIZES.n_layers):
        x = model.layers[n](x, model.cos, model.sin)
    return x


def by_what_they_hold(model: Mine, x: Tensor) -> Tensor:
    return one_by_one(model, x) if x.sum() > 0 else x


@pytest.mark.parametrize(
    "through",
    [
        with_something_between,
        with_another_table,
        by_their_count,
        with_one_left_out,
        with_one_twice,
        backwards,
        with_one_that_learns_nothing,
        with_the_first_once_more,
        with_one_of_the_third,
        by_number,
        by_what_they_hold,
    ],
)
def test_another_model_is_no_repetition(through: Through) -> None:
    model = on_meta(through)
    fewer, _ = stand_ins(model)
    assert len(fewer.layers) == 2  # type: ignore[arg-type]
    assert not only_repeats(model, fewer, TOKENS)


COUNT = [0]


class Counts(Block):
    """Squares its tokens at every third call."""

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[M, D] → [M, D]."""
        COUNT[0] += 1
        return super().forward(x.square() if COUNT[0] % 3 == 0 else x, cos, sin)


class Gives(Block):
    """Makes its result before it is done."""

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[M, D] → [M, D]."""
        y = super().forward(x, cos, sin)
        y.sum()
        return y


def shared(model: Mine) -> None:
    model.layers[2].attention.wo.weight = model.layers[0].attention.wo.weight  # type: ignore[union-attr]


def of_class(kind: type[Block]) -> Callable[[Mine], None]:
    def change(model: Mine) -> None:
        for block in model.layers:
            block.__class__ = kind

    return change


@pytest.mark.parametrize("change", [of_class(Counts), of_class(Gives), shared], ids=["counts", "gives", "shared"])
def test_other_blocks_are_no_repetition(change: Callable[[Mine], None]) -> None:
    model = on_meta(one_by_one)
    change(model)
    COUNT[0] = 0
    fewer, _ = stand_ins(model)
    assert not only_repeats(model, fewer, TOKENS)


def test_a_block_that_holds_its_number_is_of_a_kind_of_its_own() -> None:
    model = on_meta(one_by_one)
    for n, block in enumerate(model.layers):
        block._number = n  # type: ignore[assignment]
    assert stand_ins(model)[0] is model


def with_something_between_on_a_rank(model: Mine, x: Tensor) -> Tensor:
    for n, block in enumerate(model.layers):
        x = block(x if n < 2 or len(x) == TOKENS else x * 2, model.cos, model.sin)
    return x


def test_what_differs_on_a_rank_is_seen_of_all_blocks() -> None:
    with pytest.raises(ShardingError, match=r"= calls aten\.mul\.Tensor on one of 2 ranks"):
        plan_layers(on_meta(with_something_between_on_a_rank), TOKENS, 2)
