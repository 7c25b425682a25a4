"""Check whether a run with this config is possible with its model and on the given number of processes.

Types were checked when values were read. Here values are compared with their ranges (`ranges.py`), with each other,
with the model's dimensions and with the number of processes. If that number is unknown, checks that need it are left
out.
"""

import math
import os
from collections.abc import Collection
from operator import attrgetter

from titanlite.config.check_data import check_data, check_held_out
from titanlite.config.check_mesh import (
    check_batch,
    check_context_parallel,
    check_dims,
    check_expert_parallel,
    check_mesh,
    ranks_of_shards,
    tokens_of_rank,
)
from titanlite.config.held_out import validation_losses
from titanlite.config.problems import Origin, Problems, show
from titanlite.config.ranges import check_ranges
from titanlite.config.recipe_schema import ModelDims
from titanlite.config.schema import Config
from titanlite.config.stages import longest_seq_len, stage_configs
from titanlite.durable import require_reachable
from titanlite.errors import nearest
from titanlite.extras import missing_packages
from titanlite.file_system import is_chained, is_url
from titanlite.hub import is_hub_name, wrong_name

_FROM_HOME = (  # keys of paths that may begin with ~, a home folder
    "job.dump_folder",
    "job.recipe_dirs",
    "data.source",
    "data.tokenizer",
    "data.cache_dir",
    "validation.source",
    "evaluation.tasks",
    "checkpoint.initial_load_path",
)
_MOST_PEERS = 8  # equals `titanlite.kernels.products.MAX_RANKS`, whose module imports torch


def check_config(config: Config, model: ModelDims | None, world: int | None, origin: Origin | None = None) -> None:
    """Raise a ConfigError with every problem that `config_problems` finds."""
    config_problems(config, model, world, origin).raise_all()


def config_problems(
    config: Config,
    model: ModelDims | None,
    world_size: int | None,
    origin: Origin | None = None,
    unread: Collection[str] = (),
) -> Problems:
    """Check a config against itself, its model and the number of processes.

    Args:
        config: the resolved config.
        model: dimensions of the model, with the overrides of `[model]`; None: checks that need them are left out.
        world_size: number of processes; None: checks that need it are left out.
        origin: file and line of each key.
        unread: sections with keys that could not be read; cross-checks with these sections are left out.
    """
    problems = Problems(origin or Origin("config"))

    def are_read(*sections: str) -> bool:
        return not {*sections} & {*unread}

    check_ranges(config, problems)
    _check_names(config, problems)
    _check_packages(config, model, problems)
    check_held_out(config, problems)
    counts: tuple[int, ...] = ()
    if model is not None:
        check_dims(model, config.model, problems)
        longest, seq_len = model.max_seq_len, longest_seq_len(config)
        if 0 < longest < seq_len and are_read("training", "data"):
            want = f"at most {longest}, the number of position embeddings of the model"
            key = "training.seq_len" if seq_len == config.training.seq_len else "data.stage"
            problems.add(key, str(seq_len), want, f"seq_len = {longest}")
        counts = (model.n_heads, model.n_kv_heads, model.ffn_dim or 1, model.vocab_size)
    is_in_range = _can_divide(config) and min(counts, default=1) >= 1  # if False, a problem was added above
    if are_read("training", "data"):
        check_data(config, problems)
    if is_in_range and are_read("training", "parallelism"):
        check_mesh(config, model, world_size, problems)
        check_expert_parallel(config, model, world_size, problems)
        check_context_parallel(config, world_size, problems)
        if not any(key.startswith("parallelism.") for key in problems.wrong_keys()):  # ranks follow from these keys
            check_batch(config, world_size, problems)
            _check_batches(config, world_size, problems)
        if config.parallelism.fsdp_copy_engines == "always":
            _check_copy_engines(config, world_size, problems)
    if are_read("checkpoint", "validation"):
        _check_keep_best(config, problems)
    if are_read("training", "job", "profiling") and not config.training.tokens:  # with tokens, steps are not known yet
        check_steps(config, problems)
    if are_read("model", "parallelism", "activation_checkpoint", "checkpoint", "float8", "metrics"):
        _check_features(config, problems)
    return problems


def check_homes(config: Config, origin: Origin) -> None:
    """Refuse paths whose ~ cannot be expanded, as for the user of a container who is not in /etc/passwd."""
    problems = Problems(origin)
    for key in _FROM_HOME:
        value: str | tuple[str, ...] = attrgetter(key)(config)
        for path in (value,) if isinstance(value, str) else value:
            whose = path.partition("/")[0]
            is_own = whose == "~"
            # expanduser returns a path unchanged if it cannot expand ~. A folder may also have such a name.
            if whose.startswith("~") and os.path.expanduser(path) == path and not os.path.lexists(whose):
                want = "a path that leads somewhere; "
                want += f"HOME is not set, and user {os.geteuid()} has none" if is_own else f"no user is {whose[1:]}"
                problems.add(key, show(path), want, f"write the path out{', or set HOME' * is_own}")
    problems.raise_all()


def last_step(config: Config) -> int:
    """Return the last step of a run that no signal stops earlier."""
    return min(config.training.steps, config.job.stop_after or config.training.steps)


def _can_divide(config: Config) -> bool:
    batch, mesh = config.training, config.parallelism
    data = mesh.data_parallel_replicate_degree, abs(mesh.data_parallel_shard_degree)
    others = mesh.tensor_parallel_degree, mesh.context_parallel_degree, mesh.expert_parallel_degree
    return min(batch.seq_len, batch.local_batch_size, *data, *others) >= 1


def _check_batches(config: Config, world_size: int | None, problems: Problems) -> None:
    """Check the batch of each stage in the same way as the batch of `[training]`."""
    for n, _, now in stage_configs(config):
        if n is None or now.training == config.training or not _can_divide(now):
            continue
        section = f"data.stage[{n}]"
        check_batch(now, world_size, problems, section)
        check_context_parallel(now, world_size, problems, section)
        tokens, tensor = tokens_of_rank(now), config.parallelism.tensor_parallel_degree
        if tokens % tensor:
            split = " / context_parallel_degree" * (config.parallelism.context_parallel_degree > 1)
            want = f"seq_len × local_batch_size{split} to be a multiple of tensor_parallel_degree = {tensor}; "
            saw = str(now.training.seq_len)
            problems.add(f"{section}.seq_len", saw, f"{want}it is {tokens}", "a larger seq_len or batch")


def check_last_steps(config: Config, origin: Origin) -> None:
    """Raise the problems of `check_steps`, once `training.steps` has been computed from `training.tokens`."""
    problems = Problems(origin)
    check_steps(config, problems)
    problems.raise_all()


def check_steps(config: Config, problems: Problems) -> None:
    """Check that `job.stop_after`, the profile and validated checkpoints are within `training.steps`."""
    steps, profiling, refuse = config.training.steps, config.profiling, problems.about(config)
    if steps < 1:
        return  # reported as out of range
    if config.job.stop_after > steps:
        fix = "stop_after = 0 (do not stop early)"
        refuse("job.stop_after", f"at most training.steps = {steps}", fix, "training.steps")
    interval, freq = config.checkpoint.interval, config.validation.freq
    if config.checkpoint.keep_best and config.validation.enable and interval < steps < math.lcm(interval, freq):
        want = f"checkpoints that are validated: no multiple of interval = {interval} and validation.freq = {freq} is "
        want += f"within {steps} steps"
        refuse("checkpoint.keep_best", want, f"validation.freq = {interval}", "validation.freq")
    last, first = profiling.start_step + profiling.steps - 1, max(1, steps - profiling.steps + 1)
    if profiling.enable and last > steps:
        want = f"a trace within the run: step {last} is after training.steps = {steps}"
        if profiling.start_step > first:
            refuse("profiling.start_step", want, f"start_step = {first}", "training.steps")
        if profiling.steps > steps:
            refuse("profiling.steps", want, f"steps = {steps}", "training.steps")


def _check_names(config: Config, problems: Problems) -> None:
    """Check the names, folders and files that the config gives."""
    name, refuse = config.job.name, problems.about(config)
    if name in ("", ".", "..") or any(mark in name for mark in "/\\\0") or len(name.encode()) > 255:
        refuse("job.name", "the name of a folder, of at most 255 bytes", f'name = "{Config().job.name}" (the default)')
    for key in ("job.dump_folder", "data.cache_dir"):
        if "://" in attrgetter(key)(config):
            fix = "mount what is behind the URL, and name the folder that it is mounted on"
            refuse(key, "a folder of this host's, and no URL", fix)
    for key in ("data.tokenizer", "checkpoint.initial_load_path"):
        if is_hub_name(text := attrgetter(key)(config)) and (wrong := wrong_name(text)):
            refuse(key, *wrong)
    for key, file in (("model.file", config.model.file), ("optimizer.file", config.optimizer.file)):
        check_file(key, file, problems)
    if (url := config.checkpoint.mirror) and (not is_url(url) or is_chained(url) or url.startswith("memory:")):
        want = "the URL of a folder in a store that fsspec knows, and that outlasts the run"
        meant = f"file://{url}" if url.startswith("/") else f"s3://bucket/{name}"
        refuse("checkpoint.mirror", want, f'mirror = "{meant}"')
    if config.metrics.wandb != "off" and not config.metrics.wandb_project:
        fix = f'wandb_project = "{Config().metrics.wandb_project}" (the default)'
        refuse("metrics.wandb_project", "the name of a project", fix)


def _check_packages(config: Config, model: ModelDims | None, problems: Problems) -> None:
    """Refuse Weights & Biases and TensorBoard if their packages are not installed."""
    metrics, refuse = config.metrics, problems.about(config)
    heat_map = ["matplotlib"] if model is not None and model.experts is not None else []
    if metrics.wandb != "off" and (missing := missing_packages("wandb", *heat_map)):
        refuse("metrics.wandb", missing[0], f'{missing[1]}, or wandb = "off"')
    if metrics.tensorboard and (missing := missing_packages("tensorboard")):
        refuse("metrics.tensorboard", missing[0], f"{missing[1]}, or tensorboard = false")


def _check_keep_best(config: Config, problems: Problems) -> None:
    """Check that `checkpoint.keep_best` is a loss that this run measures and saves."""
    asked, refuse = config.checkpoint.keep_best, problems.about(config)
    if not asked:
        return
    if not config.checkpoint.enable:
        refuse("checkpoint.keep_best", "checkpoints, but checkpoint.enable = false", "checkpoint.enable = true")
    elif not config.validation.enable:
        refuse("checkpoint.keep_best", "validation, but validation.enable = false", "validation.enable = true")
    elif asked not in (losses := validation_losses(config)):
        fix = f"keep_best = {show(nearest(asked, losses) or losses[0])}"
        refuse("checkpoint.keep_best", f"a loss of this run's validation: {', '.join(losses)}", fix)


def check_file(key: str, file: str, problems: Problems) -> None:
    """Check that a user's Python file ends in .py and exists; "": no file is given."""
    require_reachable(file)
    if file and not file.endswith(".py"):
        problems.add(key, show(file), "a Python file", 'file = "mine.py"')
    elif file and not os.path.isfile(file):
        problems.add(key, show(file), "a file that exists", "its path from where you start")


def _check_features(config: Config, problems: Problems) -> None:
    """Refuse a feature that another key turns off, or that needs a key which is not given."""
    chosen, refuse = config.activation_checkpoint, problems.about(config)
    if config.parallelism.async_tensor_parallel and config.parallelism.tensor_parallel_degree == 1:
        want = "false where parallelism.tensor_parallel_degree is 1: there are no collectives to fuse"
        refuse("parallelism.async_tensor_parallel", want, "async_tensor_parallel = false")
    if chosen.recipe == "auto" and chosen.budget_gib is None:
        want = "activation_checkpoint.budget_gib as well: the peak GiB that the run may reserve on each GPU"
        refuse("activation_checkpoint.recipe", want, "budget_gib = 60.0")
    if config.checkpoint.mirror and not config.checkpoint.enable:
        refuse("checkpoint.mirror", "checkpoints, but checkpoint.enable = false", "checkpoint.enable = true")
    if not config.checkpoint.enable and isinstance(config.checkpoint.resume, int):
        refuse("checkpoint.resume", "checkpoints, but checkpoint.enable = false", "checkpoint.enable = true")
    if config.metrics.float8_numerics_freq > 0 and config.float8.recipe == "none":
        want = 'a float8 recipe, but float8.recipe = "none": there is nothing to measure'
        refuse("metrics.float8_numerics_freq", want, "float8_numerics_freq = 0", "float8.recipe")


def _check_copy_engines(config: Config, world: int | None, problems: Problems) -> None:
    """Check what copy engines need: 2 to 8 ranks that shard each parameter, and gradients that are added in float32."""
    shards, refuse = ranks_of_shards(config, world), problems.about(config)
    if shards != -1 and not 2 <= shards <= _MOST_PEERS:
        want = f'"default" unless 2 to {_MOST_PEERS} ranks shard each parameter; here {shards}'
        refuse("parallelism.fsdp_copy_engines", want, 'fsdp_copy_engines = "default"')
    if config.training.mixed_precision_reduce != "float32":
        want = '"float32", in which fsdp_copy_engines adds gradients'
        refuse("training.mixed_precision_reduce", want, 'mixed_precision_reduce = "float32"')


def uses_copy_engines(config: Config, shards: int) -> bool:
    """Return whether copy engines gather and reduce blocks that `shards` ranks shard, if GPUs can share memory."""
    on_a_host = shards * config.parallelism.tensor_parallel_degree <= _MOST_PEERS  # a host has eight GPUs
    possible = shards >= 2 and on_a_host and config.training.mixed_precision_reduce == "float32"
    asked = config.parallelism.fsdp_copy_engines
    return asked == "always" or (asked == "default" and possible)
