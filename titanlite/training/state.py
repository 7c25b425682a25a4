"""Name the tensors of a run's checkpoint, and restore a run from one."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from titanlite.checkpoint.branch import branch_point, remembered_step
from titanlite.checkpoint.collective import on_rank_0
from titanlite.checkpoint.hugging_face import load_weights
from titanlite.checkpoint.optimizer_state import PREFIX, afresh, changed_file, leaves_state, taken_by_branch
from titanlite.checkpoint.publish import step_folder
from titanlite.checkpoint.resume import AVERAGE, MODEL, changed_average, changed_routing, check_state, other_text
from titanlite.checkpoint.rng import restore_rng, rng_state
from titanlite.checkpoint.saved_state import SavedState
from titanlite.checkpoint.state import Checkpoints
from titanlite.config.stages import sequences_per_step
from titanlite.float8.convert import precompute_scales
from titanlite.float8.weight import as_laid_out, local_data
from titanlite.observe.console import Console
from titanlite.parallel.initialise import nudge
from titanlite.receipt import Entry
from titanlite.training.build import Run
from titanlite.training.receipt import dtype_names


def tensors_of(run: Run) -> dict[str, Tensor]:
    """Return the tensors that a checkpoint of a run has; loading into them restores the run.

    Returns:
        By name: `model/<name>`, `optimizer/…`, `ema/<name>` of averaged weights, and `rng/rank<r>/…`. Weights, moments
        and averages are laid out as the parameters, and share the run's memory. A checkpoint that lacks one of these
        names is refused, unless `restore` leaves its prefix out.
    """
    # Not the model's parameters: after validation these are gathered weights in the compute dtype.
    masters = run.optimizer.parameters
    weights = {f"{MODEL}{name}": as_laid_out(local_data(p), p) for name, p in masters.items()}
    if run.routers is not None:
        weights |= {f"{MODEL}{name}": bias for name, bias in run.routers.state().items()}
    averages = run.average.state() if run.average is not None else {}
    return {**weights, **run.optimizer.state(), **averages, **rng_state()}


def take_first_weights(run: Run) -> int:
    """Load `checkpoint.initial_load_path` and apply `training.nudge`, if set; return the number of weights loaded."""
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
    """Perturb the weights by `training.nudge`, if it is set."""
    config, parameters = run.config, run.optimizer.parameters
    if config.training.nudge:
        # With float8, matmuls return bfloat16 at best.
        coarsest = "bfloat16" if config.float8.recipe != "none" else config.training.mixed_precision_param
        nudge(parameters, config.training.nudge, torch.finfo(getattr(torch, coarsest)).eps / 2)


class Start(NamedTuple):
    """The step and state from which a run goes on."""

    step: int  # the last step done
    state: SavedState
    is_branch: bool = False  # whether the checkpoint is another run's


def restore(run: Run, checkpoints: Checkpoints, console: Console, data: Mapping[str, Any]) -> Start:
    """Load the checkpoint that `checkpoint.resume` names or, if there is none, `checkpoint.initial_load_path`.

    This path has weights, or is a checkpoint of another run. From a checkpoint the run goes on at the same step, with
    weights, optimizer state and place in the data. `data`: hashes of the data.

    Raises:
        CheckpointError: on every rank: a rank does not see the folder; or there is no such checkpoint, or it is
            damaged, of another model or, without `optimizer.fresh_state`, of another optimizer; or of another
            tokenizer, with `job.strict`.
        ConfigError: on every rank: a step would take another number of sequences than before, though no flag asks for
            this.
    """
    asked, key = run.config.checkpoint, "checkpoint.initial_load_path"
    step, path = None, asked.initial_load_path
    if asked.enable:
        checkpoints.check_shared()
        step = checkpoints.choose(asked.resume)
    run_folder = checkpoints.root.parent
    # Only rank 0 looks: the newest checkpoint may change between two looks.
    branch = on_rank_0(lambda: branch_point(path, run_folder)) if step is None and path else None
    if step is None and branch is None:
        if n := take_first_weights(run):
            run.receipt.add(Entry("initial_weights", path, {"weights": n}, count=n, key=key))
            console.notice(f"starts from the {n} weights of {path}")
        _add_average(run, 0)
        _add_fresh_state(run, "there is no checkpoint to go on from")
        return Start(0, SavedState())
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
        check_state(folder, state, run.config, run.dims, sequences_per_step(run.config, dist.get_world_size()))
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
    if text := other_text(folder, state, strict=run.config.job.strict, **data):
        console.warning(text)
    return Start(step, state, branch is not None)


def _add_average(run: Run, step: int) -> None:
    """Add the average of weights, if there is one, to the receipt, and say where it begins or goes on."""
    if (average := run.average) is None:
        return
    updates, decay, n = int(average.updates), run.config.optimizer.ema_decay, len(average.shards)
    begins = f"goes on after {updates:,} updates" if updates else f"begins at the weights of step {step}"
    applied = {"parameters": n, "dtype": dtype_names(average.shards.values()), "decay": decay, "start": begins}
    run.receipt.add(Entry("weight_average", decay, applied, count=n, key="optimizer.ema_decay"))


def _add_fresh_state(run: Run, not_needed: str | None) -> None:
    """Add `optimizer.fresh_state` to the receipt, if it is on. `not_needed`: why it had no effect, or None."""
    if run.config.optimizer.fresh_state:
        applied = "state starts afresh" if not_needed is None else f"not needed: {not_needed}"
        run.receipt.add(Entry("optimizer.fresh_state", True, applied, count=1))
