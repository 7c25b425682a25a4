"""Code of one's own in backward that reads numbers off a rank's part of a tensor is refused, by its line."""

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from titanlite import recipes
from titanlite.errors import ShardingError
from titanlite.kernels.rms_norm import rms_norm
from titanlite.models.layers import RMSNorm
from titanlite.models.llama3 import Llama3
from titanlite.sharding.layers import plan_layers

SIZES = replace(recipes.load("model", "llama3-debug"), n_layers=1)
D = SIZES.dim  # 256
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
    a, b = g.chunk(2, 0)
    h = torch.cat([a, b], 0).view(g.shape[0], g.shape[1] // 128, 128).flatten(1) + x.new_zeros(x.shape)
    return h * torch.tensor(2.0, device=g.device) + h.sum(0, keepdim=True).expand(h.shape)


def of_one_head(g: Tensor, x: Tensor) -> Tensor:
    heads = g.unflatten(-1, (-1, F // RANKS))
    scores = torch.einsum("mhe,nhe->hmn", heads, heads.transpose(0, 1).contiguous().transpose(0, 1))
    strided = torch.empty_strided(g.shape, g.stride(), device=g.device)
    return strided + torch.einsum("hmn,nhe->hme", scores, heads).transpose(0, 1).reshape(g.shape)


def normed(g: Tensor, x: Tensor) -> Tensor:
    return g / g.norm(dim=-1, keepdim=True)


def centred(g: Tensor, x: Tensor) -> Tensor:
    return g - (g * x).sum(-1, keepdim=True)


def averaged(g: Tensor, x: Tensor) -> Tensor:
    return g.mean(-1, keepdim=True).expand(g.shape)


def summed(g: Tensor, x: Tensor) -> Tensor:
    return g.sum(-1, keepdim=True).expand(g.shape)


def softmaxed(g: Tensor, x: Tensor) -> Tensor:
    return g * x.softmax(-1)


def accumulated(g: Tensor, x: Tensor) -> Tensor:
    return g.cumsum(-1)


def swapped(g: Tensor, x: Tensor) -> Tensor:
    return torch.cat(g.chunk(2, -1)[::-1], -1)


def of_products(g: Tensor, x: Tensor) -> Tensor:
    return (g @ x.T) @ g


def of_rows_in_a_view(g: Tensor, x: Tensor) -> Tensor:
    rows = g.view(-1, F)
    return (rows / rows.norm(dim=-1, keepdim=True)).view(g.shape)


def of_rows_of_another_length(g: Tensor, x: Tensor) -> Tensor:
    return g.view(-1, 2 * F).softmax(-1).view(g.shape)


def turned(g: Tensor, x: Tensor) -> Tensor:
    return g.reshape(-1).view(g.shape[1], -1).T.reshape(g.shape)


def with_other_tokens(g: Tensor, x: Tensor) -> Tensor:
    halves = g.view(-1, 2, g.shape[1]).transpose(0, 1).reshape(g.shape)
    return g * 2 + halves


def with_other_heads(g: Tensor, x: Tensor) -> Tensor:
    halves = g.view(g.shape[0], 2, -1).transpose(0, 1).reshape(g.shape)
    return g * 2 + halves


def scaled_in_place(g: Tensor, x: Tensor) -> Tensor:
    h = g.clone()
    return h.div_(h.norm())


def elementwise(g: Tensor, x: Tensor) -> Tensor:
    h = torch.where(x > 0, g, torch.zeros_like(g)) * torch.sigmoid(x).float().to(g.dtype)
    return h.mul_(2).add_(torch.empty_like(g).copy_(g).masked_fill_(x < 0, 0.0)) - g.clamp(-1, 1) / (1 + x.exp())


def over_tokens_and_heads(g: Tensor, x: Tensor) -> Tensor:
    heads = g.unflatten(-1, (-1, 128))
    heads = heads / heads.norm(dim=-1, keepdim=True) * heads.softmax(-1) - heads.mean(-1, keepdim=True)
    a, b = heads.chunk(2, -1)
    h = torch.cat([-b, a], -1).transpose(0, 1).contiguous().sqrt().transpose(0, 1).reshape(g.shape)
    return h / g.norm(dim=0) + h.cumsum(0) - h.amax(0)


def of_what_is_whole(g: Tensor, x: Tensor) -> Tensor:
    turned = g.unflatten(-1, (-1, 128)) @ torch.ones(128, 128, device=g.device)  # for each head the same
    h = torch.zeros_like(g)
    h[1:] = turned.flatten(-2)[:-1]
    h[:1] = 0
    return h


def differentiated(g: Tensor, x: Tensor) -> Tensor:
    with torch.enable_grad():
        own = x.detach().requires_grad_()
        return torch.autograd.grad(torch.nn.functional.silu(own) * own, own, g)[0]


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
        (
            normed,
            [
                "norm.default of [128, 384], which are S(1), gives [128, 1] on one of 2 ranks",
                "want: a part of what it gives in one process",
            ],
        ),
        (centred, ["keepdim=True) = aten.sub.Tensor of [128, 384] and [128, 1], which are S(1), P, gives"]),
        (averaged, ["aten.mean.dim of [128, 384], which are S(1), gives [128, 1]"]),
        (summed, ["aten.expand.default of [128, 1], which are P, gives [128, 384] on one"]),
        (softmaxed, ["aten._softmax.default of [128, 384]"]),
        (accumulated, ["aten.cumsum.default of [128, 384]"]),
        (swapped, ["aten.split.Tensor of [128, 384], which are S(1), gives [128, 192] and [128, 192]"]),
        (of_products, ["aten.mm.default of [128, 128] and [128, 384], which are P, S(1), gives"]),
        (of_rows_in_a_view, ["vector_norm.default of [64, 768], which are no part, gives [64, 1] on one"]),
        (of_rows_of_another_length, ["aten._softmax.default of [32, 1536], which are no part, gives"]),
        (
            turned,
            ["in Doubled.backward = a gradient [128, 384] on one of 2 ranks", "a part of [128, 768], the gradient in"],
        ),
        (with_other_heads, ["= aten.transpose.int of [128, 2, 192], which are no part, gives"]),
        (scaled_in_place, ["return h.div_(h.norm()) = aten.linalg_vector_norm.default"]),
    ],
)
def test_what_differs_on_a_rank_is_refused_by_its_line(
    of_gradient: Callable[[Tensor, Tensor], Tensor], words: list[str], monkeypatch: Any
) -> None:
    message = refused(of_gradient, monkeypatch)
    assert message.startswith(f"{__file__}: 1 problem\n  ")
    assert all(word in message for word in words), message


def test_what_a_part_has_as_well_is_not(monkeypatch: Any) -> None:
    rest = [of_any_part, of_one_head, elementwise, of_what_is_whole, over_tokens_and_heads, differentiated]

    def each_in_turn(g: Tensor, x: Tensor) -> Tensor:
        return sum((of_gradient(g, x) for of_gradient in rest), torch.zeros_like(g))

    assert refused(each_in_turn, monkeypatch) == ""
    assert "centred" in refused(lambda g, x: each_in_turn(g, x) + centred(g, x), monkeypatch)  # and were looked at


@pytest.mark.parametrize(
    ("of_gradient", "words"),
    [
        (normed, ""),
        (turned, "= a gradient [64, 256] on one of 2 ranks"),
        (with_other_tokens, "aten.add.Tensor of [64, 256] and [64, 256], which are S(0), no part, gives"),
        (with_other_heads, "aten.add.Tensor of [64, 256] and [64, 256], which are S(0), no part, gives"),
    ],
)
def test_where_tokens_are_split(of_gradient: Callable[[Tensor, Tensor], Tensor], words: str, monkeypatch: Any) -> None:
    def forward(self: RMSNorm, x: Tensor) -> Tensor:
        return Doubled.apply(rms_norm(x, self.weight, self.eps))

    monkeypatch.setattr(RMSNorm, "forward", forward)
    monkeypatch.setattr(Doubled, "of_gradient", staticmethod(of_gradient), raising=False)
    message = refused_with(lambda x: x, monkeypatch)
    assert words in message if words else message == "", message


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


class Normed(torch.autograd.Function):
    """RMSNorm; the gradient of its weight is what one of the functions below makes of a rank's sum over its tokens."""

    of_weight: Callable[[Tensor], Tensor]

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        normed = x * x.pow(2).mean(-1, keepdim=True).rsqrt()
        ctx.save_for_backward(x, weight, normed)
        return normed * weight

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x, weight, normed = ctx.saved_tensors
        inner = g * weight
        of_x = inner - normed * (inner * normed).mean(-1, keepdim=True)
        return of_x * x.pow(2).mean(-1, keepdim=True).rsqrt(), Normed.of_weight((g * normed).sum(0))


class Rounded(torch.autograd.Function):
    """A rounded weight, of which every rank gets the gradient of its own tokens."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        return weight.round()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:  # type: ignore[override]
        return Normed.of_weight(g)


def as_it_is(g: Tensor) -> Tensor:
    return g


def rescaled(g: Tensor) -> Tensor:
    return (0.5 * g.float() + g / 3).mul_(2).to(g.dtype)


def of_norm_one(g: Tensor) -> Tensor:
    return g / g.norm()


def clipped(g: Tensor) -> Tensor:
    return g.view(-1, 2).clamp(-1, 1).view(-1)


def plus_one(g: Tensor) -> Tensor:
    return g + 1


def zero(g: Tensor) -> Tensor:
    return torch.zeros(D, device=g.device)


def filled(g: Tensor) -> Tensor:
    return zero(g).add_(0.1)


def one(g: Tensor) -> Tensor:
    return torch.ones(D, device=g.device)


@pytest.mark.parametrize(
    ("of_weight", "words"),
    [
        (lambda g: as_it_is(g) + rescaled(g), ""),
        (zero, ""),
        (of_norm_one, "aten.linalg_vector_norm.default of [256], which are P, gives [] on one of 2 ranks"),
        (clipped, "aten.clamp.default of [128, 2], which are P, gives [128, 2] on"),
        (plus_one, "aten.add.Tensor of [256], which are P, gives [256] on one of 2 ranks"),
        (
            filled,
            "zero(g).add_(0.1) = a gradient [256] that each of 2 ranks gives whole, and that is added up over them",
        ),
        (one, "in one: return torch.ones(D, device=g.device) = a gradient [256] that each of 2 ranks gives whole"),
    ],
)
@pytest.mark.parametrize("is_rounded", [False, True])
def test_a_sum_over_tokens_may_be_scaled_until_it_is_added_up(
    of_weight: Callable[[Tensor], Tensor], words: str, is_rounded: bool, monkeypatch: Any
) -> None:
    def forward(self: RMSNorm, x: Tensor) -> Tensor:
        return rms_norm(x, Rounded.apply(self.weight), self.eps) if is_rounded else Normed.apply(x, self.weight)

    monkeypatch.setattr(Normed, "of_weight", staticmethod(of_weight), raising=False)
    monkeypatch.setattr(RMSNorm, "forward", forward)
    message = refused_with(lambda x: x, monkeypatch)
    assert words in message if words else message == "", message


class Decayed(torch.autograd.Function):
    """A tensor, and with its gradient one of a weight that is of the weight alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        return x * 1

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return g, ctx.saved_tensors[0]


def test_a_weight_as_its_own_gradient_is_refused_by_the_line_of_its_function(monkeypatch: Any) -> None:
    def forward(self: RMSNorm, x: Tensor) -> Tensor:
        return Decayed.apply(rms_norm(x, self.weight, self.eps), self.weight)

    monkeypatch.setattr(RMSNorm, "forward", forward)
    line = inspect.getsourcelines(Decayed.backward)[1]
    message = refused_with(lambda x: x, monkeypatch)
    assert f"line {line}  in Decayed.backward = a gradient [256] that each of 2 ranks gives whole" in message
    assert "fix:  leave to the optimizer what is of weights alone, as weight decay; or tensor_parallel" in message


def test_a_hook_that_gives_a_weight_as_a_gradient_is_refused(monkeypatch: Any) -> None:
    def forward(self: RMSNorm, x: Tensor) -> Tensor:
        weight = self.weight * 1
        weight.register_hook(lambda g: self.weight.detach())
        return rms_norm(x, weight, self.eps)

    monkeypatch.setattr(RMSNorm, "forward", forward)
    assert "= a gradient [256] that each of 2 ranks gives whole" in refused_with(lambda x: x, monkeypatch)
