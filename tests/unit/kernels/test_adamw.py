"""AdamW's update against the textbook's in float64; and the kernel's code for sm_90, compiled without a GPU."""

import re
from collections import Counter

import pytest
import torch

from tests.support.compile_only import accesses, compiling
from tests.support.needs import DEVICES
from tests.support.numbers import F32, normal
from titanlite.kernels.adamw import AdamWState, Update, adamw
from titanlite.kernels.device.adamw import BLOCK, WARPS

LR, BETA1, BETA2, TINY = 1e-2, 0.9, 0.999, 1e-8
# Less than a block, whole blocks, a piece more; and sizes that are no multiple of 16 bytes.
SIZES = {"aligned": (4, 4096, 8192, 12292), "odd": (1, 5, 4097, 9999)}


def state(sizes: tuple[int, ...], moment: torch.dtype, device: str) -> AdamWState:
    return AdamWState(
        parameters=[normal(n, seed=i, device=device) for i, n in enumerate(sizes)],
        exp_avg=[torch.zeros(n, dtype=moment, device=device) for n in sizes],
        exp_avg_sq=[torch.zeros(n, dtype=moment, device=device) for n in sizes],
        weight_decays=[0.1, 0.0, 0.1, 0.5],
        runs=[1, 3],
        updates=torch.zeros((), device=device),
        beta1=BETA1,
        beta2=BETA2,
        eps=TINY,
    )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("moment", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", SIZES)
def test_update(sizes, moment, device):
    """Moments are rounded to their dtype after each step; all else a few times to float32."""
    got = state(SIZES[sizes], moment, device)
    update, one, half = adamw(got), torch.ones((), device=device), torch.tensor(0.5, device=device)
    for t in range(1, 5):
        before = [[x.double() for x in xs] for xs in (got.parameters, got.exp_avg, got.exp_avg_sq)]
        gradients = [normal(n, seed=100 * t + i, device=device) for i, n in enumerate(SIZES[sizes])]
        given = [g.double() / 0.5 for g in gradients]
        got.updates.add_(1)
        decay_factor = (1.0, 0.25)[t % 2]
        squares = update(gradients, LR, half, one * 0, True, decay_factor)
        changed = [p.double() - old for p, old in zip(got.parameters, before[0], strict=True)]
        for found, run in zip(squares, (slice(1), slice(1, None)), strict=True):
            true = torch.stack([torch.cat(xs[run]).square().sum() for xs in (before[0], changed)])
            assert ((found - true).abs() <= 64 * F32 * true).all()  # sums of blocks, added up
        for i, (p, m, v) in enumerate(zip(*before, strict=True)):
            m = BETA1 * m + (1 - BETA1) * given[i]
            v = BETA2 * v + (1 - BETA2) * given[i] ** 2
            change = LR * (m / (1 - BETA1**t)) / ((v / (1 - BETA2**t)).sqrt() + TINY)
            p = p * (1 - LR * decay_factor * got.weight_decays[i]) - change
            rounded = torch.finfo(moment).eps / 2
            most = given[i].abs().max()  # m is a sum that may cancel
            assert ((got.exp_avg[i] - m).abs() <= rounded * m.abs() + 4 * F32 * most).all()
            assert ((got.exp_avg_sq[i] - v).abs() <= (rounded + 6 * F32) * v).all()
            error = 12 * F32 * change.abs() + 4 * F32 * LR * most / ((v / (1 - BETA2**t)).sqrt() * (1 - BETA1**t))
            assert ((got.parameters[i] - p).abs() <= 2 * F32 * p.abs() + error).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("moment", [torch.float32, torch.bfloat16])
def test_a_step_left_out_leaves_every_bit(moment, device):
    got = state(SIZES["odd"], moment, device)
    update, one = adamw(got), torch.ones((), device=device)
    got.updates.add_(1)
    update([normal(n, seed=7, device=device) for n in SIZES["odd"]], LR, one, one * 0, False, 1.0)
    tensors = [*got.parameters, *got.exp_avg, *got.exp_avg_sq]
    before = [t.clone() for t in tensors]
    squares = update([torch.full_like(p, torch.nan) for p in got.parameters], LR, one * torch.nan, one, True, 1.0)
    for (weight, change), run in zip(squares, (slice(1), slice(1, None)), strict=True):
        true = torch.cat(got.parameters[run]).double().square().sum()
        assert change == 0
        assert (weight - true).abs() <= 64 * F32 * true
    assert all(torch.equal(a, b) for a, b in zip(tensors, before, strict=True))


@pytest.mark.parametrize(("sizes", "at_once"), [("aligned", 4), ("odd", 1)])
def test_code_for_sm_90_moves_16_bytes_at_once_where_it_may(sizes, at_once):
    got, one = state(SIZES[sizes], torch.float32, "cpu"), torch.ones(())
    gradients = [normal(n, seed=7) for n in SIZES[sizes]]
    with compiling() as compiled:
        Update(got).step(gradients, LR, one, one * 0)
    moved = accesses(compiled["_adamw"])
    times = BLOCK // (32 * WARPS) // at_once  # by each thread
    assert moved["st", at_once] == 3 * times == sum(n for (way, _), n in moved.items() if way == "st")
    assert moved["ld", at_once] >= 4 * times


def arithmetic(ptx: str) -> Counter[str]:
    return Counter(re.findall(r"\b((?:add|sub|mul|fma|div|sqrt|neg)\.(?:\w+\.)*f32)\b", ptx))


def test_to_measure_adds_to_the_code_and_changes_none_of_it():
    """Whether a step is logged decides on no bit of it: no product and sum that are one fma here are two there."""
    got, one, code = state(SIZES["odd"], torch.float32, "cpu"), torch.ones(()), []
    for measure in (False, True):
        with compiling() as compiled:
            Update(got).step([normal(n, seed=7) for n in SIZES["odd"]], LR, one, one * 0, measure)
        code.append(arithmetic(compiled["_adamw"].asm["ptx"]))
    plain, measuring = code
    assert plain["fma.rn.f32"] > 0
    added, of_thread = measuring - plain, BLOCK // (32 * WARPS)
    assert not plain - measuring
    assert added["sub.f32"] + added["sub.rn.f32"] == of_thread  # what changed
    assert added["fma.rn.f32"] <= 2 * of_thread  # its squares and those of weights, added up
    assert {op.partition(".")[0] for op in added} <= {"sub", "mul", "fma", "add"}
