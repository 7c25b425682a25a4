"""Train a run again: nudged, to measure the effect of rounding, or for a few steps, to take sketches of tensors."""

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from titanlite.comparison.layers import Parting, Sketches, first_parting
from titanlite.comparison.runs import RunRecord
from titanlite.observe.metrics import RunError
from titanlite.preflight.run_again import processes_of, run_again

# Flags that turn off all that a run writes or waits for besides its steps; none changes the numbers of a step.
_ALONE = (
    "--checkpoint.enable=false",
    "--checkpoint.keep_best=",
    "--checkpoint.mirror=",
    "--validation.enable=false",
    "--metrics.wandb=off",
    "--profiling.enable=false",
    "--metrics.tensorboard=false",
    "--metrics.float8_numerics_freq=0",
    "--evaluation.tasks=[]",
)


def floor_of(folder: Path, seed: int) -> Path:
    """Return the folder, beside `folder`, of the nudged run with `training.nudge` = `seed`, which counts from 1."""
    folder = folder.resolve()
    return folder.with_name(f"{folder.name}-nudged{f'-{seed}' * (seed > 1)}")


def measure_floor(record: RunRecord, seed: int) -> None:
    """Train a run again with nudged initial weights, on as many processes, into the folder that `floor_of` returns."""
    nudged, last = floor_of(record.path, seed), record.last_step
    log = nudged / "logs" / "rank0.log"
    sys.stdout.write(
        f"{nudged}: training {last:,} steps once more, nudged by one rounding; {log} shows how far it is\n"
    )
    sys.stdout.flush()
    over = [f"--job.dump_folder={nudged.parent}", f"--job.name={nudged.name}", f"--job.stop_after={last}"]
    _run("titanlite.train", record, *over, f"--training.nudge={seed}")


def parting(first: RunRecord, other: RunRecord, steps: int) -> tuple[Parting | None, list[str]]:
    """Repeat the first steps of two runs; return the first tensor that differs, and tensors that only one run has."""
    its, ours = _sketched(first, steps), _sketched(other, steps)
    return first_parting(its, ours, _sketched(first, steps, nudge=1)), sorted(its.keys() ^ ours.keys())


def _sketched(record: RunRecord, steps: int, nudge: int = 0) -> Sketches:
    with tempfile.TemporaryDirectory() as temporary:
        out = Path(temporary) / "sketches.npz"
        over = [f"--training.nudge={nudge}"] * bool(nudge)
        _run("titanlite.training.sketch_steps", record, *over, before=[str(out), str(steps)])
        with np.load(out) as found:
            return dict(zip(found["names"].tolist(), found["sketches"], strict=True))


def _run(module: str, record: RunRecord, *flags: str, before: Sequence[str] = ()) -> None:
    """Run a module of titanlite on a run's config, on as many processes of this host as the run had. `before`:
    arguments that precede --config.

    Raises:
        RunError: the module failed, or the run's receipt lacks the number of processes.
    """
    processes, where = processes_of(record.receipt), str(record.path)
    if processes is None:
        want = "a receipt.json that has the layout of the run"
        raise RunError.of("titanlite compare", where, "", want, "start the run again: it is written at step 1")
    if code := run_again(module, [*before, "--config", str(record.path / "config.toml"), *_ALONE, *flags], processes):
        raise RunError.of("titanlite compare", where, f"exit code {code}", "0", "fix the error printed above")
