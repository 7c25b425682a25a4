"""What Weights & Biases and TensorBoard show of a real run is the recorded one."""

import json
import shutil

import pytest

from tests.support.launched import Desk
from tests.support.wandb_server import Server
from titanlite.comparison.wandb_runs import rows_of_lines

SHOWN = ("--metrics.wandb=offline", "--metrics.tensorboard=true", "--checkpoint.interval=2")
HELD_OUT = ("--validation.enable=true", "--validation.freq=2", "--validation.steps=1")


@pytest.mark.slow
def test_a_run_that_goes_on_twice_under_other_layouts_is_one_with_each_step_once(desk: Desk) -> None:
    flags = (*SHOWN, *HELD_OUT)
    first = desk.run("shown", 2, *flags, "--job.stop_after=3")
    shutil.rmtree(first.folder / "checkpoints/step-00000003")  # as after a crash: step 3 is trained again
    desk.run("shown", 1, *flags, "--job.stop_after=5")
    (before,) = (first.folder / "wandb").glob("offline-run-*")
    run = desk.run("shown", 2, *flags, "--job.stop_after=8", "--parallelism.tensor_parallel_degree=2")
    assert "wandb: " not in run.output
    assert "tensorboard: cannot" not in run.output
    told = f"tensorboard  in {run.folder / 'tensorboard'}"
    assert run.output.count(told) == 1
    assert run.receipt["metrics.tensorboard"]["applied"] == {"folder": str(run.folder / "tensorboard")}
    assert run.status["state"] == "stopped"
    (offline,) = (run.folder / "wandb").glob("offline-run-*")
    run_id = offline.name.rpartition("-")[2]
    assert run_id == before.name.rpartition("-")[2]
    with Server() as server:
        server.sync(desk.folder, offline)
        server.shutdown()
    rows, config = rows_of_lines(server.lines(run_id)), json.loads(server.said[run_id]["config"])
    assert rows == run.rows
    assert [row["step"] for row in rows if "loss" in row] == list(range(1, 9))
    assert config["parallelism"]["value"]["tensor_parallel_degree"] == 2
    assert {entry["feature"] for entry in json.loads(server.files["receipt.json"])} == set(run.receipt)
    assert (server.said[run_id]["displayName"], server.exits) == ("shown", {run_id: 0})

    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(run.folder / "tensorboard")).Reload()
    losses = [(event.step, event.value) for event in found.Scalars("train/loss")]
    assert [step for step, _ in losses] == list(range(1, 9))
    assert all(
        abs(loss - row["loss"]) <= 2**-23 * row["loss"] for (_, loss), row in zip(losses, run.steps, strict=True)
    )
    assert [event.step for event in found.Scalars("val/loss")] == [2, 4, 6, 8]
