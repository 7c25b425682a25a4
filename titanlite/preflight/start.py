"""Find what a start goes on from, in no time, and make its stage table: before torch, and without the tensors."""

from collections.abc import Mapping
from pathlib import Path

from titanlite.checkpoint.branch import branch_point
from titanlite.checkpoint.optimizer_state import afresh, leaves_state
from titanlite.checkpoint.publish import step_folder
from titanlite.checkpoint.resume import check_quickly, other_text, start_of, step_to_resume
from titanlite.checkpoint.saved_state import SavedState, read_state
from titanlite.config.check import last_step, sequences_per_step
from titanlite.config.config_json import check_initial_load_path
from titanlite.config.problems import Origin
from titanlite.config.recipe_schema import ModelDims, OptimizerRecipe
from titanlite.config.schema import Config
from titanlite.config.stages import source_keys
from titanlite.data.inputs import Inputs, check_cache
from titanlite.data.mixture import check_epochs, many_epochs
from titanlite.data.stages import StageTable, stage_table
from titanlite.errors import CheckpointError, ConfigError
from titanlite.preflight.run_folder import RunFolder


def check_start(config: Config, inputs: Inputs) -> None:
    """Refuse what a start on this host would be refused for, without torch and before a process is started.

    Raises:
        TitanliteError: the folder is another run's or cannot be written, shards are to be made where they cannot be, or
            there is no such checkpoint to resume from.
    """
    folder = RunFolder.of(config)
    folder.foresee(config)
    check_cache(inputs, config.data)
    if config.checkpoint.enable and folder.seems_in_use() is None:  # else its checkpoints come and go
        step_to_resume(folder.checkpoints, config.checkpoint.resume)


def branch_of(config: Config) -> tuple[Path, int] | None:
    """Return the checkpoint of another run that a fresh run goes on from; see `branch_point`."""
    return branch_point(config.checkpoint.initial_load_path, RunFolder.of(config).path)


def check_branch_trains(config: Config) -> None:
    """Refuse a branch that has no step to train.

    Args:
        config: of a fresh run, its steps known.

    Raises:
        ConfigError: it ends where the other run's checkpoint is, or before.
    """
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
    """Hold what a fresh run starts from against its config: a folder of weights, or another run's checkpoint.

    Raises:
        TitanliteError: it cannot be read, or is of another model.
    """
    if (branch := branch_of(config)) is None:
        check_initial_load_path(config, dims, origin)
        return
    root, step = branch
    sequences = sequences_per_step(config, world_size) if world_size else None
    check_quickly(root, step, config, dims, sequences)


def changed_optimizer(
    folder: Path, state: SavedState, config: Config, rules: Mapping[str, str], recipe: OptimizerRecipe
) -> list[str]:
    """Say so where the optimizer's state is left in a checkpoint.

    Args:
        folder: of the checkpoint.
        state: what it says beside its tensors.
        config: of the run.
        rules: by parameter.
        recipe: of the optimizer.

    Raises:
        CheckpointError: as `leaves_state` says.
    """
    return [afresh(folder)] * leaves_state(folder, state, config.optimizer, rules, recipe.own_rules)


def planned_stages(config: Config, world_size: int | None) -> StageTable:
    """Make the stage table of a start, of which the past is that of the checkpoint that it goes on from.

    Args:
        config: of the run, checked.
        world_size: number of processes; None: the fewest.

    Raises:
        ConfigError: as `stage_table` says.
    """
    if (found := newest_state(config)) is None:
        return stage_table(config, world_size)
    _, state = found
    return stage_table(config, world_size, state.past)


def check_sources(config: Config, inputs: Inputs, table: StageTable) -> list[str]:
    """Refuse a run that goes through a source more often than it may, as far as lengths are known.

    Returns:
        A warning of each that it goes through many times.
    """
    unit_len, tokens = table.unit_len, inputs.tokens
    known = {name: tokens[key] for name, (key, _) in source_keys(config).items() if key in tokens}
    units = {name: max(1, (n - 1) // unit_len) for name, n in known.items()}
    check_epochs(config, table, units)
    return many_epochs(config, table, units)


def check_tokenizer(config: Config, inputs: Inputs) -> SavedState | None:
    """Refuse ids of another tokenizer than the weights know, before its tokens are prepared, which may take hours.

    Returns:
        What the checkpoint of the run's folder says beside its tensors; None if there is none.
    """
    if (found := newest_state(config)) is None:
        return None
    folder, state = found
    other_text(folder, state, {}, inputs.fingerprint, strict=True)
    return state if folder.parent == RunFolder.of(config).checkpoints else None


def newest_state(config: Config) -> tuple[Path, SavedState] | None:
    """Return the checkpoint that a start goes on from, and what it says beside its tensors.

    None of another run, which a start refuses: who plans one would plan what goes on from there.
    """
    try:
        RunFolder.of(config).require_same(config)
        found = start_of(RunFolder.of(config).checkpoints, config)
        if found is None:
            return None
        root, step = found
        folder = step_folder(root, step)
        return folder, read_state(folder, step)
    except (CheckpointError, ConfigError):  # what cannot be read is said by those who load it
        return None
