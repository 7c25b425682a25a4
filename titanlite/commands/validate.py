"""Check a config, its recipes, its data and its run folder, and print what would run, without starting it.

train.py runs the same checks before it starts. Mistakes in keys, types, ranges, paths and data are reported within a
second. Then the model is assembled, without memory, for the checks that need it. A config that passes with --world N
also starts on N processes of this machine. Two things remain uncertain: whether a checkpoint's large files are damaged
inside, and whether another job is using the run folder.
"""

import sys
from dataclasses import replace
from typing import TYPE_CHECKING

from titanlite.checkpoint.disk_space import lack_of_disk_space
from titanlite.checkpoint.optimizer_state import afresh, changed_file, leaves_state, taken_by_branch
from titanlite.checkpoint.publish import step_folder
from titanlite.checkpoint.resume import changed_average, check_state, nothing_to_do, other_text, start_of
from titanlite.checkpoint.saved_state import read_state
from titanlite.commands.arguments import Command
from titanlite.commands.at_work import at_work
from titanlite.config.stages import follows_ranks, sequences_per_step, source_keys
from titanlite.data.inputs import check_cache
from titanlite.data.mixture import Mixture
from titanlite.data.order import epochs, order_in_words
from titanlite.data.prepare import whole_from_hub
from titanlite.data.shards import sample_count
from titanlite.data.stages import StageTable
from titanlite.errors import TitanliteError, Together
from titanlite.hub import missing_weights
from titanlite.preflight.checked_run import CheckedRun, checked_run
from titanlite.preflight.hints import no_login
from titanlite.preflight.host_memory import lack_of_memory, shows_gpus
from titanlite.preflight.run_folder import RunFolder
from titanlite.training.schedule import change_of_rate

if TYPE_CHECKING:
    from titanlite.training.assemble import Foreseen

COMMAND = Command(
    "validate",
    __doc__ or "",
    {"--world N": "number of processes of the run; checks what must divide it, and the budget of `auto`"},
)


def run(argv: list[str]) -> int:
    """Check a config and print a summary of its run."""
    given = COMMAND.read(argv)
    checked = checked_run(given.flags, given.world)
    checks, step, samples, foreseen = Together(), None, 0, None
    checks.attempt(lambda: check_cache(checked.inputs, checked.config.data))
    with at_work("assembling the model for what only it can tell"):
        from titanlite.training.assemble import try_assembly

        try:
            foreseen = try_assembly(checked, given.world)
            checked, step, samples = _of_host_and_folder(checked, given.world, foreseen)
        except TitanliteError as error:
            checks.errors.append(error)
    checks.raise_all()
    assert foreseen is not None  # noqa: S101
    sys.stdout.write(summary(checked, foreseen, given.file, given.world, step, samples))
    return 0


def _of_host_and_folder(
    checked: CheckedRun, world: int | None, foreseen: "Foreseen"
) -> tuple[CheckedRun, int | None, int]:
    """Check this host and the run folder as a start does, and add the hints and warnings to `checked`.

    Returns:
        The run with them, the step to resume from (None: from the beginning), and the samples trained on up to it.
    """
    config, folder = checked.config, RunFolder.of(checked.config)
    notices, step, samples = folder.foresee(config), None, 0
    warnings = [folder.seems_in_use(), no_login(config), foreseen.warning]
    ahead = (source for key, source in checked.inputs.trained.items() if key not in checked.inputs.shards)
    warnings += [whole_from_hub(source, config.data) for source in ahead]
    if not shows_gpus():
        warnings.append(lack_of_memory(config, foreseen.trained))
    found, path = start_of(folder.checkpoints, config), config.checkpoint.initial_load_path
    if found is None and (missing := missing_weights(path)):
        n = f"{len(missing)} file{'s' * (len(missing) > 1)}"
        notices.append(f"{n} of weights of {path} will be fetched at the start, and then compared with the model")
    if config.checkpoint.enable:
        warnings.append(lack_of_disk_space(folder.checkpoints, config, foreseen.saved))
    if found is not None:
        at, done, own_rules = step_folder(*found), found[1], checked.optimizer.own_rules
        state = checked.saved or read_state(at, done)
        if is_own := found[0] == folder.checkpoints:  # `checked_run` has checked the state of another run
            shards, strict, step, samples = checked.inputs.shards, config.job.strict, done, state.samples
            check_state(at, state, config, checked.dims, sequences_per_step(config, world) if world else None)
            keys = {name: key for name, (key, _) in source_keys(config).items() if key in shards}
            corpora = {name: shards[key].fingerprint for name, key in keys.items()}
            tokenizer = "" if strict else checked.inputs.fingerprint  # `checked_run` has compared it if strict
            warnings.append(other_text(at, state, corpora, tokenizer, strict))
        is_fresh = leaves_state(at, state, config.optimizer, foreseen.rules, own_rules)
        notices += [f"goes on from {at}: {taken_by_branch(is_fresh)}"] * (not is_own)
        change = nothing_to_do(config, done) or change_of_rate(config, done, state.learning_rate, checked.table)
        notices += [*filter(None, [change]), *changed_average(state, config, done)]
        notices += [*changed_file(state, own_rules, done), *[afresh(at)] * is_fresh]
    hints, warnings = (*checked.hints, *notices, *checked.table.notes), (*checked.warnings, *filter(None, warnings))
    return replace(checked, hints=hints, warnings=warnings), step, samples


def summary(
    checked: CheckedRun, foreseen: "Foreseen", file: str, world: int | None, step: int | None, samples: int = 0
) -> str:
    """Return a summary of the run that would start, resuming from `step` (None: from the beginning) after `samples`."""
    config, inputs = checked.config, checked.inputs
    mesh = config.parallelism
    replicate, tensor = mesh.data_parallel_replicate_degree, mesh.tensor_parallel_degree
    context = mesh.context_parallel_degree
    shard, unit = mesh.data_parallel_shard_degree, replicate * tensor * context
    shard = world // unit if shard == -1 and world is not None else shard
    ranks = None if shard == -1 else replicate * shard
    processes = f"a multiple of {unit}" if unit > 1 else "any number of"
    processes = f"{unit * shard} processes" if ranks else f"{processes} processes; pass --world N to check a number"
    split = f" × context {context}" if context > 1 else ""
    limit = f", data.max_tokens {config.data.max_tokens:,}" if config.data.max_tokens else ""
    ids = f"tokenizer {config.data.tokenizer}" if inputs.is_text else "token files"
    n_tokens, length = inputs.tokens.get("data.source"), ""
    if n_tokens is not None:
        unit_len = checked.table.unit_len
        is_packed = config.data.packing == "best_fit"  # packed now or later, into at least this many samples
        n_samples = -(-n_tokens // unit_len) if is_packed else sample_count(config.data.source, n_tokens, unit_len)
        length = f"; {n_tokens:,} tokens, {epochs_of(checked, n_samples, world, step or 0, samples)}"
    files = "; ".join(f"{key}: {source.count}" for key, source in inputs.sources.items() if source.count)
    stages = stages_in_words(checked.table)
    shards, chosen = "(all remaining)" if shard == -1 else shard, config.activation_checkpoint
    ep = mesh.expert_parallel_degree
    experts = f" (experts over {ep})" if ep > 1 else ""
    within = "" if chosen.budget_gib is None else f" within {chosen.budget_gib:g} GiB"
    rows = {
        "model": _model(checked, foreseen),
        "mesh": f"replicate {replicate} × shard {shards}{experts}{split} × tensor {tensor}: {processes}",
        "batch": _batch_in_words(checked, ranks, world),
        "recipes": f"activation_checkpoint {chosen.recipe}{within}, float8 {config.float8.recipe}, "
        f"optimizer {config.optimizer.recipe}",
        "data": f"{_mixture(checked) or config.data.source + limit}, {ids}{length}",
        "order": _order(checked, world) if config.data.shuffle_window else "",
        "stages": f"{stages}: sequences × tokens of a step; titanlite data shows their weights and rates"
        * bool(stages),
        "files": files,
        "folder": f"{RunFolder.of(config).path}{'' if step is None else f', resumes from step {step}'}",
    }
    ahead = (source for key, source in inputs.sources.items() if key not in {*inputs.trained, *inputs.shards})
    long = (whole_from_hub(source, config.data) for source in ahead)  # a run warns of it when it tokenizes the source
    n = len(checked.warnings)
    lines = [f"{file}: {f'{n} warning' + 's' * (n > 1) if n else 'no problems'}"]
    lines += ["  warning: " + text.replace("\n", "\n  ") for text in checked.warnings]
    lines += [f"  {hint}" for hint in (*checked.hints, *long) if hint]
    return "\n".join([*lines, *(f"  {name:8}  {text}" for name, text in rows.items() if text)]) + "\n"


def _batch_in_words(checked: CheckedRun, ranks: int | None, world: int | None) -> str:
    """Return in words the tokens of a step (of each stage) and of the run. `ranks`: data-parallel ranks, if known."""
    config, table, batch = checked.config, checked.table, checked.config.training
    fewest = ", on the fewest ranks; pass --world N" * follows_ranks(config, world)
    if config.data.stage or (len(table.rows) > 1 and not fewest):
        each = dict.fromkeys(f"{row.asked.tokens_per_step:,}" for row in table.rows)
        return f"{', then '.join(each)} tokens a step, {table.tokens(batch.steps):,} in {batch.steps:,} steps{fewest}"
    sequences = batch.global_batch_size if ranks is None else sequences_per_step(config, world)
    if sequences is None:
        return f"{batch.local_batch_size * batch.seq_len:,} tokens a step on each data-parallel rank"
    per_step = sequences * batch.seq_len
    tokens = f"{per_step:,} tokens a step, {per_step * batch.steps:,} in {batch.steps:,} steps"
    if ranks:
        micro_steps = sequences // (batch.local_batch_size * ranks)
        tokens += f"; {micro_steps} micro-step{'s' if micro_steps > 1 else ''}"
    return tokens


def epochs_of(checked: CheckedRun, n_samples: int, world: int | None, start: int = 0, samples: int = 0) -> str:
    """Return in words how many epochs a run trains; per data-parallel rank, if the batch depends on their number.

    Args:
        checked: the run.
        n_samples: samples of `data.source`, each of the stage table's `unit_len` tokens.
        world: number of processes, if it is known.
        start: step that the run resumes from; 0: from the beginning.
        samples: samples that the run has trained on up to `start`.
    """
    config, table, batch, each = checked.config, checked.table, checked.config.training, ""
    tokens = table.tokens(batch.steps)
    if follows_ranks(config, world) and samples and not config.data.stage:
        # Without a global_batch_size, a run that resumes must keep the global batch that it had.
        tokens = table.tokens(start) + max(0, batch.steps - start) * (samples // start) * batch.seq_len
    elif follows_ranks(config, world):
        one_batch = not config.data.stage
        each = ", times the number of data-parallel ranks" if one_batch else ", on the fewest ranks; pass --world N"
    return f"{epochs(tokens / (n_samples * table.unit_len))} in {batch.steps:,} steps{each}"


def _order(checked: CheckedRun, world: int | None) -> str:
    """Return in words how sources are shuffled, and when they are tokenized."""
    config, table = checked.config, checked.table
    per_step = 0 if follows_ranks(config, world) else table.row(1).asked.tokens_per_step
    order = order_in_words(config.data.shuffle_window, table.unit_len, per_step)
    if config.data.prepare == "first":
        return order
    lead = config.data.prepare_lead
    return f"{order}; tokenized in the background" + (f", at most {lead:,} tokens ahead" if lead else "")


def _mixture(checked: CheckedRun) -> str:
    """Return the sources of a mixture, each with its share of the run's tokens and its epochs; "" without one."""
    config, table = checked.config, checked.table
    if not config.data.mixture:
        return ""
    tokens, unit_len = checked.inputs.tokens, table.unit_len
    keys = {name: key for name, (key, _) in source_keys(config).items() if key in tokens}
    mixture = Mixture(table, {name: max(1, (tokens[key] - 1) // unit_len) for name, key in keys.items()})
    taken, passes, total = mixture.tokens(table.steps), mixture.epochs(table.steps), max(1, table.tokens(table.steps))
    return ", ".join(
        f"{source.name} {taken[source.name] / total:.2%}"
        + (f" ({epochs(passes[source.name])})" if source.name in passes else "")
        for source in config.data.mixture
    )


def stages_in_words(table: StageTable) -> str:
    """Return the shape of a step (sequences × tokens) and the first step of each stage; "" for a single stage."""
    shapes = [f"{row.asked.sequences:,} × {row.asked.seq_len:,} from step {row.from_step + 1:,}" for row in table.rows]
    return ", ".join(shapes) if len(shapes) > 1 else ""


def _model(checked: CheckedRun, foreseen: "Foreseen") -> str:
    """Return in words the architecture, its flavor and changed keys, and the number of its parameters."""
    model, n, active = checked.config.model, foreseen.n_elements, foreseen.n_active
    over = [f"{k} {v}" for k, v in vars(model).items() if v is not None and k not in ("name", "file", "flavor")]
    other = f" with {', '.join(over)}" if over else ""
    used = f", of which a token uses {active:,}" if active < n else ""
    return f"{model.file or model.name} {model.flavor}{other}, {n:,} parameters{used}"
