"""A model whose code reads numbers off a rank's part of a tensor is refused, by its line."""

import dataclasses
import inspect
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor
from torch.nn.functional import dropout

from titanlite import recipes
from titanlite.errors import ShardingError
from titanlite.models.llama3 import Block, FeedForward, Llama3
from titanlite.sharding.layers import plan_layers

Inside = Callable[[Tensor, FeedForward], Tensor]

TOKENS, RANKS = 128, 2
SIZES = recipes.load("model", "llama3-debug")
F = SIZES.ffn_dim  # 768


class Mine(Llama3):
    """A model of one's own."""


class Mlp(FeedForward):
    """A feed-forward whose inside is one of the functions below."""

    inside: Inside
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        """[M, D] → [M, D]."""
        Mlp.calls += 1
        h = self.w13(x).unflatten(-1, (-1, 2, 128)).sum(-2).flatten(-2)  # [M, F]
        return self.w2(self.inside(h, self))


def refused(insides: Sequence[Inside]) -> str:
    """What is said of a model with such blocks, or nothing."""
    with torch.device("meta"):
        model = Mine(dataclasses.replace(SIZES, n_layers=len(insides)), TOKENS)
        for block, inside in zip(model.layers, insides, strict=True):
            block.feed_forward = Mlp(SIZES, 0.02)
            block.feed_forward.inside = inside
    held = dict(model.named_parameters())
    try:
        plan_layers(model, TOKENS, RANKS)
    except ShardingError as error:
        return str(error)
    finally:  # the model is as it was
        assert all(held[name] is parameter for name, parameter in model.named_parameters())
        assert not any("forward" in vars(module) for module in model.modules())
    return ""


def of_the_model(h: Tensor, mlp: FeedForward) -> Tensor:
    zeros = torch.zeros_like(h) + h.new_zeros(h.shape)
    h = (h + zeros).view(h.shape[0], h.shape[1] // 128, 128).flatten(-2)
    one = torch.tensor(1.0 / F, device=h.device) + torch.full((), 1 / F, device=h.device)
    return h * one + h.sum(1, keepdim=True).expand(h.shape) if mlp.training and F < 0 else h * one


def divided(h: Tensor, _: FeedForward) -> Tensor:
    return h / h.shape[-1]


def grouped(h: Tensor, _: FeedForward) -> Tensor:
    tall = h.unflatten(-1, (-1, 128)).transpose(0, 1)  # [F/128, M, 128]
    return tall.reshape(-1, h.shape[-1] // 12).softmax(-1).reshape(tall.shape).transpose(0, 1).flatten(1)


def by_a_count(h: Tensor, _: FeedForward) -> Tensor:
    return h * torch.arange(h.shape[-1], device=h.device).sum()


def by_a_constant(h: Tensor, _: FeedForward) -> Tensor:
    return h * torch.tensor(h.shape[-1], device=h.device)


def by_a_new_one(h: Tensor, _: FeedForward) -> Tensor:
    return h * h.new_tensor(h.numel())


def branched(h: Tensor, _: FeedForward) -> Tensor:
    return h.relu() if h.shape[-1] == F else h.sigmoid()


def chosen(h: Tensor, _: FeedForward) -> Tensor:
    a, b = h.relu(), h.sigmoid()
    return (a if h.shape[-1] == F else b).square()


def handed_on(h: Tensor, _: FeedForward) -> Tensor:
    a, b = h.relu(), h.sigmoid()
    return a if h.shape[-1] == F else b


def by_what_it_keeps(h: Tensor, mlp: FeedForward) -> Tensor:
    if not hasattr(mlp, "width"):
        mlp.width = h.shape[-1]
    return h / mlp.width  # type: ignore[operator]


def repeated(h: Tensor, _: FeedForward) -> Tensor:
    for _n in range(h.shape[-1] // (F // 2)):
        h = h.relu()
    return h


def of_all_features(h: Tensor, _: FeedForward) -> Tensor:
    return h.view(-1, F // 128, 128).flatten(-2)


@pytest.mark.parametrize(
    ("inside", "words"),
    [
        (divided, ["aten.div.Tensor with other = 384 on one of 2 ranks", "want: other = 768, as in one process"]),
        (by_what_it_keeps, ["aten.div.Tensor with other = 384 on one of 2 ranks", "want: other = 768"]),
        (grouped, ["aten.reshape.default gives [1536, 32] on one of 2 ranks", "want: [768, 64], the planned part"]),
        (by_a_count, ["aten.arange.default with end = 384", "want: end = 768"]),
        (by_a_constant, ["constant 0 = 384", "want: constant 0 = 768"]),
        (by_a_new_one, ["constant 0 = 49152", "want: constant 0 = 98304"]),
        (branched, ["calls aten.sigmoid.default on one of 2 ranks", "want: calls aten.relu.default"]),
        (chosen, ["calls aten.square.default with other tensors"]),
        (repeated, ["calls aten.add.Tensor on one of 2 ranks", "want: calls aten.relu.default"]),
        (of_all_features, ["got [64, 768] X [384, 256]", "want: code that runs on the part of each tensor"]),
    ],
)
def test_what_differs_on_a_rank_is_refused_by_its_line(inside: Inside, words: list[str]) -> None:
    message = refused([inside])
    assert message.startswith(f"{__file__}: 1 problem\n  line ")
    assert "fix:  take dims from the model's dimensions, as self.width = dims.ffn_dim in __init__" in message
    assert all(word in message for word in words), message


def dropped(h: Tensor, _: FeedForward) -> Tensor:
    return dropout(h, 0.1)


def noisy(h: Tensor, _: FeedForward) -> Tensor:
    return h + torch.randn_like(h)


@pytest.mark.parametrize("inside", [dropped, noisy])
def test_random_numbers_for_a_part_are_refused(inside: Inside) -> None:
    message = refused([inside])
    assert message.startswith(f"{__file__}: 1 problem\n  line ")
    assert " draws the same numbers for all parts on one of 2 ranks\n" in message
    assert "fix:  no dropout or other random numbers for what is split; or tensor_parallel_degree = 1" in message


def of_no_chance(h: Tensor, mlp: FeedForward) -> Tensor:
    return dropout(dropout(h, 0.0), 0.1, not mlp.training)


def as_a_whole(h: Tensor, _: FeedForward) -> Tensor:
    return h * torch.rand((), device=h.device)


@pytest.mark.parametrize("inside", [of_no_chance, as_a_whole])
def test_random_numbers_that_are_none_or_of_the_whole(inside: Inside) -> None:
    assert not refused([inside])


def test_a_layer_that_is_given_another_tensor() -> None:
    message = refused([handed_on])
    assert "layers.0.feed_forward.w2 = called with other tensors on one of 2 ranks" in message


def test_the_whole_message() -> None:
    lines, first = inspect.getsourcelines(Mlp)
    line = first + next(i for i, text in enumerate(lines) if "self.inside(h" in text)
    assert refused([divided]) == (
        f"{__file__}: 1 problem\n"
        f"  line {line}  layers.*.feed_forward: return self.w2(self.inside(h, self)) = "
        "aten.div.Tensor with other = 384 on one of 2 ranks\n"
        "      want: other = 768, as in one process\n"
        "      fix:  take dims from the model's dimensions, as self.width = dims.ffn_dim in __init__, "
        "not from a tensor's shape or len(); or tensor_parallel_degree = 1"
    )


def test_one_of_blocks_that_are_alike_is_run() -> None:
    Mlp.calls = 0
    assert refused([of_the_model] * 2) == ""
    assert Mlp.calls == 2 + 1 + 2 * 2  # to a graph, on a rank, and both ways for backward
    assert "other = 384" in refused([of_the_model, of_the_model, divided])
    # To a graph and both ways; on a rank one of a kind, and all before it is refused; and once more for the line.
    assert Mlp.calls == 7 + 2 * 3 + (2 + 3) + 2 * 3


LEFT: list[Tensor] = []


class HandsOn(Block):
    """Gives what it is given, too."""

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, first: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """[M, D] each → [M, D] each."""
        return super().forward(x, cos, sin), first


class LeavesBehind(Block):
    """Puts half of its result where the model finds it."""

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[M, D] → [M, D]."""
        y = super().forward(x, cos, sin)
        LEFT.append(y / 2)
        return y


class Carries(Llama3):
    """Takes one of both from its blocks."""

    def forward(self, tokens: Tensor) -> Tensor:
        """[M] → [M, V]."""
        x = first = self.tok_embeddings(tokens)
        LEFT.clear()
        for block in self.layers:
            if isinstance(block, HandsOn):
                x, first = block(x, self.cos, self.sin, first)
            else:
                x = block(x, self.cos, self.sin)
        return self.output(self.norm(x + sum(LEFT, first)))


@pytest.mark.parametrize("kind", [HandsOn, LeavesBehind])
def test_blocks_that_hand_on_or_leave_something(kind: type[Block]) -> None:
    with torch.device("meta"):
        model = Carries(dataclasses.replace(SIZES, n_layers=3), TOKENS)
    for block in model.layers:
        block.__class__ = kind
    assert plan_layers(model, TOKENS, RANKS).layers["layers.2.feed_forward.w2"].scatters
