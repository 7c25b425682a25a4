"""Experts shared out over ranks compute what one rank with all tokens and all experts does, to the bit, in one window
of rows or in several."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.support.needs import slow
from tests.support.numbers import normal
from tests.support.ranks import run_ranks, world_group
from tests.support.sqnr import sqnr
from tests.unit.kernels.test_experts import one_by_one
from titanlite import recipes
from titanlite.float8.experts import Float8Experts
from titanlite.kernels import expert_windows
from titanlite.kernels.collectives import Group
from titanlite.kernels.expert_windows import window_rows
from titanlite.kernels.experts import PlainExperts

M, D, F, E, K = 24, 16, 128, 16, 4  # tokens are of all ranks together
STEPS = 10
NAMES = ["y", "d_x", "d_weights", "d_w13", "d_w2"]


def choices_of(kind: str) -> Tensor:
    """Choose K different experts for each token: at random, all of the first of four ranks, which then has a window for
    each, or those of the last never."""
    scores = torch.rand(M, E, generator=torch.Generator().manual_seed(1))
    if kind == "the first rank's":
        scores[:, :K] += 1
    elif kind == "none of the last rank's":
        scores[:, -K:] = -1
    return scores.topk(K, dim=1).indices.int()


def trained(rank: int, group: Group | None, kind: str, dtype: torch.dtype) -> list[Tensor]:
    """Take ten steps of gradient descent with this rank's tokens and experts; return all that was computed."""
    size = 1 if group is None else group.size
    tokens, own = slice(rank * M // size, (rank + 1) * M // size), slice(rank * E // size, (rank + 1) * E // size)
    w13, w2 = (normal(E, 2 * F, D, seed=2, dtype=dtype) / 4)[own], (normal(E, D, F, seed=3, dtype=dtype) / 11)[own]
    w13, w2, compute = w13.flatten(0, 1), w2.flatten(0, 1), PlainExperts(group)
    x, weights = normal(M, D, seed=4, dtype=dtype)[tokens], normal(M, K, seed=5).softmax(1)[tokens]
    choices, given, found = choices_of(kind)[tokens], [x, weights, w13, w2], []
    for _ in range(STEPS):
        x, weights, w13, w2 = given = [t.detach().requires_grad_() for t in given]
        y = compute(x, weights, choices, w13, w2, E)
        gradients = torch.autograd.grad(y, given, y.detach())  # of Σ y² / 2
        found += [y.detach(), *gradients]
        assert all(t.isfinite().all() for t in found[-5:])  # else no two are equal
        given = [t.detach() - 0.01 * gradient for t, gradient in zip(given, gradients, strict=True)]
    return found


@pytest.mark.parametrize("dtype", [torch.float32, *slow(torch.bfloat16)])
@pytest.mark.parametrize("kind", ["random", "the first rank's", *slow("none of the last rank's")])
@pytest.mark.parametrize("world", [4, *slow(8)])
def test_any_degree_has_the_bits_of_one(world, kind, dtype, tmp_path):
    truth = trained(0, None, kind, dtype)

    def body() -> None:
        rank, wrong = dist.get_rank(), []
        pair = [dist.new_group([n, n + 1]) for n in range(0, world, 2)][rank // 2]
        for group in (dist.group.WORLD, pair):
            size = group.size()
            here = Group(group.group_name, size, rank % size)
            for n, (got, whole) in enumerate(zip(trained(rank % size, here, kind, dtype), truth, strict=True)):
                if not torch.equal(got, whole.chunk(size)[rank % size]):
                    wrong.append((size, n // 5, n % 5))
        assert not wrong, f"degree, step, which of y, d_x, d_weights, d_w13, d_w2: {wrong}"

    run_ranks(body, tmp_path, world)


KINDS = ["random", "the first rank's", "none of the last rank's"]


class Case:
    """Tokens of two ranks, of which rank 0 may have all rows, and what one rank computes with all experts."""

    width = 128  # for float8 by row

    def __init__(self, kind: str, dtype: torch.dtype) -> None:
        self.choices, draw = choices_of(kind), partial(normal, dtype=dtype)
        self.grad = draw(M, self.width)
        weights = normal(M, K, seed=5, dtype=torch.promote_types(dtype, torch.float32))
        self.given = [draw(M, self.width, seed=4), weights]
        self.given += [draw(E * 2 * F, self.width, seed=2) / 11, draw(E * self.width, F, seed=3) / 11]

    def ran(self, compute: Any, rank: int = 0, size: int = 1, trained: int = 4) -> list[Tensor]:
        """Return this rank's part of the result and of the gradients of the first `trained` of what is given."""
        leaves = [t.chunk(size)[rank].detach().requires_grad_(n < trained) for n, t in enumerate(self.given)]
        y = compute(*leaves[:2], self.choices.chunk(size)[rank].contiguous(), *leaves[2:], E)
        return [y.detach(), *torch.autograd.grad(y, leaves[:trained], self.grad.chunk(size)[rank])]

    def truth(self) -> list[Tensor]:
        """Return the loop over experts in float64."""

        def loop(x: Tensor, weights: Tensor, choices: Tensor, w13: Tensor, w2: Tensor, n: int) -> Tensor:
            return one_by_one(x, weights, choices, w13.unflatten(0, (n, -1)), w2.unflatten(0, (n, -1)))

        whole = Case.__new__(Case)
        whole.choices, whole.grad, whole.given = self.choices, self.grad.double(), [t.double() for t in self.given]
        return whole.ran(loop)


def of_two(body: Callable[[int, Group], list[Any]], tmp_path: Path) -> None:
    """Run a check on two ranks that share experts."""

    def checked() -> None:
        wrong = body(dist.get_rank(), world_group())
        assert not wrong, wrong

    run_ranks(checked, tmp_path, 2)


@pytest.mark.parametrize("kind", KINDS)
def test_experts_of_two_ranks_are_those_of_a_loop(kind: str, tmp_path: Path) -> None:
    """In float64, whose sums of some hundred terms of size 100 are exact within 1e-12 of the largest."""
    case = Case(kind, torch.float64)
    truth = case.truth()

    def body(rank: int, group: Group) -> list[str]:
        with watched() as counts:
            got = case.ran(PlainExperts(group), rank, 2)
        wrong = [f"{counts} windows"] if (max(counts) > 1) != (kind == "the first rank's" and rank == 0) else []
        pairs = zip(NAMES, got, (t.chunk(2)[rank] for t in truth), strict=True)
        return wrong + [name for name, ours, whole in pairs if (ours - whole).abs().max() > 1e-12 * whole.abs().max()]

    of_two(body, tmp_path)


@pytest.mark.parametrize("kind", KINDS)
def test_in_float8_windows_are_as_near_the_loop_as_all_rows_are(kind: str, tmp_path: Path) -> None:
    """Results, and gradients of tokens and weights, have the bits of one rank. The gradients of experts' weights have
    scales of a window's or a rank's rows; in decibels as in tests/unit/float8/test_experts.py."""
    case, recipe = Case(kind, torch.bfloat16), recipes.load("float8", "rowwise")
    alone, truth = case.ran(Float8Experts(recipe)), case.truth()

    def body(rank: int, group: Group) -> list[str]:
        got = case.ran(Float8Experts(recipe, group), rank, 2)
        alike, near = zip(NAMES[:3], got, alone, strict=False), zip(NAMES[3:], got[3:], truth[3:], strict=True)
        wrong = [name for name, ours, whole in alike if not torch.equal(ours, whole.chunk(2)[rank])]
        return wrong + [name for name, ours, whole in near if sqnr(ours, whole.chunk(2)[rank]) < 20.9]

    of_two(body, tmp_path)


@pytest.mark.parametrize("float8", [False, *slow(True)])
def test_a_compiler_and_frozen_weights_change_no_bit_of_several_windows(float8: bool, tmp_path: Path) -> None:
    """Trained are all, all but w2, or neither w13 nor w2."""
    case = Case("the first rank's", torch.bfloat16)

    def body(rank: int, group: Group) -> list[tuple[str, int, str]]:
        experts = Float8Experts(recipes.load("float8", "rowwise"), group) if float8 else PlainExperts(group)
        truth, wrong = case.ran(experts, rank, 2), list[tuple[str, int, str]]()
        compiled = torch.compile(lambda *given: experts(*given), backend="aot_eager", fullgraph=True, dynamic=False)
        for how, compute in (("eager", experts), ("compiled", compiled)):
            for trained in (4, 3, 2):
                pairs = zip(NAMES, case.ran(compute, rank, 2, trained), truth, strict=False)
                wrong += [(how, trained, name) for name, got, whole in pairs if not torch.equal(got, whole)]
        return wrong

    of_two(body, tmp_path)


@pytest.mark.parametrize("float8", [False, True])
def test_backward_keeps_a_window_whatever_the_router_chooses(float8: bool, tmp_path: Path) -> None:
    case, rows = Case("the first rank's", torch.bfloat16), window_rows(2, M, top_k=K, n_experts=E // 2)

    def body(rank: int, group: Group) -> list[str]:
        compute, kept = PlainExperts(group), dict[int, int]()
        if float8:
            compute = Float8Experts(recipes.load("float8", "rowwise"), group)

        def pack(t: Tensor) -> Tensor:
            kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
            return t

        x, weights, w13, w2 = (t.chunk(2)[rank].clone().requires_grad_() for t in case.given)
        choices = case.choices.chunk(2)[rank].clone()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            compute(x, weights, choices, w13, w2, E)
        of_routing = 2 * M * K * 4 + 2 * (E // 2 + 1) * 4 + choices.nbytes  # rows, slots, offsets twice
        wanted = rows * 2 * F * 2 + x.nbytes + weights.nbytes + w13.nbytes + w2.nbytes + of_routing
        return [] if sum(kept.values()) == wanted else [f"{sum(kept.values())} bytes, {wanted} wanted"]

    of_two(body, tmp_path)


@contextmanager
def watched() -> Iterator[list[int]]:
    """Collect the number of windows of each call."""
    counts, find = list[int](), expert_windows.windows

    def counted(on_host: Tensor, n_rows: int) -> Iterator[expert_windows.Window]:
        counts.append(len(found := [*find(on_host, n_rows)]))
        return iter(found)

    expert_windows.windows = counted
    try:
        yield counts
    finally:
        expert_windows.windows = find
