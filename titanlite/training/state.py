"""What a checkpoint holds of a run, and how a run comes back from it."""

from typing import Any

from torch import Tensor

from titanlite.checkpoint.rng import restore_rng, rng_state
from titanlite.checkpoint.state import Checkpoints
from titanlite.float8.convert import precompute_scales
from titanlite.observe.console import Console
from titanlite.parallel.initialise import local_data
from titanlite.training.build import Run
from titanlite.training.optimizer import as_laid_out


def tensors_of(run: Run) -> dict[str, Tensor]:
    """Name every tensor of a run; loading into these restores it.

    Args:
        run: the run.

    Returns:
        `model/<name>`, `optimizer/…` and `rng/rank<r>/…`; weights and moments are laid out as the parameters are and
        share their memory.
    """
    # Not the model's own: between validation and the next step those are what FSDP gathered, in the compute dtype.
    masters = run.optimizer.parameters
    weights = {f"model/{name}": as_laid_out(local_data(p), p) for name, p in masters.items()}
    return {**weights, **run.optimizer.state(), **rng_state()}


def restore(run: Run, checkpoints: Checkpoints, console: Console) -> tuple[int, dict[str, Any]]:
    """Load the checkpoint that `checkpoint.resume` names.

    Args:
        run: with fresh weights.
        checkpoints: of the run's folder.
        console: told what was loaded.

    Returns:
        The last step done, and what was saved beside the tensors; step 0 and no samples for a fresh start.

    Raises:
        CheckpointError: on every rank, if there is no such checkpoint, or it is damaged or of another model.
    """
    fresh = 0, {"samples": 0}
    if not run.config.checkpoint.enable:
        return fresh
    step = checkpoints.choose(run.config.checkpoint.resume)
    if step is None:
        return fresh
    tensors = tensors_of(run)
    state, notices = checkpoints.load(step, tensors)
    restore_rng(tensors)
    precompute_scales(run.parameters, run.mesh.fsdp)
    for notice in (f"resumed from step {step}", *notices):
        console.notice(notice)
    return step, state
