"""Validation: the same number under any layout, when it is due, and never a hang."""

import array
import math
from typing import Any

import pytest
from torch import Tensor

from tests.support.launched import Desk, Ended
from tests.support.needs import slow
from tests.support.questions import write_questions
from titanlite.observe.watchdog import Watchdog
from titanlite.preflight.trained_model import asked_step
from titanlite.training import loop
from titanlite.training.build import Run

# 37 samples: one rank has a batch that others fill with padding.
LAYOUTS = {
    "1": (1, ()),
    "FSDP 2": (2, ()),
    "FSDP 3": (3, ("--training.global_batch_size=3",)),
    "TP 2": (2, ("--parallelism.tensor_parallel_degree=2",)),
    "local batch 2": (2, ("--training.local_batch_size=2",)),
}
FLAGS = ("--training.local_batch_size=1", "--validation.enable=true", "--validation.freq=4", "--job.stop_after=4")


@pytest.fixture(scope="module")
def single(desk: Desk) -> Ended:
    return desk.run("single", 1, *FLAGS)


def validations(run: Ended) -> dict[int, float]:
    return {row["step"]: row["validation_loss"] for row in run.rows if "validation_loss" in row}


@pytest.mark.parametrize("layout", ["FSDP 3", *slow("TP 2", "FSDP 2", "local batch 2")])
def test_every_layout_sees_the_same_loss(desk: Desk, single: Ended, layout: str) -> None:
    world, flags = LAYOUTS[layout]
    reference = single
    if layout == "FSDP 3":  # which cannot divide the global batch of the others
        reference = desk.run("single 3", 1, *FLAGS, *flags)
    run = desk.run(layout, world, *FLAGS, *flags)
    # Four steps and one mean in float32, whose sums are ordered otherwise.
    assert validations(run) == {4: pytest.approx(validations(reference)[4], rel=1e-6)}
    assert validations(run)[4] == pytest.approx(5.0, abs=0.7)  # below log 256 = 5.55, as four steps make it


def test_each_held_out_source_has_its_loss_and_bits_per_byte(desk: Desk, single: Ended) -> None:
    """Of the same text as a further source, the same; token files, whose text is not known, have a loss alone."""
    text, ids = desk.folder / "more.txt", desk.folder / "more.bin"
    text.write_text("A text of its own, which nobody trains on.\n" * 40)
    ids.write_bytes(array.array("H", [*text.read_bytes()]).tobytes())
    again = desk.folder / "held_out.txt"
    sources = f"--validation.sources=again={again},more={text},ids={ids}"
    run = desk.run("sources", 1, *FLAGS, sources)
    (row,) = (row for row in run.rows if "validation_loss" in row)
    assert row["validation_loss"] == validations(single)[4] == row["validation_loss.again"]
    assert row["validation_bits_per_byte.again"] == row["validation_bits_per_byte"]
    n_bytes = len(text.read_bytes())  # and one separator
    assert row["validation_bits_per_byte.more"] == pytest.approx(
        row["validation_loss.more"] / math.log(2) * (n_bytes + 1) / n_bytes
    )
    assert row["validation_loss.more"] != row["validation_loss"]
    assert "validation_loss.ids" in row
    assert "validation_bits_per_byte.ids" not in row
    assert "validation.sources.ids: the bytes of its text are not known, nor bits per byte" in run.output
    shown = f"validation loss {row['validation_loss']:.4f} ({row['validation_bits_per_byte']:.4f} bits/byte)  again "
    assert shown in run.output
    assert run.receipt["validation.sources.more"]["applied"]["text_bytes"] == n_bytes


def test_it_is_due_every_freq_steps_and_after_the_last(desk: Desk) -> None:
    def plant() -> None:
        take, validate = loop.train_step, loop.validation_loss

        def in_training(run: Run, *args: Any, **more: Any) -> dict[str, Tensor]:
            assert run.model.training
            return take(run, *args, **more)

        def in_evaluation(run: Run, *args: Any) -> Tensor:
            assert not run.model.training
            return validate(run, *args)

        loop.train_step, loop.validation_loss = in_training, in_evaluation

    run = desk.run("due", 1, *FLAGS, "--training.steps=10", "--job.stop_after=0", plant=plant)
    assert list(validations(run)) == [4, 8, 10]
    assert [row["step"] for row in run.rows] == [1, 2, 3, 4, 4, 5, 6, 7, 8, 8, 9, 10, 10]


@pytest.mark.parametrize("world", slow(2, 1))
def test_a_checkpoint_right_after_it_holds_the_masters(desk: Desk, world: int) -> None:
    """FSDP leaves what validation gathered, in bfloat16, where the model's float32 parameters were."""
    given = (*FLAGS, "--validation.steps=1", "--training.steps=6", "--training.mixed_precision_param=bfloat16")
    whole = desk.run(f"whole {world}", world, *given, "--job.stop_after=0")
    desk.run(f"resumed {world}", world, *given)
    resumed = desk.run(f"resumed {world}", world, *given, "--job.stop_after=0")
    assert resumed.content(6) == whole.content(6)
    assert resumed.trained() == whole.trained()


def test_the_watchdog_is_told_of_each_batch_of_validation_and_evaluation(desk: Desk) -> None:
    def plant() -> None:
        progress = Watchdog.progress
        Watchdog.progress = lambda self, *now: (print("told", *now), progress(self, *now))[1]  # type: ignore[method-assign]

    tasks = f"--evaluation.tasks={write_questions(desk.folder / 'lines.jsonl', 12)}"
    run = desk.run("watched", 1, *FLAGS, "--training.seq_len=256", tasks, "--evaluation.freq=4", plant=plant)
    batches = {"validation": 37 // 4, "evaluation": run.receipt["evaluation.tasks"]["applied"]["batches"]}
    assert {phase: run.output.count(f"told 4 {phase}\n") - 1 for phase in batches} == batches  # each begins with one


def test_losses_on_other_samples_are_not_ranked_together(desk: Desk) -> None:
    """The best on what was validated before stays until there is a loss on what is validated now."""
    losses = {4: 1.0, 8: 3.0, 12: 2.0, 16: 4.0}

    def plant() -> None:
        def measured(self: loop.Loop, step: int, of: str = "") -> dict[str, float]:
            return {"validation_loss": losses[step]}

        loop.Loop._losses = measured  # type: ignore[method-assign]

    def run(last: int, *more: str) -> Ended:
        every = ("--checkpoint.interval=2", "--checkpoint.keep_latest_k=1", "--checkpoint.keep_best=validation_loss")
        return desk.run("other", 1, *FLAGS, *every, *more, f"--job.stop_after={last}", plant=plant)

    text, warned = desk.folder / "train.txt", "validation_loss: measured on other samples than up to step"
    assert run(6).checkpoints() == [4, 6]
    other = run(12, f"--validation.source={text}")
    assert other.output.count(f"{warned} 6. The lowest is") == 1
    assert other.checkpoints() == [6, 12]
    assert "validation loss 2.0000 at step 12" in other.output
    same = run(14, f"--validation.source={text}")
    assert warned not in same.output
    assert same.checkpoints() == [12, 14]
    assert "validation loss 2.0000 at step 12" in same.output
    fewer = run(16, f"--validation.source={text}", "--validation.steps=1")
    assert f"{warned} 14" in fewer.output
    assert asked_step("titanlite export", fewer.folder / "checkpoints", "best") == 16


@pytest.mark.parametrize("mode", ["async", *slow("disabled")])
def test_the_checkpoint_with_the_lowest_loss_is_kept(desk: Desk, mode: str) -> None:
    """Of equal ones the earlier, never one of NaN; a start that goes on knows it, and keeps what it cannot read."""
    losses = {2: 3.0, 4: 2.0, 6: 2.0, 8: math.nan, 10: 2.5, 12: 1.0}

    def plant() -> None:
        def measured(self: loop.Loop, step: int, of: str = "") -> dict[str, float]:
            return {"validation_loss": losses[step]}

        loop.Loop._losses = measured  # type: ignore[method-assign]

    name, every = f"best {mode}", ("--checkpoint.interval=2", "--validation.freq=2", "--checkpoint.keep_latest_k=1")
    flags = *FLAGS, *every, "--checkpoint.keep_best=validation_loss", f"--checkpoint.async_mode={mode}"
    first = desk.run(name, 2, *flags, "--job.stop_after=8", plant=plant)
    assert first.checkpoints() == [4, 8]
    said = [
        line.split("; ")[1] for line in (first.folder / "logs/rank0.log").read_text().splitlines() if "saved" in line
    ]
    assert said[:2] == [f"its validation_loss {loss:.4f} is the lowest" for loss in (3, 2)]
    assert said[2:] == ["the best is that of step 4, whose validation_loss 2.0000 is the lowest"] * 2
    assert desk.run(name, 2, *flags, "--job.stop_after=10", plant=plant).checkpoints() == [4, 8, 10]
    assert asked_step("titanlite export", first.folder / "checkpoints", "best") == 4
    (first.folder / "checkpoints/step-00000004/state.json").write_text("{}")
    last = desk.run(name, 2, *flags, "--job.stop_after=12", plant=plant)
    assert last.checkpoints() == [4, 10, 12]  # nobody knows whether the fourth is better
    assert last.output.count("step-00000004 is kept, as it may be the best") == 1
