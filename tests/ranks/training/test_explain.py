"""Profiles of real runs with a planted fault: what `titanlite explain` says is what was planted."""

import os
import time
from typing import TYPE_CHECKING

import pytest

import titanlite.commands.explain
from titanlite.data.batches import TrainBatches
from titanlite.explain.causes import first_cause
from titanlite.explain.profiled import ProfiledSteps, read_profiled
from titanlite.observe.step_profile import DATA_WAIT
from titanlite.training import loop

if TYPE_CHECKING:
    from tests.support.launched import Desk

PROFILE = ("--profiling.enable=true", "--profiling.start_step=2", "--profiling.steps=3", "--training.steps=4")
SECONDS = 0.4
"""Of each planted delay: several steps of the undisturbed run on a busy machine."""


def slow_loader() -> None:
    read = TrainBatches._read

    def read_late(batches: TrainBatches, position: int):
        time.sleep(2 * SECONDS)  # beside the step before, which a busy machine draws out
        return read(batches, position)

    TrainBatches._read = read_late  # type: ignore[method-assign]


def late_rank() -> None:
    if os.environ.get("RANK") == "1":
        step = loop.train_step

        def late_step(*args, **more):
            time.sleep(SECONDS)
            return step(*args, **more)

        loop.train_step = late_step


def profile_of(desk: "Desk", name: str, world: int, *flags: str, plant=lambda: None) -> ProfiledSteps:
    ended = desk.run(name, world, *PROFILE, "--checkpoint.enable=false", *flags, plant=plant)
    run = read_profiled(ended.folder)
    for profile in run.profiles:
        steps = sum(step.end_us - step.start_us for step in profile.steps)
        parts = sum(sum(d.parts.values()) for d in run.divisions if d.rank == profile.rank)
        assert steps == pytest.approx(profile.clock_us, rel=0.02)  # of a clock that knows nothing of the trace
        assert parts == pytest.approx(profile.clock_us, rel=0.02)
    return run


@pytest.mark.slow
def test_a_slow_data_loader_is_the_first_cause(desk: "Desk", capsys: pytest.CaptureFixture[str]) -> None:
    run = profile_of(desk, "slow loader", 2, plant=slow_loader)
    cause = first_cause(run)
    assert cause is not None
    assert cause.name == DATA_WAIT
    assert SECONDS < cause.us / 1e6 < 3 * SECONDS
    folder = desk.folder / "runs" / "slow loader"
    assert titanlite.commands.explain.run([str(folder)]) == 0
    text = capsys.readouterr().out
    assert "\nfirst cause: data wait, " in text
    assert "change: data.cache_dir: " in text
    assert (folder / "profile" / "timeline.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_a_rank_that_sleeps_is_the_first_cause(desk: "Desk") -> None:
    run = profile_of(desk, "late rank", 2, plant=late_rank)
    cause = first_cause(run)
    assert cause is not None
    assert cause.name == "rank 1 comes last"
    assert cause.us / 1e6 == pytest.approx(SECONDS, rel=0.25)
    assert "more of host than" in cause.because


@pytest.mark.slow
def test_collectives_are_of_the_axis_that_they_run_over(desk: "Desk") -> None:
    run = profile_of(desk, "tensor parallel", 2, "--parallelism.tensor_parallel_degree=2")
    assert {name for name in run.parts if "communication" in name} <= {"communication tp", "communication all ranks"}
    assert run.parts["communication tp"] > run.parts["communication all ranks"]
    memory, forecast = run.profiles[0].memory, run.profiles[0].forecast
    assert memory is not None
    for name in ("parameters", "optimizer", "gradients"):
        assert memory.categories[name] == pytest.approx(forecast[name], rel=0.02)


@pytest.mark.slow
def test_compilation_in_the_window_is_counted_and_the_first_cause(desk: "Desk") -> None:
    run = profile_of(desk, "compiling", 1, "--compile.enable=true", "--profiling.start_step=1", "--profiling.steps=2")
    cause = first_cause(run)
    assert cause is not None
    assert cause.name == "recompilation"
    assert run.graphs > 0
