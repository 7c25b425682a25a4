"""Run the config of a run's folder once more: nudged, for the floor of a comparison, or a few steps of it, sketched."""

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from titanlite.comparison.layers import Parting, Sketches, first_parting
from titanlite.comparison.runs import RunRecord
from titanlite.observe.metrics import RunError
from titanlite.preflight.run_again import processes_of, run_again

# Turn off what a run writes or waits for beside its steps; none of it changes their numbers.
_ALONE = (
    "--checkpoint.enable=false",
    "--validation.enable=false",
    "--metrics.wandb=off",
    "--profiling.enable=false",
    "--metrics.tensorboard=false",
    "--metrics.float8_numerics_freq=0",
    "--evaluation.tasks=[]",
)


def floor_of(folder: Path, seed: int) -> Path:
    """Return the folder of the run beside `folder` whose `training.nudge` is `seed`, from 1 on."""
    folder = folder.resolve()
    return folder.with_name(f"{folder.name}-nudged{f'-{seed}' * (seed > 1)}")


def measure_floor(record: RunRecord, seed: int) -> None:
    """Train a run once more with its initial weights nudged, into a folder beside it, with as many processes."""
    nudged, last = floor_of(record.path, seed), record.last_step
    log = nudged / "logs" / "rank0.log"
    sys.stdout.write(
        f"{nudged}: training {last:,} steps once more, nudged by one rounding; {log} shows how far it is\n"
    )
    sys.stdout.flush()
    over = [f"--job.dump_folder={nudged.parent}", f"--job.name={nudged.name}", f"--job.stop_after={last}"]
    _run("titanlite.train", record, *over, f"--training.nudge={seed}")


def parting(first: RunRecord, other: RunRecord, steps: int) -> tuple[Parting | None, list[str]]:
    """Take the first steps of two runs once more; return where they part, and tensors that only one of them has."""
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
    """Run a module of titanlite on a run's config, on as many processes of this host as the run had.

    Raises:
        RunError: it failed, or the folder does not say how many processes the run had.
    """
    processes, where = processes_of(record.receipt), str(record.path)
    if processes is None:
        want = "a receipt.json that has the layout of the run"
        raise RunError.of("titanlite compare", where, "", want, "start the run again: it is written at step 1")
    if code := run_again(module, [*before, "--config", str(record.path / "config.toml"), *_ALONE, *flags], processes):
        raise RunError.of("titanlite compare", where, f"exit code {code}", "0", "fix the error printed above")
