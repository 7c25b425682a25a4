"""Check a config, its recipes, its data and its run folder, and print what would run, without starting it.

train.py runs the same checks before it starts. A config that passes with --world N also starts on N processes of this
machine, except for what only the model itself can tell, for which torch is imported: whether patterns, filters and
save-lists match its parameters and layers, and what float8 makes of these. `titanlite plan` says that. Nor does this
look for damage inside a checkpoint's large files, or know for certain whether another job is using the run folder.
"""

import sys
from dataclasses import replace

from titanlite.checkpoint.disk_space import lack_of_disk_space
from titanlite.checkpoint.publish import step_folder
from titanlite.checkpoint.resume import check_quickly, nothing_to_do, other_text, step_to_resume
from titanlite.commands.arguments import Command
from titanlite.config.architectures import n_parameters
from titanlite.config.check import sequences_per_step
from titanlite.config.schema import Config
from titanlite.data.inputs import check_cache
from titanlite.data.order import epochs
from titanlite.data.prepare import whole_from_hub
from titanlite.data.shards import sample_count
from titanlite.errors import ConfigError, TitanliteError
from titanlite.preflight.checked_run import CheckedRun, checked_run
from titanlite.preflight.host_memory import lack_of_memory, shows_gpus
from titanlite.preflight.run_folder import RunFolder

_COMMAND = Command(
    "validate",
    __doc__ or "",
    {"--world N": "number of processes of the run; checks what must divide it, and the budget of `auto`"},
)


def run(argv: list[str]) -> int:
    """Check a config and print a summary of its run."""
    given = _COMMAND.read(argv)
    checked = checked_run(given.flags, given.world)
    found, step, samples = list[TitanliteError](), None, 0
    try:
        check_cache(checked.inputs, checked.config.data)
    except TitanliteError as error:
        found.append(error)
    try:
        checked, step, samples = _foreseen(checked, given.world)
    except TitanliteError as error:
        found.append(error)
    if found:
        raise ConfigError(*(report for error in found for report in error.args)) if len(found) > 1 else found[0]
    sys.stdout.write(summary(checked, given.file, given.world, step, samples) + checked.port.to_paste())
    return 0


def _foreseen(checked: CheckedRun, world: int | None) -> tuple[CheckedRun, int | None, int]:
    """Add what a start would say of this host and the folder; find the step to resume from, the samples until there."""
    config, folder = checked.config, RunFolder.of(checked.config)
    notices, step, samples = folder.foresee(config), None, 0
    warnings = [folder.seems_in_use()]
    if "data.source" not in checked.inputs.shards:
        warnings.append(whole_from_hub(checked.inputs.sources["data.source"], config.data))
    if not shows_gpus():
        warnings.append(lack_of_memory(config, checked.dims))
    if config.checkpoint.enable:
        step = step_to_resume(folder.checkpoints, config.checkpoint.resume)
        warnings.append(lack_of_disk_space(folder.checkpoints, config, checked.dims))
    if step is not None:
        sequences = sequences_per_step(config, world) if world else None
        state = check_quickly(folder.checkpoints, step, config, checked.dims, sequences, checked.saved)
        samples = int(state.get("samples", 0))
        at, shards = step_folder(folder.checkpoints, step), checked.inputs.shards.get("data.source")
        corpus, strict = shards.fingerprint if shards else "", config.job.strict
        tokenizer = "" if strict else checked.inputs.fingerprint  # `checked_run` has refused another
        warnings.append(other_text(at, state, corpus, tokenizer, strict))
        notices += [idle] if (idle := nothing_to_do(config, step)) else []
    hints, warnings = (*checked.hints, *notices), (*checked.warnings, *filter(None, warnings))
    return replace(checked, hints=hints, warnings=warnings), step, samples


def summary(checked: CheckedRun, file: str, world: int | None, step: int | None, samples: int = 0) -> str:
    """Say in a few lines what a run would be."""
    config, inputs = checked.config, checked.inputs
    mesh, batch = config.parallelism, config.training
    replicate, tensor = mesh.data_parallel_replicate_degree, mesh.tensor_parallel_degree
    shard = mesh.data_parallel_shard_degree
    if shard == -1 and world is not None:
        shard = world // (replicate * tensor)
    if shard == -1:
        unit = replicate * tensor
        processes = (
            f"{f'a multiple of {unit}' if unit > 1 else 'any number of'} processes; pass --world N to check a number"
        )
        ranks = None
    else:
        processes, ranks = f"{replicate * shard * tensor} processes", replicate * shard
    sequences = batch.global_batch_size or (batch.local_batch_size * ranks if ranks else None)
    if sequences is None:
        tokens = f"{batch.local_batch_size * batch.seq_len:,} tokens a step on each data-parallel rank"
    else:
        per_step = sequences * batch.seq_len
        tokens = f"{per_step:,} tokens a step, {per_step * batch.steps:,} in {batch.steps:,} steps"
        if ranks:
            micro_steps = sequences // (batch.local_batch_size * ranks)
            tokens += f"; {micro_steps} micro-step{'s' if micro_steps > 1 else ''}"
    limit = f", data.max_tokens {config.data.max_tokens:,}" if config.data.max_tokens else ""
    is_text = inputs.sources["data.source"].kind != "tokens"
    ids = f"tokenizer {config.data.tokenizer}" if is_text else "token files"
    n_tokens, length = inputs.tokens.get("data.source"), ""
    if n_tokens is not None:
        n_samples = sample_count(config.data.source, n_tokens, batch.seq_len)
        length = f"; {n_tokens:,} tokens, {epochs_of(config, n_samples, world, step or 0, samples)}"
    files = "; ".join(f"{key}: {source.count}" for key, source in inputs.sources.items() if source.count)
    shards, chosen = "(all remaining)" if shard == -1 else shard, config.activation_checkpoint
    within = "" if chosen.budget_gib is None else f" within {chosen.budget_gib:g} GiB"
    rows = {
        "model": _model(checked),
        "mesh": f"replicate {replicate} × shard {shards} × tensor {tensor}: {processes}",
        "batch": tokens,
        "recipes": f"activation_checkpoint {chosen.recipe}{within}, float8 {config.float8.recipe}",
        "data": f"{config.data.source}{limit}, {ids}{length}",
        **({"files": files} if files else {}),
        "folder": f"{RunFolder.of(config).path}{'' if step is None else f', resumes from step {step}'}",
    }
    ahead = (source for key, source in inputs.sources.items() if key not in {"data.source", *inputs.shards})
    long = (whole_from_hub(source, config.data) for source in ahead)  # which a run says when it does it
    n = len(checked.warnings)
    lines = [f"{file}: {f'{n} warning' + 's' * (n > 1) if n else 'no problems'}"]
    lines += ["  warning: " + text.replace("\n", "\n  ") for text in checked.warnings]
    lines += [f"  {hint}" for hint in (*checked.port.hint(), *checked.hints, *long) if hint]
    return "\n".join([*lines, *(f"  {name:8}  {text}" for name, text in rows.items())]) + "\n"


def epochs_of(config: Config, n_samples: int, world: int | None, start: int = 0, samples: int = 0) -> str:
    """Say how often a run goes through its text: each data-parallel rank, where the batch follows from their number.

    Args:
        config: of the run, checked.
        n_samples: of `data.source`.
        world: number of processes, if it is known.
        start: step that it resumes from.
        samples: that were trained on until there.
    """
    batch, each = config.training, ""
    sequences = sequences_per_step(config, world) or 1
    if world is None and batch.global_batch_size is None and config.parallelism.data_parallel_shard_degree == -1:
        sequences, each = batch.local_batch_size, ", times the number of data-parallel ranks"
        if samples:  # a run that resumes without a global batch is held to the one it had
            sequences, each = samples // start, ""
    return f"{epochs(batch.steps, sequences, n_samples, start, samples)} in {batch.steps:,} steps{each}"


def _model(checked: CheckedRun) -> str:
    """Return the architecture, its size, and its parameters where they can be counted without importing its file."""
    model, count = checked.config.model, n_parameters(checked.config.model, checked.dims)
    if count is None:
        return f"{model.file} {model.flavor}, not imported"
    over = [f"{k} {v}" for k, v in vars(model).items() if v is not None and k not in ("name", "file", "flavor")]
    other = f" with {', '.join(over)}" if over else ""
    return f"{model.name} {model.flavor}{other}, {count:,} parameters"
