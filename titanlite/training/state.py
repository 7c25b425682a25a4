"""Save and load what a checkpoint holds of a run."""

from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from titanlite.checkpoint.branch import branch_point, remembered_step
from titanlite.checkpoint.collective import on_rank_0
from titanlite.checkpoint.hugging_face import load_weights
from titanlite.checkpoint.optimizer_state import PREFIX, afresh, changed_file, leaves_state, taken_by_branch
from titanlite.checkpoint.publish import step_folder
from titanlite.checkpoint.resume import AVERAGE, MODEL, changed_average, changed_routing, check_state
from titanlite.checkpoint.rng import restore_rng, rng_state
from titanlite.checkpoint.saved_state import SavedState
from titanlite.checkpoint.state import Checkpoints
from titanlite.float8.convert import precompute_scales
from titanlite.float8.weight import as_laid_out, local_data
from titanlite.observe.console import Console
from titanlite.parallel.initialise import nudge
from titanlite.receipt import Entry
from titanlite.training.build import Run


def tensors_of(run: Run) -> dict[str, Tensor]:
    """Name every tensor of a run; loading into these restores it.

    Checkpoints of before load only if `restore` says that a new name may be absent.

    Args:
        run: the run.

    Returns:
        `model/<name>`, `optimizer/…`, `ema/<name>` of an average and `rng/rank<r>/…`; weights, moments and averages are
        laid out as the parameters are and share their memory.
    """
    # Not the model's own: between validation and the next step those are what FSDP gathered, in the compute dtype.
    masters = run.optimizer.parameters
    weights = {f"{MODEL}{name}": as_laid_out(local_data(p), p) for name, p in masters.items()}
    if run.routers is not None:
        weights |= {f"{MODEL}{name}": bias for name, bias in run.routers.state().items()}
    averages = run.average.state() if run.average is not None else {}
    return {**weights, **run.optimizer.state(), **averages, **rng_state()}


def take_first_weights(run: Run) -> int:
    """Give a run the weights that it starts with: those of `checkpoint.initial_load_path`, nudged by `training.nudge`.

    Returns:
        How many were loaded; 0 if the fresh ones stay.
    """
    config, parameters, n = run.config, run.optimizer.parameters, 0
    if path := config.checkpoint.initial_load_path:
        n = load_weights(path, config.model.name, run.model, parameters)
    _nudge(run)
    if n or config.training.nudge:
        precompute_scales(run.parameters, run.mesh.fsdp)
    if run.average is not None:
        run.average.begin()
    return n


def _nudge(run: Run) -> None:
    """Move the weights by `training.nudge`, if it is asked for."""
    config, parameters = run.config, run.optimizer.parameters
    if config.training.nudge:
        # Float8 is told apart by what is cast to it: what matmuls return, in bfloat16 at best.
        coarsest = "bfloat16" if config.float8.recipe != "none" else config.training.mixed_precision_param
        nudge(parameters, config.training.nudge, torch.finfo(getattr(torch, coarsest)).eps / 2)


class Start(NamedTuple):
    """The point at which a start takes up training.

    Attributes:
        step: the last one done.
        state: what was saved beside the tensors.
        folder: the checkpoint; of a fresh start, the one that would be of step 0.
        is_branch: whether it is another run's, off which this one branches.
    """

    step: int
    state: SavedState
    folder: Path
    is_branch: bool = False


def restore(run: Run, checkpoints: Checkpoints, console: Console, per_step: int) -> Start:
    """Load the checkpoint that `checkpoint.resume` names, or else what `checkpoint.initial_load_path` has.

    That is weights, or a checkpoint of another run, with which this one goes on: weights, optimizer and place in the
    data, at its step.

    Args:
        run: with fresh weights.
        checkpoints: of the run's folder.
        console: told what was loaded.
        per_step: sequences that a step of this run takes.

    Returns:
        Where training is taken up; step 0 and no samples for a fresh start.

    Raises:
        CheckpointError: on every rank, if a rank does not see the folder, or if there is no such checkpoint, or it is
            damaged, of another model or, without `optimizer.fresh_state`, of another optimizer.
        ConfigError: on every rank, if a step would take another number of sequences, though nobody asked for that.
    """
    asked, key = run.config.checkpoint, "checkpoint.initial_load_path"
    step, path = None, asked.initial_load_path
    if asked.enable:
        checkpoints.check_shared()
        step = checkpoints.choose(asked.resume)
    run_folder = checkpoints.root.parent
    branch = _branch_of_all(path, run_folder) if step is None and path else None
    if step is None and branch is None:
        if n := take_first_weights(run):
            run.receipt.add(Entry("initial_weights", path, {"weights": n}, count=n, key=key))
            console.notice(f"starts from the {n} weights of {path}")
        _add_average(run, 0)
        _add_fresh_state(run, "there is no checkpoint to go on from")
        return Start(0, SavedState(), step_folder(checkpoints.root, 0))
    if branch is not None:
        checkpoints, step = Checkpoints(branch[0], 0, console.warning), branch[1]
    elif path:
        ignored = f"not looked at: resumed from step {step}"
        run.receipt.add(Entry("initial_weights", path, ignored, count=1, key=key))
    assert step is not None  # noqa: S101
    tensors = tensors_of(run)
    folder = step_folder(checkpoints.root, step)

    def is_other(state: SavedState) -> bool:
        of = run.optimizer
        return leaves_state(folder, state, of.config, of.rules_by_name, of.recipe.own_rules)

    def check(state: SavedState) -> tuple[str, ...]:
        check_state(folder, state, run.config, run.dims, per_step)
        return (PREFIX,) * is_other(state) + (AVERAGE,) * (state.has_average != (run.average is not None))

    state, notices = checkpoints.load(step, tensors, check)
    if is_fresh := is_other(state):
        notices.append(afresh(folder))
    _add_fresh_state(run, None if is_fresh else f"{folder.name} is of the same optimizer, whose state goes on")
    restore_rng(tensors)
    if branch is not None:
        _nudge(run)
    precompute_scales(run.parameters, run.mesh.fsdp)
    if run.average is not None and not state.has_average:
        run.average.begin()
    _add_average(run, step)
    said = f"resumed from step {step}"
    if branch is not None:
        samples = state.samples
        as_before = ", as at its first start" * (remembered_step(path, run_folder) is not None)
        what = f"{taken_by_branch(is_fresh)}, after step {step}, {samples:,} samples"
        said = f"branches off {folder}{as_before}: {what}"
        run.receipt.add(Entry("branch", path, {"checkpoint": str(folder), "step": step}, count=1, key=key))
    changed = [*changed_routing(state, run.dims), *changed_average(state, run.config, step)]
    changed += changed_file(state, run.optimizer.recipe.own_rules, step)
    for notice in (said, *changed, *notices):
        console.notice(notice)
    return Start(step, state, folder, branch is not None)


def _add_average(run: Run, step: int) -> None:
    """Say in the receipt where the average of weights begins or goes on, if there is one."""
    if (average := run.average) is None:
        return
    updates, decay, n = int(average.updates), run.config.optimizer.ema_decay, len(average.shards)
    begins = f"goes on after {updates:,} updates" if updates else f"begins at the weights of step {step}"
    dtypes = sorted({str(shard.dtype).removeprefix("torch.") for shard in average.shards.values()})
    applied = {"parameters": n, "dtype": ", ".join(dtypes), "decay": decay, "start": begins}
    run.receipt.add(Entry("weight_average", decay, applied, count=n, key="optimizer.ema_decay"))


def _add_fresh_state(run: Run, not_needed: str | None) -> None:
    """Say in the receipt what became of `optimizer.fresh_state`, if it is on."""
    if run.config.optimizer.fresh_state:
        applied = "state starts afresh" if not_needed is None else f"not needed: {not_needed}"
        run.receipt.add(Entry("optimizer.fresh_state", True, applied, count=1))


def _branch_of_all(path: str, run: Path) -> tuple[Path, int] | None:
    """Return what `branch_point` finds on rank 0, for all ranks: the newest may have changed in between; collective."""
    return on_rank_0(lambda: branch_point(path, run))
