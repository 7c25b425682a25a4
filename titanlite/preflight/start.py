"""Find the checkpoint from which a run starts, and check that it can. Neither torch nor tensors are loaded."""

from pathlib import Path

from titanlite.checkpoint.branch import branch_point
from titanlite.checkpoint.publish import step_folder
from titanlite.checkpoint.resume import check_state, start_of, step_to_resume
from titanlite.checkpoint.saved_state import SavedState, read_state
from titanlite.config.check import last_step
from titanlite.config.config_json import check_initial_load_path
from titanlite.config.problems import Origin
from titanlite.config.recipe_schema import ModelDims
from titanlite.config.schema import Config
from titanlite.config.stages import sequences_per_step, source_keys
from titanlite.data.inputs import Inputs, check_cache
from titanlite.data.mixture import check_epochs, many_epochs
from titanlite.data.stages import StageTable
from titanlite.errors import CheckpointError, ConfigError
from titanlite.preflight.run_folder import RunFolder


def check_start(config: Config, inputs: Inputs) -> None:
    """Raise the TitanliteError that a start on this host would raise. torch and other processes are not needed."""
    folder = RunFolder.of(config)
    folder.foresee(config)
    check_cache(inputs, config.data)
    if config.checkpoint.enable and folder.seems_in_use() is None:  # else another job adds and deletes checkpoints
        step_to_resume(folder.checkpoints, config.checkpoint.resume)


def branch_of(config: Config) -> tuple[Path, int] | None:
    """Return (checkpoints folder, step) of another run from which a fresh run starts, or None; see `branch_point`."""
    return branch_point(config.checkpoint.initial_load_path, RunFolder.of(config).path)


def check_branch_trains(config: Config) -> None:
    """Refuse a branch of another run that would end at the step of that run's checkpoint, or before it."""
    if (branch := branch_of(config)) is None or branch[1] < (last := last_step(config)):
        return
    key, value = "training.steps", str(last)
    if last < config.training.steps:
        key = "job.stop_after"
    elif config.training.tokens:
        key, value = "training.tokens", f"{config.training.tokens}, which takes {last} steps"
    want = f"more than the {branch[1]} steps behind {step_folder(*branch)}: nothing is left for this branch to train"
    raise ConfigError.of("branch", key, value, want, f"a larger {key}, or an earlier checkpoint of that run")


def check_first_state(config: Config, dims: ModelDims, origin: Origin, world_size: int | None) -> None:
    """Raise TitanliteError if a fresh run cannot start from its folder of weights or another run's checkpoint."""
    if (branch := branch_of(config)) is None:
        check_initial_load_path(config, dims, origin)
    else:
        folder, per_step = step_folder(*branch), sequences_per_step(config, world_size) if world_size else None
        check_state(folder, read_state(folder, branch[1]), config, dims, per_step)


def check_sources(config: Config, inputs: Inputs, table: StageTable) -> list[str]:
    """Refuse too many epochs of a source of known length; return a warning for each source with many epochs."""
    unit_len, tokens = table.unit_len, inputs.tokens
    known = {name: tokens[key] for name, (key, _) in source_keys(config).items() if key in tokens}
    units = {name: max(1, (n - 1) // unit_len) for name, n in known.items()}
    check_epochs(config, table, units)
    return many_epochs(config, table, units)


def newest_state(config: Config) -> tuple[Path, SavedState] | None:
    """Return the checkpoint from which a start goes on, and its state without tensors; None if there is none.

    Also None for a different run's folder, or a checkpoint that cannot be read, which a start refuses elsewhere.
    """
    run = RunFolder.of(config)
    try:
        run.require_same(config)
        if (found := start_of(run.checkpoints, config)) is None:
            return None
        return (folder := step_folder(*found)), read_state(folder, found[1])
    except (CheckpointError, ConfigError):  # reported where it is loaded
        return None
