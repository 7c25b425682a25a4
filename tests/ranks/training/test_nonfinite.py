"""A loss or gradient that is not finite, on one rank of two, never reaches the weights."""

import os
from collections.abc import Callable, Container
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.support.launched import Desk, Ended
from tests.support.needs import slow
from titanlite.training import loop
from titanlite.training.build import Run
from titanlite.training.report import MAX_SKIPPED_IN_A_ROW

SKIP = "--training.on_nonfinite=skip"


@pytest.fixture(scope="module")
def undisturbed(desk: Desk) -> Ended:
    return desk.run("undisturbed", 2, "--job.stop_after=6")


def faulty(
    kind: str, steps: Container[int], seen: Callable[[Run, int, str], object] = lambda *_: None
) -> Callable[[], None]:
    """Plant a fault on rank 1 in some steps.

    Args:
        kind: "loss" adds infinity to the loss, which leaves gradients as they are; "gradient" leaves the loss and makes
            one gradient NaN.
        steps: those in which it happens.
        seen: called on every rank with the run, the step, and "before" or "after" it.
    """

    def plant() -> None:
        take, now = loop.train_step, [0]

        def counted(run: Run, *args: object, **more: object) -> dict[str, Tensor]:
            now[0] += 1
            if now[0] == 1 and os.environ["RANK"] == "1":
                spoil(run)
            seen(run, now[0], "before")
            result = take(run, *args, **more)
            seen(run, now[0], "after")
            return result

        def spoil(run: Run) -> None:
            loss = run.loss
            run.loss = lambda *args, **more: loss(*args, **more) + (float("inf") if hit("loss") else 0.0)
            norm = run.model.layers[1].ffn_norm
            forward = norm.add
            norm.add = lambda x, residual: tuple(nan_in_backward(t) for t in forward(x, residual))

        def nan_in_backward(t: Tensor) -> Tensor:
            if t.requires_grad and hit("gradient"):
                t.register_hook(lambda g: g * float("nan"))
            return t

        def hit(what: str) -> bool:
            return kind == what and now[0] in steps

        loop.train_step = counted

    return plant


@pytest.mark.parametrize("kind", ["gradient", *slow("loss")])
def test_stop_ends_all_ranks_and_publishes_nothing(desk: Desk, undisturbed: Ended, kind: str) -> None:
    flags = ["--checkpoint.interval=2"]
    run = desk.run(f"stop {kind}", 2, *flags, plant=faulty(kind, range(4, 5)), ends=2)
    assert run.trained() == undisturbed.trained()[:3]
    assert run.checkpoints() == [2]
    assert run.status["state"] == "failed"
    assert run.status["step"] == 3
    assert run.status["error"]["type"] == "StepError"
    for said in run.output.split("--- rank ")[1:]:
        # 4 samples a step: step 4 has the thirteenth to the sixteenth.
        assert "step 4: loss" in said
        assert "on samples 12 to 15 of the data order" in said
        assert ("the loss is not" if kind == "loss" else "a gradient is not") in said
        assert 'training.on_nonfinite = "skip" skips up to 9' in said
        assert "Traceback" not in said
    # Nothing was published since, so the same command goes on from there, this time without the fault.
    again = desk.run(f"stop {kind}", 2, *flags, "--job.stop_after=6")
    assert again.trained() == undisturbed.trained()
    assert again.content(6) == undisturbed.content(6)


def test_skip_leaves_weights_and_moments_alone_and_goes_on(desk: Desk, tmp_path: Path) -> None:
    def snapshot(run: Run, step: int, when: str) -> None:
        if step in (3, 4):
            local = [*run.optimizer.locals.values(), *run.optimizer.state().values()]
            tensors = [getattr(t, "_local_tensor", t).clone() for t in local]
            torch.save(tensors, tmp_path / f"{os.environ['RANK']} {step} {when}.pt")

    run = desk.run("skip", 2, SKIP, "--job.stop_after=6", plant=faulty("gradient", range(4, 5), snapshot))

    def changed(step: int) -> list[bool]:
        before, after = (
            [t for rank in (0, 1) for t in torch.load(tmp_path / f"{rank} {step} {when}.pt")]
            for when in ("before", "after")
        )
        return [not torch.equal(b, a) for b, a in zip(before, after, strict=True)]

    assert changed(3).count(False) == 2  # the moments of rank 1's half of the embedding: bytes that are no ASCII
    assert not any(changed(4))
    assert [row["step"] for row in run.steps] == [1, 2, 3, 4, 5, 6]
    assert [row["grad_norm"] is None for row in run.steps] == [False, False, False, True, False, False]
    assert "warning: step 4: loss" in run.output
    assert "this update was skipped" in run.output
    assert run.status["state"] == "stopped"


def test_skip_ends_after_ten_in_a_row(desk: Desk) -> None:
    """And not after nine, and as many after a step that is fine."""
    first, last = 3 + MAX_SKIPPED_IN_A_ROW, 2 * MAX_SKIPPED_IN_A_ROW + 2
    bad = {*range(3, first - 1), *range(first, 40)}
    run = desk.run("skip ten", 2, SKIP, "--training.steps=40", plant=faulty("loss", bad), ends=2)
    assert f"step {last}: loss" in run.output
    assert "of the data order, the 10th such step in a row\n" in run.output
    assert 'training.on_nonfinite = "skip"' not in run.output  # it is so
    assert run.status["error"]["type"] == "StepError"
    assert [row["step"] for row in run.steps] == list(range(1, last))
    assert run.checkpoints() == []


@pytest.mark.slow
def test_ten_in_a_row_are_counted_across_a_resume(desk: Desk) -> None:
    half = desk.run("skip resumed", 2, SKIP, "--job.stop_after=8", plant=faulty("loss", range(3, 20)))
    assert half.checkpoints() == [8]
    run = desk.run("skip resumed", 2, SKIP, plant=faulty("loss", range(1, 20)), ends=2)
    assert f"step {2 + MAX_SKIPPED_IN_A_ROW}: loss" in run.output
    assert [row["step"] for row in run.steps] == list(range(1, 2 + MAX_SKIPPED_IN_A_ROW))
