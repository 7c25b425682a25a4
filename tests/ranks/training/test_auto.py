"""`recipe = "auto"` in whole runs: what it chooses, writes and reports, and how runs end that find no room."""

import os
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import titanlite.training.assemble as assemble
import titanlite.training.build as build
import titanlite.training.loop as loop
import titanlite.training.receipt as training_receipt
import titanlite.training.train as train
from tests.support import short_run
from tests.support.launched import Desk
from tests.support.measured import MEASURED_CONFIGS
from tests.support.needs import slow
from tests.support.ranks import run_ranks
from titanlite import recipes
from titanlite.errors import OutOfMemoryError
from titanlite.forecast.activation_cost import block_costs
from titanlite.forecast.choose_save_list import RecomputeTimes, choose
from titanlite.forecast.memory import GIB, MemoryModel, usable
from titanlite.forecast.search import LEAST
from titanlite.preflight.checked_run import CheckedRun, checked_run
from titanlite.training import out_of_memory
from titanlite.training.out_of_memory import Measured, explanation, foreseen, measure

AUTO = "--activation_checkpoint.recipe=auto"
TWO_STEPS = ("--job.stop_after=2",)
FULL = "CUDA out of memory. Tried to allocate 3.91 GiB. GPU 0 has a total capacity of 139.80 GiB of which …"


def budget(gib: float) -> str:
    return f"--activation_checkpoint.budget_gib={gib}"


def test_the_choice_is_written_reported_and_can_be_named(desk: Desk) -> None:
    """A budget for all: blocks are whole, and a run with the written list does the same."""
    run = desk.run("auto", 2, AUTO, budget(8), *TWO_STEPS)
    written = run.folder / "activation_checkpoint.toml"
    chosen = recipes.load("activation_checkpoint", str(written))
    assert [rule.op for rule in chosen.rules] == ["block"]
    assert "for 8 GiB" in chosen.help
    entry = run.receipt["activation_checkpoint"]
    assert entry["requested"] == "auto"
    assert entry["applied"].pop("prepared_s") > 0
    assert entry["applied"].pop("predicted_mib_per_layer")["save block"] > 0
    assert entry["applied"] == {"keeps": "block", "recomputes_ms": 0.0, "blocks": 0, "matches": {"save block": 2}}
    memory = run.receipt["memory"]
    assert memory["requested"] == 8
    assert memory["skipped"] == []
    assert 0.4 < memory["applied"]["predicted_gib"] < 0.5  # nothing but slack, for a model so small
    assert memory["applied"]["reserved_gib"] == pytest.approx(run.steps[0]["memory_gib"], abs=0.05)
    named = desk.run("named", 2, f"--activation_checkpoint.recipe={written}", *TWO_STEPS)
    assert named.trained() == run.trained()
    assert not (named.folder / "activation_checkpoint.toml").exists()


def test_ranks_agree_though_their_times_do_not(desk: Desk) -> None:
    """Each rank would choose another list, and prints the one that it was given; collectives of both match."""

    def plant() -> None:
        choose, time_block = assemble.choose, assemble.time_block

        def time_differently(block, run, context, device):
            times = time_block(block, run, context, device)
            rank = torch.distributed.get_rank()
            slow = {part: 1.0 if "w13" in part.layer and rank else 1e-9 for part in times.activations}
            return RecomputeTimes(slow, 1e-9)

        assemble.time_block = time_differently
        assemble.choose = lambda memory, times, _: choose(memory, times, least(memory))

        apply = assemble.apply_activation_checkpoint

        def say(model, save_list, *rest):
            print(f"given {save_list.rules}")
            return apply(model, save_list, *rest)

        assemble.apply_activation_checkpoint = say

    run = desk.run("agree", 2, AUTO, budget(8), "--parallelism.tensor_parallel_degree=2", *TWO_STEPS, plant=plant)
    first, second = (part.partition("given ")[2].splitlines()[0] for part in run.output.split("--- rank ")[1:])
    assert first == second
    assert first != "()"


def least(memory) -> float:
    """A little more than what the run holds if it keeps nothing, so that only a part can be kept."""
    some = memory.peak(block_costs(memory.run, LEAST)).total
    whole = memory.peak(block_costs(memory.run, recipes.load("activation_checkpoint", "none"))).total
    return (some + (whole - some) * 0.5 + memory.later_window) / usable(1)


def reserved_on_a_gpu(gib: float) -> None:
    """Measure what a GPU's allocator would have reserved, and compare it as on a GPU."""
    training_receipt.is_allocators = lambda device: True
    training_receipt.memory_gib = lambda device: (gib, gib - 0.25)


def test_more_than_the_budget_of_a_gpu_ends_the_run_before_step_2(desk: Desk) -> None:
    plant = partial(reserved_on_a_gpu, 9.5)
    run = desk.run("over", 2, AUTO, budget(8), plant=plant, ends=2)
    assert "activation_checkpoint.budget_gib = 8\n" in run.output
    assert "want: a peak of at most that; 9.5 GiB are reserved; predicted: 0." in run.output
    assert "fix:  budget_gib = 6.50; job.strict = false trains on" in run.output
    assert len(run.steps) == 1
    assert run.status["error"]["type"] == "StrictError"
    (skipped,) = run.receipt["memory"]["skipped"]
    assert skipped["what"] == "peak"
    lenient = desk.run("lenient", 1, AUTO, budget(8), "--job.strict=false", *TWO_STEPS, plant=plant)
    assert len(lenient.steps) == 2
    warning = lenient.output.partition("warning: the run exceeds its memory budget")[2]
    assert "fix:  budget_gib = 6.50\n" in warning
    assert lenient.receipt["memory"]["skipped"]
    named = desk.run("named", 1, "--activation_checkpoint.recipe=attention", budget(8), plant=plant, ends=2)
    assert "fix:  a save-list that keeps less; job.strict = false trains on" in named.output


def test_no_budget_is_proposed_that_no_list_keeps_to(desk: Desk) -> None:
    """The run is predicted to need 0.4 GiB at least, for slack."""
    run = desk.run("far over", 1, AUTO, budget(8), plant=partial(reserved_on_a_gpu, 15.9), ends=2)
    assert "fix:  more ranks or a smaller batch: no save-list keeps so much less; job.strict" in run.output


def test_the_process_of_a_cpu_run_is_not_held_to_the_budget(desk: Desk) -> None:
    def plant() -> None:
        training_receipt.memory_gib = lambda device: (9.5, 9.25)

    run = desk.run("cpu", 1, AUTO, budget(8), *TWO_STEPS, plant=plant)
    assert len(run.steps) == 2
    assert "exceeds its memory budget" not in run.output
    memory = run.receipt["memory"]
    assert (memory["applied"]["reserved_gib"], memory["applied"]["measured"]) == (9.5, "the process")
    assert memory["skipped"] == []


def full_in_a_step() -> None:
    def fail(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError(FULL)

    loop.train_step = fail


def full_in_building() -> None:
    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError(FULL)

    build.initialise = fail


BALANCED, BY_BUDGET = ("--activation_checkpoint.recipe=balanced",), (AUTO, budget(8))


@pytest.mark.parametrize(
    ("flags", "plant"),
    [
        (BY_BUDGET, full_in_building),
        *slow((BALANCED, full_in_a_step)),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_out_of_memory_is_explained(plant, flags: tuple[str, ...], desk: Desk) -> None:
    run = desk.run(f"{plant.__name__} {flags[0][-4:]}", 2, *flags, plant=plant, ends=2)
    said = run.output.partition("--- rank 1")[0]
    assert "rank 0: CUDA out of memory. Tried to allocate 3.91 GiB\n" in said
    assert "which would fit: the prediction is too low, or other processes use memory of this device" in said
    assert "activations" in said
    assert "Traceback" not in run.output
    assert run.status["error"]["type"] == "OutOfMemoryError"
    assert run.steps == []


def of_8b(*flags: str) -> tuple[CheckedRun, MemoryModel]:
    """The shipped run of 8B on four ranks."""
    run = checked_run(["--config", str(MEASURED_CONFIGS / "llama3_8b.toml"), *flags], world_size=4)
    return run, MemoryModel(run.config, run.dims, run.float8, run.optimizer, 4)


def explained(flags: tuple[str, ...], room_gib: float, name: str = "none") -> str:
    chosen = recipes.load("activation_checkpoint", name)
    return explanation(of_8b(*flags)[1], chosen, Measured(78.0, 75.0, 79.0, 77.0, room_gib))


def test_the_message_has_what_was_measured_predicted_and_would_fit() -> None:
    said = explained(("--activation_checkpoint.recipe", "none"), 100).splitlines()
    assert said[0] == (
        "    saw:  78.0 GiB are reserved (peak 79.0), 75.0 of them by tensors (peak 77.0); 100.0 are available"
    )
    assert said[1] == "    want: 101.2 GiB, as predicted; of these"
    assert said[2].split() == ["73.1", "activations"]
    assert said[-4] == "    fix:  one of these"
    auto = "--activation_checkpoint.recipe auto --activation_checkpoint.budget_gib 100.0"
    assert said[-3].strip() == f"{auto}  frees 1.2 GiB, peak 100.0 GiB"
    assert [line.split()[0] for line in said[-2:]] == [
        "--parallelism.tensor_parallel_degree",
        "--training.local_batch_size",
    ]


def said_before(room_gib: float, *flags: str) -> str | None:
    run, model = of_8b(*flags)
    return foreseen(model, run.save_list, Measured(0.0, 0.0, 0.0, 0.0, room_gib))


def test_what_is_predicted_not_to_fit_is_said_before_the_first_step() -> None:
    none = ("--activation_checkpoint.recipe", "none")  # 101.2 GiB
    said = said_before(101, *none)
    assert said is not None
    assert said.startswith("this run is predicted to run out of memory\n    saw:  0.0 GiB are reserved")
    assert "want: 101.2 GiB, as predicted" in said
    assert "--activation_checkpoint.recipe auto --activation_checkpoint.budget_gib 101.0" in said
    assert said_before(102, *none) is None


def test_a_second_window_of_rows_of_experts_needs_memory_too() -> None:
    """A GiB beyond the peak is too little for it. Where there is room for two windows, more may be the cause."""
    flags = ("--model.name=qwen3_moe", "--model.flavor=30B-A3B", "--parallelism.expert_parallel_degree=4")
    model, full = of_8b(*flags)[1], recipes.load("activation_checkpoint", "full")
    peak, window, most = (n / 2**30 for n in (model.peak_under(full).total, model.later_window, model.all_windows))
    assert 1 < window < most
    said, room = foreseen(model, full, Measured(0.0, 0.0, 0.0, 0.0, peak + 1)), peak + window + 0.1
    assert said is not None
    assert f"want: {peak + window:.1f} GiB, as predicted; of these" in said
    assert f"{window:6.1f}  a second window of experts' rows" in said
    assert foreseen(model, full, Measured(0.0, 0.0, 0.0, 0.0, room)) is None
    said = explanation(model, full, Measured(0.0, 0.0, 0.0, 0.0, room))
    assert f"or a rank has most experts' rows, for which {most:.1f} GiB may be needed; of these" in said


def test_a_budget_beyond_the_device_is_said_before_the_first_step() -> None:
    auto = ("--activation_checkpoint.recipe", "auto", "--activation_checkpoint.budget_gib", "90")
    said = said_before(79.4, *auto)
    assert said is not None
    assert "activation_checkpoint.budget_gib = 90\n      want: at most 79.4, which this device has free\n" in said
    assert said.endswith("fix:  --activation_checkpoint.budget_gib 79")
    assert said_before(91, *auto) is None


@pytest.mark.parametrize(
    ("text", "is_of_this_device"),
    [
        ("CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation' in …", True),
        ("NCCL error: rank 3 said: CUDA error: out of memory", False),
    ],
)
def test_memory_that_is_not_of_the_allocator_is_explained_too(
    text: str, is_of_this_device: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    run, model = of_8b()
    assert run.save_list is not None
    with (
        pytest.raises(OutOfMemoryError if is_of_this_device else RuntimeError) as caught,
        out_of_memory.explained(lambda: model, run.save_list, torch.device("cpu")),
    ):
        raise RuntimeError(text)
    if is_of_this_device:
        assert str(caught.value).startswith(f"rank 0: {text.partition(chr(10))[0]}\n    saw: ")
    else:
        assert str(caught.value) == text


def test_a_prediction_that_would_fit_is_not_trusted() -> None:
    """What is proposed is held against less than what has just failed."""
    said = explained(("--activation_checkpoint.recipe", "matmuls"), 139, "matmuls")
    assert "which would fit" in said
    peaks = [float(line.split("peak ")[1].split()[0]) for line in said.splitlines() if "frees" in line]
    assert len(peaks) == 3
    assert max(peaks) <= 0.95 * 84.7


def test_a_list_without_a_price_has_no_prediction(tmp_path: Path) -> None:
    mine = tmp_path / "mine.toml"
    mine.write_text(
        'help = "mine"\ndefault = "save"\n[[rules]]\nop = "matmul"\nmodule = ["w13"]\naction = "recompute"\n'
    )
    said = explained(("--activation_checkpoint.recipe", str(mine)), 100, str(mine))
    assert "there is no prediction" in said
    assert "fix:  a save-list that names what it keeps" in said


def test_a_device_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = measure(torch.device("cpu"))
    assert 0 < seen.allocated <= seen.peak_reserved < seen.could_be_reserved
    monkeypatch.setattr(out_of_memory, "_available", lambda: 8 * GIB)
    for ranks in (1, 4):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
        seen = measure(torch.device("cpu"))
        assert seen.could_be_reserved == pytest.approx(seen.allocated + 8 / ranks)


@pytest.mark.parametrize(
    ("table", "is_known"), [("MemTotal: 9 kB\nMemAvailable:     5 kB\n", True), ("MemTotal: 9 kB\n", False)]
)
def test_what_is_available_is_what_linux_says_or_all_that_there_is(
    table: str, is_known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Path, "read_text", lambda _: table)
    everything = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert out_of_memory._available() == (5 * 1024 if is_known else everything)


def test_a_cpu_run_that_is_predicted_not_to_fit_says_so_before_its_first_step(desk: Desk) -> None:
    def plant() -> None:
        train.measure = lambda device: Measured(0.0, 0.0, 0.0, 0.0, 0.1)

    run = desk.run("large", 1, "--job.stop_after=1", plant=plant)
    before, warned, after = run.output.partition("warning: this run is predicted to run out of memory\n")
    assert warned
    assert "step  1" not in before
    assert "0.1 are available" in after


def test_auto_keeps_experts_that_ranks_share_out_within_a_budget(tmp_path: Path, monkeypatch) -> None:
    """The exchange is timed among the ranks; halfway between nothing and all something is kept, and a step runs."""
    experts = ["--model.name=qwen3_moe", "--parallelism.expert_parallel_degree=2", "--training.global_batch_size=2"]
    asked = short_run.checked(tmp_path, 2, [*experts, AUTO, budget(8)])
    monkeypatch.setattr(assemble, "choose", lambda memory, times, _: choose(memory, times, least(memory)))

    def body() -> None:
        run = short_run.assemble(asked)
        assert run.chosen is not None
        assert {rule.op for rule in run.save_list.rules} & {"dispatch", "experts", "matmul", "attention", "block"}
        assert torch.isfinite(short_run.take_steps(run, 1)).all()

    run_ranks(body, tmp_path, 2)
