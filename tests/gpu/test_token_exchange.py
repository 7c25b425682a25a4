"""Tokens that travel to their experts on GPUs: every bit is that of one rank with all tokens and all experts."""

import operator
import random
import warnings
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.gpu.ranks_on_gpus import run_on_gpus
from tests.support.numbers import differ, normal
from tests.support.ranks import world_group
from titanlite import recipes
from titanlite.float8.experts import Float8Experts
from titanlite.kernels.experts import PlainExperts
from titanlite.kernels.routing import combine, expert_rows
from titanlite.kernels.token_exchange import (
    combine_at_owners,
    gather_from_ranks,
    gradients_at_owners,
    no_token_exchange,
)

bf16 = partial(normal, dtype=torch.bfloat16)
OPS = 3000


class Shape(NamedTuple):
    """Tokens of a rank, their experts, width, width of an expert, experts of a rank."""

    M: int
    K: int
    D: int
    F: int
    E: int


SHAPES = [
    Shape(96, 4, 256, 128, 2), Shape(200, 2, 256, 128, 4), Shape(37, 1, 128, 256, 3), Shape(512, 8, 2048, 128, 4)
]  # fmt: skip


def choices_of(seed: int, tokens: int, K: int, E: int, device: str) -> Tensor:
    """Choose K different experts for each token: unevenly, or the first rank's alone, as the seed says."""
    scores = torch.rand(tokens, E, generator=torch.Generator().manual_seed(seed))
    scores[:, : max(K, E // 4)] += seed % 3 / 2
    return scores.topk(K, dim=1).indices.int().to(device)


class Case:
    """Calls of the three operators on numbers that all ranks know, and what each must return."""

    def __init__(self, shape: Shape, seed: int, device: str) -> None:
        (M, K, D, _, E), group = shape, world_group()
        P, r = group.size, group.rank
        own, ours = slice(r * M, (r + 1) * M), slice(r * E, (r + 1) * E)
        x, weights = (
            bf16(P * M, D, seed=seed, device=device),
            normal(P * M, K, seed=seed + 1, dtype=torch.float32, device=device),
        )
        choices = choices_of(seed, P * M, K, P * E, device)
        rows, _, _ = expert_rows(choices, 0, P * E)
        o = bf16(P * M * K, D, seed=seed + 2, device=device)
        _, mine, _ = expert_rows(choices, ours.start, E)
        row_of = torch.where(mine < 0, 0, rows.flatten()[mine.clamp(min=0)])
        sent = o[row_of.long()].masked_fill_((mine < 0)[:, None], torch.nan)  # of no token: nobody adds them
        dots = torch.where((choices >= ours.start) & (choices < ours.stop), weights, torch.nan)
        self.calls: list[Callable[[], list[Tensor]]] = [
            lambda: gather_from_ranks([x[own], choices[own]], group.name),
            lambda: [combine_at_owners(sent, mine, choices[own], weights[own], E, group.name)],
            lambda: list(gradients_at_owners(sent, mine, choices[own], dots, E, group.name)),
        ]
        of_own = rows[own]
        self.wanted = [
            [x, choices],
            [combine(o, of_own, weights[own])],
            [combine(o, of_own, None), weights[own]],
        ]


def operators(device: str) -> None:
    assert device == "cpu" or no_token_exchange(world_group().name) is None
    for shape in SHAPES:
        for seed in range(3):
            case = Case(shape, seed, device)
            for i, (call, wanted) in enumerate(zip(case.calls, case.wanted, strict=True)):
                assert not differ(call(), wanted), (shape, seed, i)


class Layer:
    """Tokens, experts and a gradient, all and this rank's part."""

    def __init__(self, shape: Shape, seed: int, kind: int, device: str) -> None:
        (M, K, D, F, E), group = shape, world_group()
        P, r = group.size, group.rank
        own, ours = slice(r * M, (r + 1) * M), slice(r * E, (r + 1) * E)
        w13, w2 = (
            bf16(P * E, 2 * F, D, seed=seed, device=device) / 8,
            bf16(P * E, D, F, seed=seed + 1, device=device) / 8,
        )
        x, weights = bf16(P * M, D, seed=seed + 2, device=device), torch.rand(P * M, K, device="cpu").to(device)
        dist.broadcast(weights, 0)
        choices, grad = choices_of(kind, P * M, K, P * E, device), bf16(P * M, D, seed=seed + 3, device=device)
        self.whole = x, weights, choices, w13, w2, grad, P * E
        self.part = x[own], weights[own], choices[own], w13[ours], w2[ours], grad[own], P * E

    def truth(self, compute: Callable[..., Tensor]) -> list[Tensor]:
        """Return this rank's part of what one rank computes."""
        group = world_group()
        return [t.chunk(group.size)[group.rank] for t in trained(compute, *self.whole)]


def layers(device: str) -> None:
    """Take a step with all tokens and experts, and with a part of both: results and gradients are equal.

    With choices of the first rank's experts alone, rows of some shapes take several windows there.
    """
    group = world_group()
    recipe = recipes.load("float8", "rowwise")
    for seed, (kind, shape) in enumerate(product((0, 2), SHAPES)):
        layer = Layer(shape, seed, kind, device)
        pairs = [
            ("bf16", PlainExperts(), PlainExperts(group)),
            ("rowwise", Float8Experts(recipe), Float8Experts(recipe, group)),
        ]
        for name, whole, part in pairs:
            wanted, got = layer.truth(whole), trained(part, *layer.part)
            # A rank whose experts have no tokens has gradients of zeros.
            errors = [((a - b).norm() / b.norm().clamp(min=1e-30)).item() for a, b in zip(got, wanted, strict=True)]
            # In float8 operands of gradients have scales of columns, over all experts that a rank has: powers of two,
            # which change numbers alone that are subnormal under one of them.
            bounds = [0.0, *[5e-3] * 4] if name == "rowwise" else [0.0] * 5
            assert all(map(operator.le, errors, bounds)), f"{name}: of y, d_x, d_weights, d_w13, d_w2: {errors}"


def trained(compute: Callable[..., Tensor], *given: Tensor | int) -> list[Tensor]:
    if isinstance(given[0], Tensor) and given[0].is_cuda:  # memory that results are taken from is not zero
        del_ = [torch.full((2**26,), torch.nan, device=given[0].device) for _ in range(2)]
        del del_
    found = step(compute, *given)
    assert all(t.isfinite().all() for t in found)  # else no two are equal
    return found


def step(compute: Callable[..., Tensor], *given: Tensor | int) -> list[Tensor]:
    x, weights, choices, w13, w2, grad, n_experts = given
    assert isinstance(w13, Tensor) and isinstance(w2, Tensor)  # noqa: PT018
    leaves = [t.detach().clone().requires_grad_() for t in (x, weights, w13.flatten(0, 1), w2.flatten(0, 1))]  # type: ignore[union-attr]
    x, weights, w13, w2 = leaves
    y = compute(x, weights, choices, w13, w2, n_experts)  # type: ignore[arg-type]
    return [y.detach(), *torch.autograd.grad(y, leaves, grad)]  # type: ignore[arg-type]


def without_waiting(device: str) -> None:
    """Take steps while torch raises where the host waits for the GPU, eager and compiled, with one window and with
    several on the first rank."""
    group, recipe, shape = world_group(), recipes.load("float8", "rowwise"), SHAPES[3]
    made = [Layer(shape, 0, kind, device) for kind in (0, 2)]
    for experts in (PlainExperts(group), Float8Experts(recipe, group)):
        compiled = torch.compile(lambda *given, of=experts: of(*given), fullgraph=True, dynamic=False)
        for compute in (experts, compiled):
            wanted = [trained(experts, *layer.part) for layer in made]
            for layer in made:
                trained(compute, *layer.part)  # memory grows and kernels are compiled here
            torch.cuda.synchronize()
            try:
                with warnings.catch_warnings():
                    warnings.filterwarnings("ignore", "Synchronization debug mode")  # that it does not find every wait
                    torch.cuda.set_sync_debug_mode("error")
                found = [step(compute, *layer.part) for layer in made]
            finally:
                torch.cuda.set_sync_debug_mode("default")
            wrong = [n for n, (got, alike) in enumerate(zip(found, wanted, strict=True)) if differ(got, alike)]
            assert not wrong, f"{type(experts).__name__}, compiled: {compute is compiled}, choices: {wrong}"


def graphs(device: str) -> None:
    """Capture calls, and replay them with other rows each time, between eager calls."""
    cases = [Case(SHAPES[0], seed, device) for seed in range(3)]
    for case in cases:
        operators_of(case)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        results = [call() for call in cases[1].calls]
    for _ in range(20):
        for result in results:
            for t in result:
                t.fill_(7)
        graph.replay()
        for result, wanted in zip(results, cases[1].wanted, strict=True):
            assert not differ(result, wanted)
        operators_of(cases[2])


def operators_of(case: Case) -> None:
    for call, wanted in zip(case.calls, case.wanted, strict=True):
        assert not differ(call(), wanted)


def soak(device: str) -> None:
    """Call at random, each rank late at random, while NCCL moves data on a stream of its own."""
    together, own = random.Random(0), random.Random(dist.get_rank())
    cases = [Case(shape, seed, device) for shape in SHAPES for seed in range(2)]
    calls = [(call, wanted) for case in cases for call, wanted in zip(case.calls, case.wanted, strict=True)]
    compute = PlainExperts(world_group())
    made = [Layer(shape, 0, 2, device) for shape in SHAPES]  # of some the first rank has several windows, others none
    calls += [(partial(step, compute, *layer.part), layer.truth(PlainExperts())) for layer in made]
    for call, wanted in calls:
        assert not differ(call(), wanted)  # memory grows and kernels are compiled here
    side, n = torch.cuda.Stream(), dist.get_world_size()
    small, large = torch.ones(1 << 18, device=device), torch.empty(n << 18, device=device)
    wrong = torch.zeros((), dtype=torch.int64, device=device)
    torch.cuda.synchronize()
    for number in range(OPS):
        if own.random() < 0.05:
            torch.cuda._sleep(own.randrange(2_000_000))  # up to a millisecond
        if number % 4 == 0 and n <= torch.cuda.device_count():
            with torch.cuda.stream(side):
                dist.all_gather_into_tensor(large, small)
        call, wanted = together.choice(calls)
        wrong += differ(call(), wanted)
    torch.cuda.synchronize()
    assert wrong.item() == 0, f"{wrong.item()} of {OPS} calls have a wrong bit"


@pytest.mark.gpu
@pytest.mark.timeout(400)
@pytest.mark.parametrize("world", [0, 8])
@pytest.mark.parametrize("body", [operators, layers])
def test_as_one_rank(body: Callable[[str], None], world: int, tmp_path: Path) -> None:
    run_on_gpus(body, tmp_path, world=world, timeout_s=300)


@pytest.mark.gpu
@pytest.mark.timeout(400)
@pytest.mark.parametrize("body", [graphs, without_waiting, soak])
def test_repeated(body: Callable[[str], None], tmp_path: Path) -> None:
    run_on_gpus(body, tmp_path, timeout_s=300)


@pytest.mark.slow
def test_the_bodies_over_gloo(tmp_path: Path) -> None:
    """The same comparisons where the operators are their definitions."""
    run_on_gpus(_on_cpu, tmp_path, "cpu", world=2, timeout_s=100)


def _on_cpu(device: str) -> None:
    global SHAPES  # in a process of its own
    SHAPES = SHAPES[:2]
    operators(device)
    layers(device)
