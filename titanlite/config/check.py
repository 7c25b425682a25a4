"""Cross-checks: is what the config asks for possible, on this many processes and with this model?

The types of single values were checked when they were read. Here values are held against their range (`ranges.py`),
each other, the model's dimensions and the number of processes, before any process group or device is touched. Whatever
can be said without the number of processes is also said when it is not known.
"""

import importlib.util
import os
from collections.abc import Collection
from operator import attrgetter

from titanlite.config.build import show
from titanlite.config.check_data import check_data
from titanlite.config.check_mesh import (
    check_batch,
    check_context_parallel,
    check_dims,
    check_expert_parallel,
    check_mesh,
    data_ranks,
    ranks_of_shards,
    tokens_of_rank,
)
from titanlite.config.held_out import check_held_out
from titanlite.config.problems import Origin, Problems
from titanlite.config.ranges import check_ranges
from titanlite.config.recipe_schema import ModelDims
from titanlite.config.schema import Config
from titanlite.config.stages import check_stages, longest_seq_len, stage_configs
from titanlite.durable import require_reachable

_FROM_HOME = (  # keys of paths in which ~ stands for a home
    "job.dump_folder",
    "job.recipe_dirs",
    "data.source",
    "data.tokenizer",
    "data.cache_dir",
    "validation.source",
    "evaluation.tasks",
    "checkpoint.initial_load_path",
)
_MOST_PEERS = 8  # `titanlite.kernels.products.MAX_RANKS`, which needs torch


def check_config(
    config: Config,
    model: ModelDims | None,
    world_size: int | None,
    origin: Origin | None = None,
    unread: Collection[str] = (),
) -> None:
    """Check a config against itself, its model and the number of processes.

    Args:
        config: the resolved config.
        model: its dimensions, with the overrides of `[model]` applied; None if they are not known, then what depends on
            them is not checked.
        world_size: number of processes; None if it is not known, then what depends on it is not checked.
        origin: where each key was given, for the line numbers of the message.
        unread: sections with keys that could not be read; what other keys are held against in them is not checked.

    Raises:
        ConfigError: something is impossible; every problem is in the message.
    """
    problems = Problems(origin or Origin("config"))

    def are_read(*sections: str) -> bool:
        return not {*sections} & {*unread}

    check_ranges(config, problems)
    _check_names(config, problems)
    check_held_out(config, problems)
    if are_read("data", "training"):
        check_data(config, problems)
    counts: tuple[int, ...] = ()
    if model is not None:
        check_dims(model, config.model, problems)
        longest, seq_len = model.max_seq_len, longest_seq_len(config)
        if 0 < longest < seq_len and are_read("training", "data"):
            want = f"at most {longest}, the number of position embeddings of the model"
            key = "training.seq_len" if seq_len == config.training.seq_len else "data.stage"
            problems.add(key, str(seq_len), want, f"seq_len = {longest}")
        counts = (model.n_heads, model.n_kv_heads, model.ffn_dim or 1, model.vocab_size)
    is_in_range = _can_divide(config) and min(counts, default=1) >= 1  # else it is reported
    if are_read("training", "data"):
        check_stages(config, problems)
    if is_in_range and are_read("training", "parallelism"):
        check_mesh(config, model, world_size, problems)
        check_expert_parallel(config, model, world_size, problems)
        check_context_parallel(config, world_size, problems)
        if not any(key.startswith("parallelism.") for key in problems.wrong_keys()):  # the ranks follow from them
            check_batch(config, world_size, problems)
            _check_batches(config, world_size, problems)
        if config.parallelism.fsdp_copy_engines == "always":
            _check_copy_engines(config, world_size, problems)
    if are_read("training", "job", "profiling") and not config.training.tokens:  # else the steps are not known yet
        check_steps(config, problems)
    if are_read("model", "parallelism", "activation_checkpoint", "checkpoint", "float8", "metrics"):
        _check_features(config, model, problems)
    problems.raise_all()


def check_homes(config: Config, origin: Origin) -> None:
    """Refuse a path that begins with the home of somebody who has none, as a container's user without an entry.

    Raises:
        ConfigError: with every such key.
    """
    problems = Problems(origin)
    for key in _FROM_HOME:
        value: str | tuple[str, ...] = attrgetter(key)(config)
        for path in (value,) if isinstance(value, str) else value:
            whose = path.partition("/")[0]
            is_own = whose == "~"
            # As it is where it cannot be expanded; and a folder may be called that.
            if whose.startswith("~") and os.path.expanduser(path) == path and not os.path.lexists(whose):
                want = "a path that leads somewhere; "
                want += f"HOME is not set, and user {os.geteuid()} has none" if is_own else f"no user is {whose[1:]}"
                problems.add(key, show(path), want, f"write the path out{', or set HOME' * is_own}")
    problems.raise_all()


def last_step(config: Config) -> int:
    """Return the step after which a run ends, if no signal ends it before."""
    return min(config.training.steps, config.job.stop_after or config.training.steps)


def sequences_per_step(config: Config, world_size: int | None) -> int | None:
    """Return the sequences of one optimizer step over all ranks; over the fewest, if their number is not known.

    Returns:
        Their number; None if a number that it follows from is out of range.
    """
    if not _can_divide(config):
        return None
    asked = config.training.global_batch_size
    return config.training.local_batch_size * data_ranks(config, world_size) if asked is None else asked


def _can_divide(config: Config) -> bool:
    """Check that every divisor is in range."""
    batch, mesh = config.training, config.parallelism
    data = mesh.data_parallel_replicate_degree, abs(mesh.data_parallel_shard_degree)
    others = mesh.tensor_parallel_degree, mesh.context_parallel_degree, mesh.expert_parallel_degree
    return min(batch.seq_len, batch.local_batch_size, *data, *others) >= 1


def _check_batches(config: Config, world_size: int | None, problems: Problems) -> None:
    """Check the batch of each stage, as that of `[training]` is."""
    for n, _, now in stage_configs(config):
        if n is None or now.training == config.training or not _can_divide(now):
            continue
        own = Problems(Origin(""))
        check_batch(now, world_size, own)
        check_context_parallel(now, world_size, problems, f"data.stage[{n}]")
        tokens, tensor = tokens_of_rank(now), config.parallelism.tensor_parallel_degree
        if tokens % tensor:
            whole = "seq_len × local_batch_size"
            if config.parallelism.context_parallel_degree > 1:
                whole += " / context_parallel_degree"
            want = f"{whole} to be a multiple of tensor_parallel_degree = {tensor}; it is {tokens}"
            problems.add(f"data.stage[{n}].seq_len", str(now.training.seq_len), want, "a larger seq_len or batch")
        for problem in own.found():
            name = problem.where.partition(".")[2]
            problems.add(f"data.stage[{n}].{name}", problem.saw, problem.want, problem.fix)


def check_last_steps(config: Config, origin: Origin) -> None:
    """Check what happens at a given step, now that the steps which `training.tokens` takes are known.

    Raises:
        ConfigError: it is after the last one.
    """
    problems = Problems(origin)
    check_steps(config, problems)
    problems.raise_all()


def check_steps(config: Config, problems: Problems) -> None:
    """Check that all that happens at a given step happens within the run."""
    steps, profiling = config.training.steps, config.profiling
    if steps < 1:
        return  # out of range, and reported
    limit = f"at most training.steps = {steps}"
    if config.job.stop_after > steps:
        fix = "stop_after = 0 (do not stop early)"
        problems.add("job.stop_after", str(config.job.stop_after), limit, fix, against="training.steps")
    last = profiling.start_step + profiling.steps - 1
    if profiling.enable and last > steps:
        want = f"a trace within the run: step {last} is after training.steps = {steps}"
        first = max(1, steps - profiling.steps + 1)
        if profiling.start_step > first:
            fix = f"start_step = {first}"
            problems.add("profiling.start_step", str(profiling.start_step), want, fix, against="training.steps")
        if profiling.steps > steps:
            problems.add("profiling.steps", str(profiling.steps), want, f"steps = {steps}", against="training.steps")


def _check_names(config: Config, problems: Problems) -> None:
    """Check that paths can be files or folders, and that required names are given."""
    name = config.job.name
    if name in ("", ".", "..") or any(mark in name for mark in "/\\\0") or len(name.encode()) > 255:
        want = "the name of a folder, of at most 255 bytes"
        problems.add("job.name", show(name), want, f'name = "{Config().job.name}" (the default)')
    for key, folder in (("job.dump_folder", config.job.dump_folder), ("data.cache_dir", config.data.cache_dir)):
        if "://" in folder:
            fix = "mount what is behind the URL, and name the folder that it is mounted on"
            problems.add(key, show(folder), "a folder of this host's, and no URL", fix)
    require_reachable(config.model.file)
    if config.model.file and not config.model.file.endswith(".py"):
        problems.add("model.file", show(config.model.file), "a Python file", 'file = "my_model.py"')
    elif config.model.file and not os.path.isfile(config.model.file):
        problems.add("model.file", show(config.model.file), "a file that exists", "its path from where you start")
    if config.metrics.wandb != "off" and not config.metrics.wandb_project:
        default = Config().metrics.wandb_project
        fix = f'wandb_project = "{default}" (the default)'
        problems.add("metrics.wandb_project", '""', "the name of a project", fix)
    if config.metrics.tensorboard and importlib.util.find_spec("tensorboard") is None:
        want, fix = "the package tensorboard, which is not installed here", "pip install -e '.[tensorboard]'"
        problems.add("metrics.tensorboard", "true", want, f"{fix}, or tensorboard = false")


def _check_features(config: Config, model: ModelDims | None, problems: Problems) -> None:
    """Check that no feature is asked for that does not exist, or that another key turns off."""
    checkpoint = config.checkpoint
    if config.parallelism.async_tensor_parallel and config.parallelism.tensor_parallel_degree == 1:
        want = "false where parallelism.tensor_parallel_degree is 1: there are no collectives to fuse"
        problems.add("parallelism.async_tensor_parallel", "true", want, "async_tensor_parallel = false")
    chosen = config.activation_checkpoint
    if chosen.recipe == "auto" and chosen.budget_gib is None:
        want = "activation_checkpoint.budget_gib as well: the peak GiB that the run may reserve on each GPU"
        problems.add("activation_checkpoint.recipe", '"auto"', want, "budget_gib = 60.0")
    if chosen.recipe != "auto" and chosen.budget_gib is not None:
        want = f'not given with recipe = {show(chosen.recipe)}: only "auto" uses a budget'
        problems.add("activation_checkpoint.budget_gib", show(chosen.budget_gib), want, 'recipe = "auto"')
    if not checkpoint.enable and isinstance(checkpoint.resume, int):
        want = "checkpoints, but checkpoint.enable = false"
        problems.add("checkpoint.resume", show(checkpoint.resume), want, "checkpoint.enable = true")
    if config.metrics.float8_numerics_freq > 0 and config.float8.recipe == "none":
        want = 'a float8 recipe, but float8.recipe = "none": there is nothing to measure'
        given = str(config.metrics.float8_numerics_freq)
        problems.add("metrics.float8_numerics_freq", given, want, "float8_numerics_freq = 0", against="float8.recipe")


def _check_copy_engines(config: Config, world: int | None, problems: Problems) -> None:
    """Check that there is something to gather, among ranks with peers' memory, and that sums are in its dtype."""
    shards = ranks_of_shards(config, world)
    if shards != -1 and not 2 <= shards <= _MOST_PEERS:
        want = f'"default" unless 2 to {_MOST_PEERS} ranks shard each parameter; here {shards}'
        problems.add("parallelism.fsdp_copy_engines", show("always"), want, 'fsdp_copy_engines = "default"')
    if config.training.mixed_precision_reduce != "float32":
        saw, want = show(config.training.mixed_precision_reduce), '"float32", in which fsdp_copy_engines adds gradients'
        problems.add("training.mixed_precision_reduce", saw, want, 'mixed_precision_reduce = "float32"')


def uses_copy_engines(config: Config, shards: int) -> bool:
    """Return whether copy engines gather and reduce blocks that `shards` ranks split, if GPUs share their memory."""
    on_a_host = shards * config.parallelism.tensor_parallel_degree <= _MOST_PEERS  # of eight GPUs
    possible = shards >= 2 and on_a_host and config.training.mixed_precision_reduce == "float32"
    asked = config.parallelism.fsdp_copy_engines
    return asked == "always" or (asked == "default" and possible)
