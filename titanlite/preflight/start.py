"""Find what a start goes on from, and refuse what it would be refused for: before torch, and without the tensors."""

from pathlib import Path

from titanlite.checkpoint.branch import branch_point
from titanlite.checkpoint.publish import step_folder
from titanlite.checkpoint.resume import check_state, start_of, step_to_resume
from titanlite.checkpoint.saved_state import SavedState, read_state
from titanlite.config.check import last_step, sequences_per_step
from titanlite.config.config_json import check_initial_load_path
from titanlite.config.problems import Origin
from titanlite.config.recipe_schema import ModelDims
from titanlite.config.schema import Config
from titanlite.config.stages import source_keys
from titanlite.data.inputs import Inputs, check_cache
from titanlite.data.mixture import check_epochs, many_epochs
from titanlite.data.stages import StageTable
from titanlite.errors import CheckpointError, ConfigError
from titanlite.preflight.run_folder import RunFolder


def check_start(config: Config, inputs: Inputs) -> None:
    """Raise the TitanliteError of a start on this host, without torch and before a process is started."""
    folder = RunFolder.of(config)
    folder.foresee(config)
    check_cache(inputs, config.data)
    if config.checkpoint.enable and folder.seems_in_use() is None:  # else its checkpoints come and go
        step_to_resume(folder.checkpoints, config.checkpoint.resume)


def branch_of(config: Config) -> tuple[Path, int] | None:
    """Return the checkpoint of another run that a fresh run goes on from; see `branch_point`."""
    return branch_point(config.checkpoint.initial_load_path, RunFolder.of(config).path)


def check_branch_trains(config: Config) -> None:
    """Refuse a branch that ends where the other run's checkpoint is, or before; its steps are known."""
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
    """Refuse too many epochs of a source whose length is known; return a warning of each source with many."""
    unit_len, tokens = table.unit_len, inputs.tokens
    known = {name: tokens[key] for name, (key, _) in source_keys(config).items() if key in tokens}
    units = {name: max(1, (n - 1) // unit_len) for name, n in known.items()}
    check_epochs(config, table, units)
    return many_epochs(config, table, units)


def newest_state(config: Config) -> tuple[Path, SavedState] | None:
    """Return the checkpoint that a start goes on from, and what it says beside its tensors.

    None of another run, which a start refuses: who plans one would plan what goes on from there.
    """
    run = RunFolder.of(config)
    try:
        run.require_same(config)
        if (found := start_of(run.checkpoints, config)) is None:
            return None
        return (folder := step_folder(*found)), read_state(folder, found[1])
    except (CheckpointError, ConfigError):  # what cannot be read is said by those who load it
        return None
