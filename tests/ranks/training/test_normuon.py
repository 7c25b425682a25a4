"""NorMuon under every layout against a plain one on whole matrices."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.ranks.training.test_muon import (
    DECAY,
    EXACT,
    LR,
    ONE,
    PACES,
    STEPS,
    TWO,
    ZERO,
    Layers,
    bound,
    by_hand,
    normal,
    of_numbers,
    sharded,
)
from tests.support.needs import slow
from tests.support.ranks import run_ranks
from tests.support.short_run import whole
from titanlite.config.schema import Parallelism
from titanlite.device import CPU
from titanlite.models.matrices import matrices_of
from titanlite.optimizers.normuon import NorMuon
from titanlite.parallel.initialise import local_slice
from titanlite.parallel.mesh import build_mesh

BETA2 = 0.7


def plain() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Whole weights and second moments after the steps, in a loop over matrices, by their singular values."""
    weights, moments = dict[str, Tensor](), dict[str, Tensor]()
    for name, p in Layers().named_parameters():
        weight, momentum = normal(name, p.shape, 0), torch.zeros(p.shape, dtype=torch.float64)
        moment = torch.zeros(p.shape, dtype=torch.float64)  # of a row, at each of its numbers
        lr = LR * PACES[name].lr_factor
        for step in range(1, STEPS + 1):
            grad = normal(name, p.shape, step) / 2
            momentum = EXACT.momentum * momentum + (1 - EXACT.momentum) * grad
            update = EXACT.momentum * momentum + (1 - EXACT.momentum) * grad
            of = zip(by_hand(name, weight), by_hand(name, update), by_hand(name, moment), strict=True)
            for w, u, v in of:
                matrix = u.reshape(-1, u.shape[-1])
                left, s, right = torch.linalg.svd(matrix, full_matrices=False)
                o = (left * of_numbers(s / s.norm(), EXACT.polynomials)) @ right
                v.mul_(BETA2).add_((1 - BETA2) * (o**2).mean(1, keepdim=True).expand_as(o).reshape(v.shape))
                o = o / (v.reshape(o.shape).sqrt() + 1e-8)
                w.mul_(1 - lr * PACES[name].weight_decay)
                w.sub_((o / o.norm()).view(w.shape), alpha=lr * 0.2 * math.sqrt(o.numel()))
        weights[name], moments[name] = weight, moment[:, 0]
    return weights, moments


@pytest.mark.parametrize(
    ("world", "degrees"),
    [
        (2, {"tensor_parallel_degree": 2}),
        *slow(
            (1, {}),
            (4, {}),
            (4, {"data_parallel_replicate_degree": 2}),
            (4, {"tensor_parallel_degree": 2}),
            (4, {"expert_parallel_degree": 2}),
        ),
    ],
)
def test_every_layout_is_the_plain_one(world: int, degrees: dict[str, int], tmp_path: Path) -> None:
    assert all(pace.weight_decay >= DECAY for pace in PACES.values())

    def body() -> None:
        mesh = build_mesh(Parallelism(**degrees), CPU, has_experts=True)  # type: ignore[arg-type]
        model = sharded(mesh)
        named = dict(model.named_parameters())
        ours = NorMuon(named, mesh, matrices_of(model), replace(EXACT, beta2=BETA2), PACES)
        for step in range(1, STEPS + 1):
            grads = {n: local_slice(normal(n, p.shape, step), p).clone() for n, p in named.items()}
            ours.step(grads, LR, TWO, ZERO)
            ours.step({n: torch.full_like(t, float("nan")) for n, t in ours.locals.items()}, LR, ONE, ONE)  # left out
        weights, moments = plain()
        for name, p in named.items():
            # A row is divided by its size, and errors with it: by less than a tenth of the rows' mean size here.
            assert (whole(p) - weights[name]).norm() <= 10 * bound(weights[name]), name
            torch.testing.assert_close(ours.second_moment[name], moments[name], rtol=1e-9, atol=0)

    run_ranks(body, tmp_path, world)


def test_a_matrix_that_has_no_gradient_stays(tmp_path: Path) -> None:
    """Nothing is divided by the size of nothing."""

    def body() -> None:
        mesh = build_mesh(Parallelism(), CPU)
        model = sharded(mesh)
        named, paces = (
            dict(model.named_parameters()),
            {name: pace._replace(weight_decay=0.0) for name, pace in PACES.items()},
        )
        rule = replace(EXACT, dtype=torch.bfloat16, beta2=BETA2)
        ours = NorMuon(named, mesh, matrices_of(model), rule, paces)
        ours.step({n: torch.zeros_like(t) for n, t in ours.locals.items()}, LR, ONE, ZERO)
        assert all(torch.equal(whole(p), normal(name, p.shape, 0)) for name, p in named.items())

    run_ranks(body, tmp_path, 1)
