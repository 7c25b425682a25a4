"""Code of one's own in backward that reads numbers off a rank's part of a tensor is refused, by its line."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from titanlite import recipes
from titanlite.errors import ShardingError
from titanlite.models.llama3 import Llama3
from titanlite.parallel.sharding.layers import plan_layers

SIZES = recipes.load("model", "llama3-debug")
F = SIZES.ffn_dim  # 768
TOKENS, RANKS = 128, 2


class Mine(Llama3):
    """A model of one's own."""


class Doubled(torch.autograd.Function):
    """Twice a tensor; its gradient is what one of the functions below makes of it."""

    of_gradient: Callable[[Tensor, Tensor], Tensor]

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:  # type: ignore[override]
        return Doubled.of_gradient(g, *ctx.saved_tensors)


def divided(g: Tensor, x: Tensor) -> Tensor:
    return g * 2 * F / x.shape[-1]


def by_a_constant(g: Tensor, x: Tensor) -> Tensor:
    return g * torch.tensor(2 * F / x.shape[-1], device=x.device)


def branched(g: Tensor, x: Tensor) -> Tensor:
    return g * 2 if x.shape[-1] == F else g.neg()


def repeated(g: Tensor, x: Tensor) -> Tensor:
    for _ in range(x.shape[-1] // (F // 2)):
        g = g * 2
    return g


def by_value(g: Tensor, x: Tensor) -> Tensor:
    return g * 2 if x.sum().item() > 0 else g


def of_another_shape(g: Tensor, x: Tensor) -> Tensor:
    return g[:, :300]


def of_the_whole_width(g: Tensor, x: Tensor) -> Tensor:
    return g.view(-1, F) * 2


def of_any_part(g: Tensor, x: Tensor) -> Tensor:
    a, b = g.chunk(2, -1)
    h = torch.cat([a, b], -1).view(g.shape[0], g.shape[1] // 128, 128).flatten(1) + x.new_zeros(x.shape)
    return h * torch.tensor(2.0, device=g.device) + h.sum(0, keepdim=True).expand(h.shape)


def of_one_head(g: Tensor, x: Tensor) -> Tensor:
    heads = g.unflatten(-1, (-1, F // RANKS))
    scores = torch.einsum("mhe,nhe->hmn", heads, heads.transpose(0, 1).contiguous().transpose(0, 1))
    strided = torch.empty_strided(g.shape, g.stride(), device=g.device)
    return strided + torch.einsum("hmn,nhe->hme", scores, heads).transpose(0, 1).reshape(g.shape)


def refused(of_gradient: Callable[[Tensor, Tensor], Tensor], monkeypatch: Any) -> str:
    """What is said of a model with such a function, or nothing."""
    monkeypatch.setattr(Doubled, "of_gradient", staticmethod(of_gradient), raising=False)
    return refused_with(Doubled.apply, monkeypatch)


def refused_with(act: Callable[[Tensor], Tensor], monkeypatch: Any) -> str:
    """What is said of a model with a step of one's own behind its gate, or nothing."""
    monkeypatch.setattr("titanlite.models.llama3.swiglu", lambda x: act(_gated(x)))
    with torch.device("meta"):
        model = Mine(SIZES, TOKENS)
    try:
        plan_layers(model, TOKENS, RANKS)
    except ShardingError as error:
        return str(error)
    finally:
        assert all(p.grad is None for p in model.parameters())
    return ""


def _gated(x: Tensor) -> Tensor:
    return x.unflatten(-1, (-1, 2, 128)).sum(-2).flatten(-2)


@pytest.mark.parametrize(
    ("of_gradient", "words"),
    [
        (
            divided,
            ["return g * 2 * F / x.shape[-1] = aten.div.Tensor with other = 384 on one", "want: other = 768, as"],
        ),
        (by_a_constant, ["with self = 4.0 on one", "want: self = 2.0, as in one process"]),
        (branched, ["return g * 2 if x.shape[-1] == F else g.neg() = calls aten.neg.default on one"]),
        (repeated, ["g = g * 2 = calls nothing more on one of 2 ranks", "want: calls aten.mul.Tensor"]),
        (by_value, ["by_value: return g * 2 if x.sum().item() > 0", "want: code that runs, also on tensors without"]),
        (of_another_shape, ["returned an invalid gradient at index 0 - got [128, 300]"]),
        (
            of_the_whole_width,
            ["invalid gradient at index 0 - got [64, 768]", "want: code that runs on the part of each tensor"],
        ),
    ],
)
def test_what_differs_on_a_rank_is_refused_by_its_line(
    of_gradient: Callable[[Tensor, Tensor], Tensor], words: list[str], monkeypatch: Any
) -> None:
    message = refused(of_gradient, monkeypatch)
    assert message.startswith(f"{__file__}: 1 problem\n  ")
    assert all(word in message for word in words), message


@pytest.mark.parametrize("of_gradient", [of_any_part, of_one_head])
def test_what_a_part_has_as_well_is_not(of_gradient: Callable[[Tensor, Tensor], Tensor], monkeypatch: Any) -> None:
    assert refused(of_gradient, monkeypatch) == ""


class Base(torch.autograd.Function):
    """Twice a tensor, by the names that torch has taken later, and without what backward is not given."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:  # type: ignore[override]
        return x * 2

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.set_materialize_grads(False)

    @staticmethod
    def vjp(ctx: Any, g: Tensor) -> Tensor:  # type: ignore[override]
        return g * 2


class Inherits(Base):
    """As `Base`."""


class Calls(Base):
    """Its backward calls that of another class."""

    @staticmethod
    def vjp(ctx: Any, g: Tensor) -> Tensor:  # type: ignore[override]
        return Base.vjp(ctx, g)


def hooked(x: Tensor) -> Tensor:
    y = x * 2
    y.register_hook(lambda g: g * F / g.shape[-1])
    return y


def test_functions_may_inherit_and_have_a_vjp(monkeypatch: Any) -> None:
    before = [dict(vars(function)) for function in (Base, Inherits, Calls)]
    assert refused_with(lambda x: Inherits.apply(Base.apply(Calls.apply(x))), monkeypatch) == ""
    assert [dict(vars(function)) for function in (Base, Inherits, Calls)] == before


def test_a_hook_is_refused_by_its_line(monkeypatch: Any) -> None:
    message = refused_with(hooked, monkeypatch)
    assert "in hooked.<locals>.<lambda>: y.register_hook(lambda g: g * F / g.shape[-1]) = aten.div" in message
