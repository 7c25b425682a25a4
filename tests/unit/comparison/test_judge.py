"""The verdict on two runs, from curves whose differences are known."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.support.needs import slow
from titanlite.comparison.judge import _LIMITS, BEYOND, Verdict, drift_ratios, is_open, judge, tokens_to_equal_loss
from titanlite.comparison.runs import RunRecord

STEPS, TOKENS = 400, 1000


def curve(delay: float = 1.0) -> np.ndarray:
    """A falling loss that needs `delay` times the steps."""
    return 2 + 3 * np.exp(-np.arange(1, STEPS + 1) / delay / 150)


def record(losses: np.ndarray, name: str = "run") -> RunRecord:
    rows = [
        {"step": i, "tokens": i * TOKENS, "loss": float(loss), "grad_norm": float(loss) / 4}
        for i, loss in enumerate(losses, start=1)
    ]
    return RunRecord(name, rows, {}, "finished", None)


def drift(size: float, seed: int) -> np.ndarray:
    """What rounding does: a random walk that grows from `size` times 1e-6."""
    return size * 1e-6 * np.cumsum(np.random.default_rng(seed).normal(size=STEPS))


BASE = record(curve(), "base")
NUDGED = [record(curve() + drift(1, seed)) for seed in (1, 2)]


def verdict(losses: np.ndarray, **given: Any) -> Verdict:
    found = judge(BASE, record(losses, "other"), **given)
    assert found is not None
    return found


def seeds(*offsets: float) -> list[RunRecord]:
    return [record(curve() + offset) for offset in offsets]


def at_first(losses: np.ndarray) -> np.ndarray:
    """A difference that no window at the end would show."""
    return losses + np.where(np.arange(STEPS) < 4, 1e-3, 0)


SEEDS, NOISE, WIDE = seeds(-0.03, 0.01, 0.04), *(np.random.default_rng(n).normal(size=STEPS) for n in (2, 4))
FAINT = curve() + 1e-5 * (NOISE - NOISE[-80:].mean())


@pytest.mark.parametrize(
    ("losses", "given", "kind"),
    [
        (curve(), {"nudged": NUDGED}, "equal bits"),
        (curve() + drift(2, 3), {"nudged": NUDGED}, "within rounding"),
        (curve() + drift(200, 3), {"nudged": NUDGED}, "differs"),
        (at_first(curve() + drift(1, 3)), {"nudged": NUDGED}, "differs"),
        (curve() + 0.02, {"nudged": NUDGED, "seeds": SEEDS}, "within seed noise"),
        (curve() + 0.20, {"nudged": NUDGED, "seeds": SEEDS}, "differs"),
        # Higher losses of a seed's earlier steps are no spread.
        (curve() + 0.20, {"nudged": NUDGED, "seeds": [*SEEDS, record(curve()[:330] + 0.01)]}, "differs"),
        (curve() + 0.02, {"nudged": NUDGED, "tolerance": 0.03}, "within tolerance"),
        (curve() + 0.02, {"nudged": NUDGED, "tolerance": 0.01}, "differs"),
        (curve() + 0.2 * WIDE, {}, "no difference shown"),
        (curve() + 0.2 * WIDE, {"tolerance": 0.001}, "differs"),  # the whole interval is to be within it
        (FAINT, {}, "no difference shown"),  # without nudged runs nothing is called rounding
    ],
)
def test_kinds_of_verdicts(losses: np.ndarray, given: dict[str, Any], kind: str) -> None:
    found = verdict(losses, **given)
    assert found.kind == kind
    assert ("--floor" in found.line) == ("nudged" not in given)


def test_seeds_of_other_tokens_are_no_spread() -> None:
    late = curve() + 0.2
    late[-1] = curve()[3]  # the last fifth of four steps is one, and equal
    elsewhere = record(curve())
    for row in elsewhere.rows:
        row["tokens"] += 1
    assert judge(record(curve()[:4]), record(late[-4:]), seeds=[elsewhere]).kind == "undecided"  # type: ignore[union-attr]


def test_a_difference_in_the_gradient_norm_alone_is_found() -> None:
    other = record(curve() + drift(1, 3))
    for row in other.rows:
        row["grad_norm"] *= 1.01
    ratios = drift_ratios(BASE, other, NUDGED)
    assert ratios["loss"] < BEYOND < ratios["grad_norm"]


def test_the_interval_holds_the_mean_of_an_offset() -> None:
    noise = np.convolve(np.random.default_rng(5).normal(size=STEPS + 9), np.ones(10) / 10, mode="valid") * 0.01
    found = verdict(curve() - 0.02 + noise)
    assert found.kind == "differs"
    assert found.low < -0.02 < found.high
    assert 0.0005 < (found.high - found.low) / 2 < 0.006  # 8 independent values of 0.003
    assert found.line.startswith("differs: \N{MINUS SIGN}0.0")
    assert "400.0 k tokens" in found.line


@pytest.mark.parametrize("width", [1, *slow(5)])
def test_intervals_hold_a_mean_as_often_as_they_say(width: int) -> None:
    held = 0
    for seed in range(300):
        noise = np.convolve(np.random.default_rng(seed).normal(size=STEPS + width - 1), np.ones(width), mode="valid")
        found = verdict(curve() + noise)
        held += found.low <= 0 <= found.high
    assert 0.90 < held / 300 < 0.985  # 0.95 within three standard deviations of a share of 300, and a little low


def test_a_number_that_is_not_finite_in_one_run_is_a_difference() -> None:
    other = record(curve())
    for row in other.rows[50:]:
        row["loss"] = None
    found = judge(BASE, other, NUDGED)
    assert found is not None
    assert found.kind == "differs"
    assert "51.0 k tokens" in found.line


EMPTY = {"step": 3, "tokens": 3 * TOKENS, "targets": 0}


@pytest.mark.parametrize(
    ("its", "ours", "line"),
    [  # what step 3 has in the first and in the other
        ({"loss": None}, {"loss": None}, "both have a training loss that is not finite, which equals nothing,"),
        ({"grad_norm": None, "grad_norm.all": None}, {"grad_norm": None, "grad_norm.all": None}, None),  # skipped
        ({"grad_norm": None}, {"grad_norm": None, "loss": 9.0}, "+"),
        ({}, {"grad_norm": None}, "one of them has no finite gradient norm before clipping"),
        (EMPTY, EMPTY, None),
        (EMPTY, EMPTY | {"grad_norm": None}, None),
        (EMPTY, {}, "one of them has no training loss"),
        ({}, EMPTY, "one of them has no training loss"),
        (EMPTY, {"loss": None}, "one of them has no finite training loss"),
        ({"loss.code": 1.0}, {"loss.code": 2.0}, "training loss of code alone"),
        ({"validation_loss": 1.0}, {"validation_loss": 1.0}, None),
        ({"validation_loss": 1.0}, {"validation_loss": 2.0}, "validation loss alone"),
        ({"validation_loss": None}, {"validation_loss": None}, "both have a validation loss that is not finite"),
        ({"accuracy.piqa": 0.5}, {"accuracy.piqa": 0.6}, "accuracy of piqa alone"),
        ({"evaluation_seconds": 1.0}, {"evaluation_seconds": 2.0}, None),
        ({"seconds": 1.0, "mfu": None}, {"seconds": 2.0, "mfu": None}, None),
    ],
)
def test_equal_bits_are_of_every_loss_that_is_there(its: dict, ours: dict, line: str | None) -> None:
    runs = [record(curve(), name) for name in ("base", "other")]
    for run, change in zip(runs, (its, ours), strict=True):
        if change.get("targets") == 0:
            run.rows[2] = change
        elif change.keys() & {"validation_loss", "accuracy.piqa", "evaluation_seconds"}:  # these have rows of their own
            run.rows.append({"step": 3, "tokens": 3 * TOKENS} | change)
        else:
            run.rows[2] |= change
    found = judge(runs[0], runs[1], NUDGED)
    assert found is not None
    assert (found.kind, found.passes) == (("equal bits", True) if line is None else ("differs", False))
    assert line is None or found.line.startswith(f"differs: {line}")
    assert line in (None, "+") or found.line.endswith(" at 3.0 k tokens")


@pytest.mark.parametrize(
    ("config", "state", "is_running", "passes"),
    [
        ({"training.steps": 6}, "stopped", False, False),
        ({"training.steps": 6}, "", False, False),
        ({"training.steps": 6}, "running", True, True),
        ({"training.steps": 6}, "running", False, True),  # a minute ago
        ({"training.steps": 6, "job.stop_after": 2}, "stopped", False, True),
        ({"training.steps": 6, "job.stop_after": 3}, "stopped", False, False),
        # Step 3 is not logged.
        ({"training.steps": 6, "job.stop_after": 3, "metrics.log_freq": 2}, "stopped", False, True),
        # The last one is.
        ({"training.steps": 3, "job.stop_after": 3, "metrics.log_freq": 2}, "failed", False, False),
        ({"training.steps": 2}, "finished", False, True),
        ({}, "finished", False, True),  # of a file that does not say it
    ],
)
def test_a_verdict_on_some_of_the_steps_says_so_and_what_ended_early_fails(
    config: dict[str, Any], state: str, is_running: bool, passes: bool
) -> None:
    whole = replace(record(curve()[:6], "whole"), config={"training.steps": 6})
    part = replace(record(curve()[:2], "part"), config=config, state=state, is_running=is_running)
    is_silent = state == "running" and not is_running
    empty = replace(part, rows=[*part.rows[:1], {"step": 2, "tokens": 2 * TOKENS, "targets": 0}])
    for first, other in ((whole, part), (part, whole)):
        found = judge(first, other)
        assert found is not None
        assert (found.kind, found.passes) == ("equal bits", passes)
        assert found.line.startswith("equal bits in the 2 steps that both have")
        assert ("part ended at step 2 of " in found.line) == (not passes)
        assert ("part was last seen at step 2 of 6" in found.line) == is_silent
    assert judge(part, part).passes == judge(empty, empty).passes == passes  # type: ignore[union-attr]
    assert judge(whole, whole).line == "equal bits"  # type: ignore[union-attr]


def test_what_few_steps_a_verdict_is_on_is_said_of_every_kind() -> None:
    sparse = record(curve() + 0.02)
    del sparse.rows[1::2]
    found = judge(BASE, sparse, NUDGED, tolerance=0.03)
    assert found is not None
    assert (found.kind, found.passes) == ("within tolerance", True)
    assert found.line.endswith(" at 399.0 k tokens, in the 200 steps that both have")


FEW = record(curve()[:10], "base")
FEW_NUDGED, FEW_SEEDS = ([record(curve()[:10] + by) for by in of] for of in ((1e-6, -2e-6), (-0.03, 0.04)))
PARTED = np.where(np.arange(10) < 5, 9, 0)  # the last fifth is the same


@pytest.mark.parametrize(
    ("offset", "given", "kind"),
    [
        (9, {}, "undecided"),
        (PARTED, {"tolerance": 0.1}, "undecided"),
        (9, {"nudged": FEW_NUDGED, "tolerance": 0.1}, "undecided"),
        (9, {"seeds": FEW_SEEDS, "tolerance": 0.1}, "undecided"),
        (9, {"seeds": seeds(0, 0)}, "undecided"),  # a spread of nothing
        (9, {"nudged": FEW_NUDGED}, "differs"),
        (9, {"seeds": FEW_SEEDS}, "differs"),
        (0.02, {"seeds": FEW_SEEDS}, "within seed noise"),
    ],
)
def test_too_few_steps_pass_nothing_and_differ_by_evidence_alone(offset: Any, given: dict, kind: str) -> None:
    found = judge(FEW, record(curve()[:10] + offset), **given)
    assert found is not None
    assert (found.kind, found.passes) == (kind, kind.startswith("within"))
    assert "too few steps for an interval" in found.line
    assert ("an interval takes 100 steps that both have logged" in found.line) == (kind == "undecided")


def test_a_floor_of_other_samples_decides_nothing_for_too_few_steps() -> None:
    other = replace(record(curve()[:10] + 9), config={"training.seed": 1})
    assert judge(FEW, other, FEW_NUDGED).kind == "undecided"  # type: ignore[union-attr]


@pytest.mark.parametrize(("key", "value"), [("training.seed", 1), ("data.max_tokens", 7), ("training.seq_len", 9)])
def test_runs_that_see_other_samples_are_not_within_rounding(key: str, value: int) -> None:
    other = record(curve() + drift(1, 3))
    other.config[key] = value
    found = judge(BASE, other, NUDGED)
    assert found is not None
    assert found.kind in ("no difference shown", "differs")
    assert f"other samples: {key} differs" in found.line


@pytest.mark.parametrize("delay", [0.8, 1.0, 1.25])
def test_tokens_to_equal_loss_are_those_of_a_curve_that_is_slower_by_as_much(delay: float) -> None:
    # Where one step is a percent of the loss, so is the answer's last digit.
    found = tokens_to_equal_loss(BASE, record(curve(delay)))
    assert found == pytest.approx(delay, rel=0.03)


def test_runs_without_a_step_in_common_have_no_verdict() -> None:
    other = record(curve())
    for row in other.rows:
        row["tokens"] += 1
    assert judge(BASE, other) is None


def carried(size: float) -> np.ndarray:
    """Where rounding carries a run along one direction: how far is `size`, the way is every run's."""
    return curve() + size * 1e-7 * np.exp(np.arange(STEPS) / 30)


def test_one_nudged_run_that_drifted_little_by_chance_does_not_make_others_differ() -> None:
    sizes = (0.05, -0.1, 1.2, -0.8)
    nudged = [record(carried(size)) for size in sizes]
    other = record(carried(1.5), "other")
    lines = [judge(BASE, other, nudged[:k]).line for k in (1, 2, 3, 4)]  # type: ignore[union-attr]
    assert all(line.startswith("within rounding: ") for line in lines)
    assert [is_open(BASE, other, nudged[:k]) for k in range(5)] == [True, True, True, False, False]
    assert "too far for 1 nudged run to tell: --floor" in lines[0]
    assert "--floor" not in lines[2]
    far = record(carried(10), "far")
    assert [judge(BASE, far, nudged[:k]).kind for k in (1, 4)] == ["within rounding", "differs"]  # type: ignore[union-attr]
    assert is_open(BASE, far, nudged[:1])


def test_as_many_runs_are_called_different_by_chance_as_the_limits_say() -> None:
    """A limit for fewer runs is one that another run, as far in the same direction by chance, is beyond as rarely."""
    sizes = np.random.default_rng(1).normal(size=(200_000, 5))
    shares = []
    for k, limit in enumerate(_LIMITS, start=1):
        floor = np.sqrt((sizes[:, :k] ** 2).mean(axis=1))
        shares.append(float((np.abs(sizes[:, 4]) > limit * floor).mean()))
    assert shares == pytest.approx([0.001, 0.001, 0.001, 0.0075], rel=0.2)
