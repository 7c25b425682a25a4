"""The checks of a run before it starts, and what has passed them: a config, its recipes, its data and its folder.

train.py and the commands that take a config begin here. It imports no torch; `check_with_torch.py` has what needs it.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from titanlite import recipes
from titanlite.checkpoint.publish import complete_steps, step_folder
from titanlite.checkpoint.resume import (
    other_text,
    read_state,
    saved_dims,
)
from titanlite.config.architectures import ARCHITECTURES, block_of, linear_layers
from titanlite.config.build import show
from titanlite.config.check import check, check_homes, sequences_per_step
from titanlite.config.command_line import parse_what_is_right
from titanlite.config.config_json import FROM_CHECKPOINT, KEY, check_initial_load_path
from titanlite.config.port import BOS, Port, stands_for
from titanlite.config.problems import COMMAND_LINE, Origin, Place, Problems
from titanlite.config.read import schema_keys
from titanlite.config.recipe_schema import Block, Float8Recipe, ModelDims, SaveList
from titanlite.config.renamed import unread_environment
from titanlite.config.schema import Config
from titanlite.config.weight_decay import parameter_names, without_decay
from titanlite.data.prepare import Inputs, check_inputs
from titanlite.data.tokenizer import has_bos
from titanlite.errors import CheckpointError, ConfigError, RecipeError, TitanliteError
from titanlite.float8.scope import left_alone, obstacle, odd_sizes, require_equal_shards, require_matches
from titanlite.forecast.activation_bytes import HEAD, layout_of
from titanlite.forecast.check_save_list import check_save_list
from titanlite.forecast.suggest_flags import check_budget
from titanlite.preflight.hints import (
    cut_schedule,
    not_chosen,
    other_tokenizer,
    other_training,
    other_vocabulary,
    trained_on,
    unaligned_vocabulary,
)
from titanlite.preflight.run_folder import RunFolder

T = TypeVar("T")

_OF_SHAPES = ("training.seq_len", "training.local_batch_size", "training.mixed_precision_param")


@dataclass(frozen=True)
class CheckedRun:
    """Hold a config that passed every check, with all that it names.

    Attributes:
        save_list: None: it is chosen when the run starts, to stay within `activation_checkpoint.budget_gib`.
        origin: the place of each key.
        port: what a config from torchtitan says and leaves out.
    """

    config: Config
    dims: ModelDims
    save_list: SaveList | None
    float8: Float8Recipe | None
    origin: Origin
    inputs: Inputs
    port: Port
    hints: tuple[str, ...] = ()  # what works, but not as well or under another name by now
    warnings: tuple[str, ...] = ()  # what works, but is hardly what was meant, or will not work for long


def checked_run(argv: Sequence[str], world_size: int | None = None, has_weights: bool = True) -> CheckedRun:
    """Read and check everything that a command line asks for, without importing torch.

    Args:
        argv: arguments of train.py.
        world_size: number of processes; None if it is not known.
        has_weights: whether this host is to have those that the run starts from.

    Returns:
        The config and its recipes. Data is checked too, but not loaded.

    Raises:
        ConfigError: something is wrong; all that can be said of the rest in spite of it is in the message.
        SystemExit: with 0, after `--help`.
    """
    config, problems, port = parse_what_is_right(argv, "train.py FILE [--section.key VALUE ...]")
    origin = problems.origin
    # What is no key may have been meant as any of its section, unless torchtitan has it.
    wrong = set[str]()
    for key in problems.wrong_keys():
        meant = stands_for(key)
        wrong |= {key} if key in schema_keys() else {key.partition(".")[0]} if meant is None else meant
    unread = {key.partition(".")[0] for key in wrong}

    def is_right(*keys: str) -> bool:
        return not any(f"{a}.".startswith(f"{b}.") or f"{b}.".startswith(f"{a}.") for a in keys for b in wrong)

    def attempt(step: Callable[[], T], *needs: str) -> T | None:
        """Carry a check out if all sections and keys that it needs are right; if it fails, the first of them is not."""
        if not is_right(*needs):
            return None
        try:
            return step()
        except TitanliteError as error:
            found = [(report.source, problem) for report in error.args for problem in report.problems]
        for source, p in found:
            is_key = p.where in schema_keys()  # data, say, do not know where it was given
            problems.add(p.where, p.saw, p.want, p.fix, at=None if is_key else Place(source, p.line))
        wrong.update(needs[:1], (problem.where for _, problem in found))
        return None

    dirs, save_name, float8_name = config.job.recipe_dirs, config.activation_checkpoint.recipe, config.float8.recipe
    attempt(lambda: check_homes(config, origin))
    dims = attempt(lambda: _dims(config, origin), "model", "job.recipe_dirs")
    given = (KEY,) if has_weights and config.checkpoint.initial_load_path else ()
    if given and dims is not None and is_right("job"):
        needs = ("checkpoint", "model")
        attempt(lambda: _resumes(config) or check_initial_load_path(config, dims, origin), *needs)
    is_chosen_later, save_list = save_name == recipes.AUTO, None
    if not is_chosen_later:
        save_list = attempt(
            lambda: recipes.load("activation_checkpoint", save_name, dirs, origin),
            *("activation_checkpoint.recipe", "job.recipe_dirs"),
        )
    float8, hints = None, tuple[str, ...]()
    if float8_name != "none":
        float8 = attempt(lambda: recipes.load("float8", float8_name, dirs, origin), "float8.recipe", "job.recipe_dirs")
    if float8 and (name := recipes.current_name("float8", float8_name, dirs)) != float8_name:
        hints = (f'float8.recipe = "{float8_name}" is the old name of "{name}"; it still works, but write the new one',)
        config = replace(config, float8=replace(config.float8, recipe=name))
    attempt(lambda: check(config, dims, world_size, origin, unread))
    vocab_size = dims.vocab_size if dims is not None and is_right("model", *given) else None
    sequences = sequences_per_step(config, world_size) if is_right("training", "parallelism") else None
    inputs = attempt(lambda: check_inputs(config, vocab_size, sequences), "data", "validation")
    if inputs is not None and config.checkpoint.enable and config.job.strict:
        attempt(lambda: _check_tokenizer(config, inputs), "data", "job", "checkpoint")
    if float8:
        needs = ("metrics.float8_numerics_freq", "float8.recipe", "job.strict")
        attempt(lambda: _check_numerics(config, float8, origin), *needs)
    if dims is not None:
        block, shapes = block_of(config.model, dims), ("model", "parallelism", *_OF_SHAPES)
        if not config.model.file:
            attempt(lambda: _check_decay(config, dims, origin), "optimizer.weight_decay_exclude", "model")
        if is_chosen_later and world_size is not None:
            needs = ("activation_checkpoint", "float8", "training", *shapes)
            attempt(lambda: check_budget(config, dims, float8, world_size), *needs)
        if float8 and block is not None:
            attempt(lambda: _check_filters(config, dims, block, origin), "float8", "model")
            attempt(lambda: _check_layers(config, dims, float8, block, origin), "float8", *shapes)
            needs = ("parallelism.async_tensor_parallel", "float8", "job.strict", *shapes)
            attempt(lambda: _check_fused(config, dims, float8, block, origin), *needs)
            if world_size is not None:
                attempt(lambda: _check_gathers(config, dims, float8, world_size), "float8", *shapes)
        if save_list:
            needs = ("activation_checkpoint", "float8.recipe", *shapes)
            attempt(lambda: _check_save_list(config, dims, float8, save_list), *needs)
    named = config.data.tokenizer if "data.tokenizer" in origin.places else port.tokenizer
    is_text = inputs is None or inputs.sources["data.source"].kind != "tokens"
    if BOS in port.left_out and not (is_text and has_bos(named)):
        port = port.without_bos()
    if problems or dims is None or inputs is None:
        said = (*port.hint(), port.to_paste().rstrip())
        raise ConfigError(*problems.error(ConfigError).args, *(text for text in said if text))
    cut = cut_schedule(config)
    is_look = origin.of("training.steps") == COMMAND_LINE  # at a few steps of a long run
    hints += unread_environment(config) + (cut if is_look else ())
    few = other_vocabulary(config, inputs, dims.vocab_size)
    warnings = not_chosen(config, not few, origin) + few + trained_on(config, inputs.sources)
    warnings += unaligned_vocabulary(config, dims) + (() if is_look else cut)
    hints += (inputs.unused,) if inputs.unused else ()
    if given and not _resumes(config):
        warnings += other_tokenizer(config, inputs.sources) + other_training(config)
    return CheckedRun(config, dims, save_list, float8, origin, inputs, port, hints, warnings)


def _resumes(config: Config) -> bool:
    return config.checkpoint.enable and bool(complete_steps(RunFolder.of(config).checkpoints))


def _check_tokenizer(config: Config, inputs: Inputs) -> None:
    """Refuse ids of another tokenizer than the weights know, before its tokens are prepared, which may take hours."""
    root = RunFolder.of(config).checkpoints
    try:
        saved = {
            step_folder(root, step): read_state(step_folder(root, step), step) for step in complete_steps(root)[-1:]
        }
    except CheckpointError:  # what cannot be read is said by those who load it
        return
    for folder, said in saved.items():
        other_text(folder, said["state"], "", inputs.fingerprint, strict=True)


def _dims(config: Config, origin: Origin) -> ModelDims:
    """Return the dimensions of the model; a run that started from a folder has them in its checkpoints."""
    if config.model.flavor == FROM_CHECKPOINT and _resumes(config):
        return saved_dims(RunFolder.of(config).checkpoints, config.checkpoint.resume)
    return recipes.model_dims(config, origin)


def _check_save_list(config: Config, dims: ModelDims, float8: Float8Recipe | None, save_list: SaveList) -> None:
    """Refuse a list that cannot work for the model, if its blocks are known."""
    if block_of(config.model, dims) is not None:
        check_save_list(save_list, dims, layout_of(config, dims, float8), config.job.strict)


def _check_decay(config: Config, dims: ModelDims, origin: Origin) -> None:
    """Refuse patterns that match no parameter of a shipped architecture."""
    names = parameter_names(ARCHITECTURES[config.model.name].block, dims)
    without_decay(config.optimizer.weight_decay_exclude, names, origin)


def _check_filters(config: Config, dims: ModelDims, block: Block, origin: Origin) -> None:
    """Refuse filters that match no layer."""
    require_matches(config.float8.filter_fqns, list(linear_layers(block, dims)), origin)


def _left_alone(config: Config, dims: ModelDims, float8: Float8Recipe, block: Block) -> dict[str, str | None]:
    """Say of each linear layer why a recipe does not convert it, or None."""
    filters = config.float8.filter_fqns
    layers = linear_layers(block, dims, config.parallelism.tensor_parallel_degree)
    tokens = config.training.local_batch_size * config.training.seq_len
    return {name: left_alone(name, shape, tokens, float8, filters) for name, shape in layers.items()}


def _check_layers(config: Config, dims: ModelDims, float8: Float8Recipe, block: Block, origin: Origin) -> None:
    """Refuse a recipe that converts no layer, or not all that the user's own filters leave to it."""
    whys = _left_alone(config, dims, float8, block)
    filters = config.float8.filter_fqns
    odd = odd_sizes({name: why for name, why in whys.items() if why}, filters)
    if config.job.strict and odd and None in whys.values():
        names = list(dict.fromkeys(re.sub(r"^layers\.\d+\.", "", name) for name in odd))
        first, why = next(iter(odd.items()))
        want = f"filters that name what float8.recipe = {show(config.float8.recipe)} leaves alone: {first} ({why})"
        problems = Problems(origin)
        fix = f"filter_fqns = {show([*filters, *names])}; job.strict = false trains with what is converted"
        problems.add("float8.filter_fqns", show(filters), want, fix, against="float8.recipe")
        problems.raise_all(RecipeError)
    if config.job.strict and None not in whys.values():
        first, why = next(iter(whys.items()))
        want = f"at least one linear layer to convert; all are skipped, e.g. {first} ({why})"
        fix = "change float8.recipe or what the reason names; job.strict = false trains without float8"
        problems = Problems(origin)
        problems.add("float8.recipe", show(config.float8.recipe), want, fix)
        problems.raise_all(RecipeError)


def _check_fused(config: Config, dims: ModelDims, float8: Float8Recipe, block: Block, origin: Origin) -> None:
    """Refuse to fuse collectives with products that take none, where a recipe leaves no others."""
    is_asked, why = config.job.strict and config.parallelism.async_tensor_parallel, obstacle(float8)
    if is_asked and why and not any(_left_alone(config, dims, float8, block).values()):
        recipe = show(config.float8.recipe)
        want = f"false where all linear layers are in float8 and float8.recipe = {recipe} {why}"
        fix = "async_tensor_parallel = false; job.strict = false trains with nothing fused"
        problems = Problems(origin)
        problems.add("parallelism.async_tensor_parallel", "true", want, fix, against="float8.recipe")
        problems.raise_all()


def _check_numerics(config: Config, float8: Float8Recipe, origin: Origin) -> None:
    """Refuse to measure outputs in float8 where there are none."""
    if config.job.strict and config.metrics.float8_numerics_freq and float8.input.output == "none":
        given, recipe = str(config.metrics.float8_numerics_freq), show(config.float8.recipe)
        want = f'0 with float8.recipe = {recipe}, whose input.output is "none": no output is in float8'
        problems = Problems(origin)
        problems.add("metrics.float8_numerics_freq", given, want, "float8_numerics_freq = 0", against="float8.recipe")
        problems.raise_all()


def _check_gathers(config: Config, dims: ModelDims, float8: Float8Recipe, world: int) -> None:
    """Refuse shards that FSDP cannot gather in float8."""
    layout = layout_of(config, dims, float8)
    if float8.fsdp_all_gather != "float8":
        return
    t = layout.tensor_parallel
    rows = {name: shape[0] for name, shape in layout.block.weights(dims, t).items() if layout.is_own(name)}
    if layout.is_own(HEAD) and not dims.tied_embeddings:
        rows[HEAD] = dims.vocab_size // t
    require_equal_shards(rows, world // t // config.parallelism.data_parallel_replicate_degree)
