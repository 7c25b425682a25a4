"""Check a run before it starts: its config, recipes, data and folder.

train.py and the commands that take a config begin here. torch is imported only if `optimizer.file` is set.
`training/assemble.py` makes the checks that need the model.
"""

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from titanlite import recipes
from titanlite.checkpoint.publish import complete_steps, step_folder
from titanlite.checkpoint.resume import dims_of, other_text, start_of
from titanlite.checkpoint.saved_state import SavedState, read_state
from titanlite.config.build import show
from titanlite.config.check import check_homes, check_last_steps, config_problems
from titanlite.config.command_line import parse_what_is_right
from titanlite.config.config_json import KEY
from titanlite.config.problems import COMMAND_LINE, Origin, Place, Problems
from titanlite.config.recipe_schema import Float8Recipe, ModelDims, OptimizerRecipe, OwnRule, SaveList
from titanlite.config.schema import FROM_CHECKPOINT, Config, schema_keys
from titanlite.config.stages import sequences_per_step
from titanlite.data.inputs import Inputs, check_inputs, check_named_inputs
from titanlite.data.stages import StageTable, stage_table
from titanlite.errors import ConfigError, ErrorReport, TitanliteError
from titanlite.evaluation.inputs import check_evaluation
from titanlite.file_system import MIRROR, filesystem
from titanlite.preflight.hints import (
    cut_schedule,
    no_export,
    no_validation,
    not_chosen,
    of_another_folder,
    other_tokenizer,
    other_vocabulary,
    trained_on,
    unaligned_vocabulary,
    unread_environment,
    unvalidated_checkpoints,
)
from titanlite.preflight.hub_names import Pin, names_hub, pin_names
from titanlite.preflight.run_folder import RunFolder
from titanlite.preflight.start import (
    branch_of,
    check_branch_trains,
    check_first_state,
    check_sources,
    newest_state,
)
from titanlite.preflight.take_up_mirror import take_up_mirror

T = TypeVar("T")
VERBOSE = "--verbose"  # of train.py and `titanlite train`; no key, since it changes nothing of the run
VERBOSE_HELP = "print the whole receipt and, on a terminal, each step"


@dataclass(frozen=True)
class CheckedRun:
    """A config that passed every check, with the recipes and inputs that it names."""

    config: Config
    dims: ModelDims
    save_list: SaveList | None  # None: chosen when the run starts, to fit `activation_checkpoint.budget_gib`
    float8: Float8Recipe | None
    optimizer: OptimizerRecipe
    origin: Origin  # where each key is set
    inputs: Inputs
    table: StageTable  # stages of the run, past ones as they were trained
    hints: tuple[str, ...] = ()  # notes on settings that work, but have no effect or a drawback
    warnings: tuple[str, ...] = ()  # notes on settings that work, but are probably not as meant
    saved: SavedState | None = None  # the state in the run's newest checkpoint, without tensors
    pins: tuple[Pin, ...] = ()  # of names of the hub


class _Checks:
    """Runs the checks of a config, each only if the keys that it needs are right."""

    def __init__(self, problems: Problems) -> None:
        self.problems, self.origin = problems, problems.origin
        # Wrong keys. An unknown key makes its section wrong, since any key of the section may have been meant.
        self.wrong = {key if key in schema_keys() else key.partition(".")[0] for key in problems.wrong_keys()}

    def are_right(self, *keys: str) -> bool:
        """Return whether nothing is wrong with these keys or sections, nor with any key of these sections."""
        return not any(f"{a}.".startswith(f"{b}.") or f"{b}.".startswith(f"{a}.") for a in keys for b in self.wrong)

    def attempt(self, check: Callable[[], T], *needs: str) -> T | None:
        """Return the result of a check, or None if it fails or if one of the keys and sections that it needs is wrong.

        A failure is added to the problems, and makes the first of `needs` wrong.
        """
        if not self.are_right(*needs):
            return None
        try:
            return check()
        except TitanliteError as error:
            if not all(isinstance(message, ErrorReport) for message in error.args):
                raise  # a text without problems that could stand among others
            found = [(report.source, problem) for report in error.args for problem in report.problems]
        for source, p in found:
            # A check may not know where its key was set. The file has a line of `data.mixture[0].weight`. For
            # `validation.sources.NAME` and `data.mixture.NAME` it has only the line of the list.
            key = p.where if p.where in {*schema_keys(), *self.origin.places} else p.where.rpartition(".")[0]
            is_known = key in schema_keys() or key in self.origin.places
            place = self.origin.of(key) if is_known else Place(source, p.line)
            self.problems.add(p.where, p.saw, p.want, p.fix, at=place)
        self.wrong.update(needs[:1], (problem.where.partition("[")[0] for _, problem in found))
        return None

    def attempt_names(self, config: Config) -> None:
        """Check that sources and tokenizer are there, where other mistakes forbid to look into them."""
        self.attempt(lambda: check_named_inputs(config, self.problems.wrong_keys()))


def checked_run(
    argv: Sequence[str], world_size: int | None = None, has_weights: bool = True, is_start: bool = False
) -> CheckedRun:
    """Read and check everything that the arguments of train.py ask for; data is checked, not loaded.

    Args:
        argv: command-line arguments of train.py.
        world_size: number of processes; None: unknown.
        has_weights: whether the weights that the run starts from must be on this host.
        is_start: whether the run is to be started: it takes up its mirror, and records the commits of names of the hub.

    Raises:
        ConfigError: with all problems found. Checks that need a wrong key are left out.
        SystemExit: with 0, after `--help`.
    """
    usage = f"train.py FILE [--section.key VALUE ...] [{VERBOSE}]\n\n  {VERBOSE}  {VERBOSE_HELP}"
    config, problems = parse_what_is_right(argv, usage)
    checks, origin = _Checks(problems), problems.origin
    unread, attempt = {key.partition(".")[0] for key in checks.wrong}, checks.attempt
    attempt(lambda: check_homes(config, origin))
    config, pins, (taken, not_taken) = _from_afar(config, checks, world_size, unread, has_weights, is_start)
    dims = attempt(lambda: _dims_of_run(config, origin), "model", "job.recipe_dirs")
    attempt(lambda: config_problems(config, dims, world_size, origin, unread).raise_all())
    if url := config.checkpoint.mirror:
        attempt(lambda: filesystem(url, MIRROR), MIRROR)  # of a protocol whose package is here
    given = (KEY,) if has_weights and config.checkpoint.initial_load_path else ()
    if given and dims is not None and checks.are_right("job"):
        needs = ("checkpoint", "model")
        attempt(lambda: resumes(config) or check_first_state(config, dims, origin, world_size), *needs)
    save_list = float8 = None
    dirs, needs = config.job.recipe_dirs, "job.recipe_dirs"
    if (name := config.activation_checkpoint.recipe) != recipes.AUTO:  # else it is chosen when the run starts
        key = "activation_checkpoint.recipe"
        save_list = attempt(lambda: recipes.load("activation_checkpoint", name, dirs, origin), key, needs)
    if (own := config.float8.recipe) != "none":
        float8 = attempt(lambda: recipes.load("float8", own, dirs, origin), "float8.recipe", needs)
    needs = ("data.stage", "data.mixture", "training", "parallelism", "job")
    found, steps_given = attempt(lambda: newest_state(config), "job"), config.training.steps
    table = attempt(lambda: stage_table(config, world_size, found[1].past if found else None), *needs)
    if table is not None and config.training.tokens:
        config = replace(config, training=replace(config.training, steps=table.steps))
        attempt(lambda: check_last_steps(config, origin), "profiling")
    if given and table is not None:
        attempt(lambda: resumes(config) or check_branch_trains(config), "training", "checkpoint", "job")
    vocab_size = dims.vocab_size if dims is not None and checks.are_right("model", *given) else None
    sequences = sequences_per_step(config, world_size) if checks.are_right("training", "parallelism") else None
    unit_len = None if table is None else table.unit_len
    if not checks.are_right("data", "validation"):
        checks.attempt_names(config)
    inputs = attempt(lambda: check_inputs(config, vocab_size, sequences, unit_len), "data", "validation")
    attempt(lambda: check_evaluation(config, inputs, vocab_size, origin), "evaluation")
    repeated = list[str]()
    if inputs is not None and table is not None:
        repeated = attempt(lambda: check_sources(config, inputs, table), "data.mixture") or []
    if found and inputs is not None and config.job.strict and has_weights:  # before tokens are prepared for hours
        attempt(lambda: other_text(*found, {}, inputs.fingerprint, strict=True), "data", "job", "checkpoint")
    saved = found[1] if found and found[0].parent == RunFolder.of(config).checkpoints else None
    needs = ("metrics.float8_numerics_freq", "float8.recipe", "job.strict")
    is_measured = config.metrics.float8_numerics_freq and config.job.strict and checks.are_right(*needs)
    if float8 and is_measured and float8.input.output == "none":
        want = f'0 with float8.recipe = {show(own)}, whose input.output is "none": no output is in float8'
        problems.about(config)(needs[0], want, "float8_numerics_freq = 0", needs[1])
    optimizer, needs = None, ("optimizer.recipe", "job.recipe_dirs")
    if config.optimizer.file:
        attempt(lambda: recipes.require("optimizer", config.optimizer.recipe, config.job.recipe_dirs, origin), *needs)
    if not (problems and config.optimizer.file):  # importing the file takes seconds
        optimizer = attempt(lambda: _optimizer(config, origin), *needs, "optimizer.file")
    if problems or dims is None or optimizer is None or inputs is None or table is None:
        raise problems.error(ConfigError)
    cut, few = cut_schedule(config, table), other_vocabulary(config, inputs, dims.vocab_size)
    is_look = origin.of("training.steps") == COMMAND_LINE  # a flag asks for a few steps of a long run
    warnings = [not_chosen(config, not few, origin), few, *inputs.warnings, *trained_on(config, inputs)]
    warnings += repeated
    warnings += [unaligned_vocabulary(config, dims), unvalidated_checkpoints(config), None if is_look else cut]
    warnings.append(of_another_folder(config, origin))
    if given and not resumes(config) and branch_of(config) is None:
        warnings.append(other_tokenizer(config, inputs))
    steps_hint = None
    if config.training.tokens and "training.steps" in origin.places and steps_given != table.steps:
        steps_hint = f"training.steps = {steps_given} is not looked at: training.tokens takes {table.steps}"
    hints = [steps_hint, no_validation(config), no_export(config, dims), *unread_environment(config), inputs.unused]
    hints += [*(pin.notice for pin in pins), cut if is_look else None, *taken]
    warnings += not_taken
    said, warned = (tuple(filter(None, texts)) for texts in (hints, warnings))
    return CheckedRun(config, dims, save_list, float8, optimizer, origin, inputs, table, said, warned, saved, pins)


def _from_afar(
    config: Config, checks: _Checks, world: int | None, unread: Collection[str], has_weights: bool, is_start: bool
) -> tuple[Config, tuple[Pin, ...], tuple[list[str], list[str]]]:
    """Take up the mirror and resolve names of the hub, but first raise every problem that is known without the network.

    Returns:
        The config with commits, a pin for each name, and (notices, warnings) of the mirror.
    """
    takes_up = is_start and config.checkpoint.mirror
    if not takes_up and not names_hub(config):
        return config, (), ([], [])
    checks.attempt(lambda: config_problems(config, None, world, checks.origin, unread).raise_all())

    def reach() -> tuple[Config, tuple[Pin, ...], tuple[list[str], list[str]]]:
        said = take_up_mirror(config) if takes_up else ([], [])
        return *pin_names(config, is_fresh=not resumes(config), has_weights=has_weights, is_start=is_start), said

    found = None if checks.problems else checks.attempt(reach)
    if found is None:
        checks.attempt_names(config)
        raise checks.problems.error(ConfigError)
    return found


def _optimizer(config: Config, origin: Origin) -> OptimizerRecipe:
    """Load the optimizer's recipe, importing `optimizer.file`; refuse a file whose rules the recipe does not use."""
    own: Mapping[str, OwnRule] = {}
    if config.optimizer.file:
        from titanlite.parallel.process_group import choose_device  # imports torch
        from titanlite.update_rules.find import rules_of_file

        if "LOCAL_RANK" in os.environ:  # the file may initialise CUDA, which must be on this process's GPU
            choose_device()
        own = rules_of_file(config.optimizer.file, origin)
    found = recipes.load("optimizer", config.optimizer.recipe, config.job.recipe_dirs, origin, own)
    if own and not any(group.rule in own for group in found.groups.values()):
        problems, name = Problems(origin), next(iter(own))
        want = f"a file whose rules the recipe uses; no group of {config.optimizer.recipe} has rule = {show(name)}"
        fix = f"optimizer.recipe = one with a group whose rule is {show(name)}, or remove optimizer.file"
        problems.add("optimizer.file", show(config.optimizer.file), want, fix, against="optimizer.recipe")
        problems.raise_all()
    return found


def resumes(config: Config) -> bool:
    """Return whether a start of the run would resume from one of its own checkpoints."""
    return config.checkpoint.enable and bool(complete_steps(RunFolder.of(config).checkpoints))


def _dims_of_run(config: Config, origin: Origin) -> ModelDims:
    """Return the dimensions of the model. With flavor `FROM_CHECKPOINT` a saved checkpoint precedes initial weights."""
    if config.model.flavor == FROM_CHECKPOINT and (found := start_of(RunFolder.of(config).checkpoints, config)):
        folder = step_folder(*found)
        return dims_of(folder, read_state(folder, found[1]))
    return recipes.model_dims(config, origin)
