"""The average of weights: against a loop in float64 on whole weights, in checkpoints, exported, validated, left out."""

import sys
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from tests.support.launched import Desk, Ended
from tests.support.needs import slow
from tests.support.ranks import run_ranks
from tests.support.short_run import assemble, batches_of, checked, whole
from titanlite.checkpoint import store
from titanlite.commands.export import run as export
from titanlite.errors import CheckpointError
from titanlite.optimizers import weight_average
from titanlite.optimizers.adamw import AdamW
from titanlite.training.build import Run
from titanlite.training.state import tensors_of
from titanlite.training.step import train_step

EPS = torch.finfo(torch.float32).eps
DECAY, LR = 0.3, 1e-2  # as long as (1 + t) / (10 + t) is at t = 3
TP, HSDP = "--parallelism.tensor_parallel_degree", "--parallelism.data_parallel_replicate_degree"
SMALL = ["--model.n_layers", "1", "--training.seq_len", "32", "--training.global_batch_size", "2"]
SMALL += ["--compile.enable=false", "--optimizer.ema_decay"]
MOE = ["--model.name", "qwen3_moe", "--training.mixed_precision_param", "float32", "--lr_scheduler.warmup_steps", "1"]
LAYOUTS: dict[str, tuple[int, list[str]]] = {
    "FSDP 2": (2, []),
    "TP 2": (2, [TP, "2"]),
    "HSDP 2 × 2": (4, [HSDP, "2", "--training.global_batch_size", "4"]),
    "experts over 2": (2, [*MOE, "--parallelism.expert_parallel_degree", "2"]),
    "float8": (2, ["--float8.recipe", "tensorwise"]),
}


def averages(run: Run) -> dict[str, Tensor]:
    assert run.average is not None
    return {name: whole(t) for name, t in run.average.state().items()}


@pytest.mark.parametrize("layout", ["FSDP 2", *slow("TP 2", "HSDP 2 × 2", "experts over 2", "float8")])
def test_it_is_that_of_a_loop_on_whole_weights(layout: str, tmp_path: Path) -> None:
    """And comes back from a checkpoint under tensor parallelism to the bit.

    Each step rounds a difference, its share of it and a sum: by half an eps each, and the share itself likewise.
    """
    world, flags = LAYOUTS[layout]
    asked = checked(tmp_path, world, [*SMALL, str(DECAY), *flags])
    under_tp = checked(tmp_path, world, [*SMALL, str(DECAY), TP, "2"])

    def body() -> None:
        run = assemble(asked)
        named = run.optimizer.parameters
        truth = {name: whole(p).double() for name, p in named.items()}
        bound, t = {name: torch.zeros_like(w) for name, w in truth.items()}, 0
        with closing(batches_of(run)) as batches:
            for step in range(1, 7):
                before = averages(run)
                train_step(run, batches.next(), LR, False, lacks_data=step == 4)
                after = averages(run)
                if step == 4:  # left out
                    assert all(after[name].equal(was) for name, was in before.items())
                    continue
                t += 1
                d = min(DECAY, (1 + t) / (10 + t))
                for name, p in named.items():
                    w, w_before = whole(p).double(), truth[name].clone()
                    truth[name] += (1 - d) * (w - truth[name])
                    bound[name] = d * bound[name] + 4 * EPS / 2 * (w.abs() + w_before.abs())
        assert int(after["ema/updates"]) == t == 5
        for name, want in truth.items():
            got = after[f"ema/{name}"]
            assert got.dtype == torch.float32
            assert ((got - want).abs() <= bound[name]).all(), name
        far = [(truth[name] - whole(p)).abs().max() for name, p in named.items()]
        assert min(far) > 1e-4
        if layout == "FSDP 2":
            other, checkpoint = assemble(under_tp), tmp_path / "checkpoint"
            checkpoint.mkdir(exist_ok=True)
            store.write(checkpoint, tensors_of(run))
            store.read(checkpoint, tensors_of(other))
            assert all(got.equal(after[name]) for name, got in averages(other).items())

    run_ranks(body, tmp_path, world)


def test_without_one_a_run_has_no_tensor_of_it(tmp_path: Path) -> None:
    asked = {decay: checked(tmp_path, 1, [*SMALL, decay]) for decay in ("0", "0.5")}

    def body() -> None:
        names = {}
        for decay, of in asked.items():
            run = assemble(of)
            with closing(batches_of(run)) as batches:
                train_step(run, batches.next(), LR, False)
            kept = [t for name, t in tensors_of(run).items() if name.startswith(("optimizer/", "ema/"))]
            of_average = weight_average.COST.state if decay != "0" else 0
            said = (AdamW.cost(of.config.optimizer).state + of_average) * run.n_elements
            assert said == sum(t.nbytes for t in kept if t.ndim)  # without counters of updates
            names[decay] = {*tensors_of(run)}
        assert {name.partition("/")[0] for name in names["0.5"] - names["0"]} == {"ema"}
        assert names["0"] < names["0.5"]

    run_ranks(body, tmp_path, 1)


FLAGS = (
    "--validation.enable=true",
    "--validation.freq=4",
    "--validation.steps=2",
    "--job.stop_after=8",
    "--optimizer.ema_decay=0.9",
)


@pytest.fixture(scope="module")
def both(desk: Desk) -> Ended:
    return desk.run("both", 2, *FLAGS, "--validation.weights=both")


def validations(run: Ended) -> list[dict[str, Any]]:
    return [row for row in run.rows if "validation_loss" in row or "validation_loss_ema" in row]


def test_what_is_validated_is_what_is_exported(desk: Desk, both: Ended) -> None:
    (_, last) = validations(both)
    for kind, flags in (("", []), ("_ema", ["--ema"])):
        out = desk.folder / f"exported{kind}"
        assert export([str(both.folder), "--dtype", "float32", "--out", str(out), *flags]) == 0
        # A step of so small a rate changes no weight; sums of float32 are ordered otherwise where ranks share a batch.
        still = "--optimizer.lr=1e-30", f"--checkpoint.initial_load_path={out}", "--validation.freq=1"
        alone = desk.run(f"from {out.name}", 1, FLAGS[0], FLAGS[2], *still, "--job.stop_after=1")
        assert validations(alone)[0]["validation_loss"] == pytest.approx(last[f"validation_loss{kind}"], rel=1e-6)
    assert abs(last["validation_loss"] - last["validation_loss_ema"]) > 1e-3
    assert {"validation_bits_per_byte", "validation_bits_per_byte_ema"} < last.keys()
    assert f"validation loss of the average {last['validation_loss_ema']:.4f} (" in both.output
    assert "validation loss of the average" in next(line for line in both.output.splitlines() if "lowest" in line)


@pytest.mark.slow
def test_validating_the_weights_alone_is_no_other_run(desk: Desk, both: Ended) -> None:
    require_validates_as(desk.run("model", 2, *FLAGS), both, "")


def require_validates_as(alone: Ended, both: Ended, kind: str) -> None:
    """The numbers of one kind of weights are those of a run that has both, and so is all that was trained."""
    keys = {f"validation_loss{kind}", f"validation_bits_per_byte{kind}"}
    ours = [{key: number for key, number in row.items() if key not in ("step", "tokens")} for row in validations(alone)]
    assert ours == [{key: row[key] for key in keys} for row in validations(both)]
    assert alone.content(8) == both.content(8)
    assert alone.trained() == both.trained()


def test_a_run_goes_on_with_it_begins_it_and_leaves_it(desk: Desk, both: Ended) -> None:
    def go_on(step: int, decay: float, *flags: str) -> Ended:
        world = 2 if flags else 1
        return desk.run("changed", world, f"--job.stop_after={step}", f"--optimizer.ema_decay={decay}", *flags)

    def start(run: Ended) -> str:
        return run.receipt["weight_average"]["applied"]["start"]

    of_average = *FLAGS[:3], "--validation.weights=ema"
    go_on(4, 0.9, *of_average)
    ended = go_on(8, 0.9, *of_average)
    assert start(ended) == "goes on after 4 updates"
    require_validates_as(ended, both, "_ema")
    with_it = {name for name in ended.content(8) if name.startswith("ema/")}
    assert len(with_it) > 5

    ended = go_on(9, 0.0)
    assert "the average of weights in the checkpoint of step 8 is left out: optimizer.ema_decay = 0" in ended.output
    assert "changed since the last start: optimizer.ema_decay: 0.9 → 0.0" in ended.output
    assert "weight_average" not in ended.receipt
    assert not any(name.startswith("ema/") for name in ended.content(9))
    with (
        patch.dict(sys.modules, {"titanlite.checkpoint.hugging_face": None}),  # loads torch: some seconds
        pytest.raises(CheckpointError, match=r"(?s)--ema = step-00000009.*has none, since.*leave --ema out, or train"),
    ):
        export([str(ended.folder), "--ema"])

    ended = go_on(10, 0.9)
    assert "the average of weights (optimizer.ema_decay = 0.9) begins at those of step 9" in ended.output
    assert start(ended) == "begins at the weights of step 9"
    averages = {name.partition(" ")[0] for name in ended.content(10) if name.startswith("ema/")}
    assert averages == {name.partition(" ")[0] for name in with_it}
