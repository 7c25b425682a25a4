"""Find settings that work, but not as well as they could (hints), or probably not as they were meant (warnings).

`titanlite validate` prints both, and a run logs them before its first step.
"""

import math
import os
from itertools import product
from pathlib import Path
from typing import Any

from titanlite.checkpoint.publish import complete_steps
from titanlite.config.build import show
from titanlite.config.held_out import idle_keys
from titanlite.config.hugging_face import without_place
from titanlite.config.problems import Origin
from titanlite.config.recipe_schema import ModelDims
from titanlite.config.schema import Config
from titanlite.data.inputs import Inputs
from titanlite.data.stages import StageTable
from titanlite.data.tokenizer import ByteTokenizer, few_ids, rows_for, tokenizer_file
from titanlite.hub import folder_of
from titanlite.json_file import parse_json
from titanlite.observe.wandb import has_login
from titanlite.preflight.run_folder import RunFolder


def other_vocabulary(config: Config, inputs: Inputs, vocab_size: int) -> str | None:
    """Return a warning if many ids never occur in the text of the run. Token files are checked when they are read."""
    if inputs.tokenizer is None or not inputs.is_text:
        return None
    n_ids, whose = inputs.tokenizer.vocab_size, f"data.tokenizer = {show(config.data.tokenizer)}"
    fix = "name the model's tokenizer.json in data.tokenizer"
    if not config.checkpoint.initial_load_path:  # else the weights fix the size
        fix += f", or set model.vocab_size = {rows_for(n_ids)}"
    return few_ids(n_ids, whose, vocab_size, fix)


def not_chosen(config: Config, is_own_vocabulary: bool, origin: Origin) -> str | None:
    """Return a warning that lists model, source and tokenizer where the config leaves them to a default, else None.

    `is_own_vocabulary`: the model's vocabulary suits the tokenizer, which then need not be listed.
    """
    chooses = {"model.flavor": config.model.flavor, "data.source": config.data.source}
    if config.data.mixture:
        del chooses["data.source"]
    if not is_own_vocabulary:
        chooses["data.tokenizer"] = config.data.tokenizer
    # The default of validation.source is a held-out part of the default of data.source.
    if config.validation.enable and config.data.source != Config().data.source:
        chooses["validation.source"] = config.validation.source
    left = [f"{key} = {show(value)}" for key, value in chooses.items() if key not in origin.places]
    return f"{', '.join(left)}: not chosen, but the default; give what you mean to use" if left else None


def trained_on(config: Config, inputs: Inputs) -> list[str]:
    """Return a warning for each validation source whose dataset or files are also trained on."""
    trained, said = inputs.trained, list[str]()
    unless = ", unless data.max_tokens leaves it out" if config.data.max_tokens else ""
    held_out = [source for key, source in inputs.sources.items() if key not in trained]
    for one, other in product(trained.values(), held_out):
        if one.dataset and other.dataset:
            what = "the same dataset, config and split" if one.dataset == other.dataset else ""
        else:
            n_shared = len({*one.files} & {*other.files})
            what = f"{n_shared} of its {len(other.files)} files" if n_shared else ""
        if what:
            why = f"is part of {one.key} ({what}): it is trained on{unless}, and its loss is not that of held-out text"
            said.append(f'{other.key} = "{other.name}" {why}')
    return said


def other_tokenizer(config: Config, inputs: Inputs) -> str | None:
    """Return a warning if `data.tokenizer` differs from the tokenizer.json in the folder of the initial weights."""
    theirs = folder_of(config.checkpoint.initial_load_path) / "tokenizer.json"
    if not os.path.isfile(theirs) or not inputs.is_text:
        return None
    try:
        content = theirs.read_bytes()
        if config.data.tokenizer == "bytes":
            is_same = len(parse_json(content)["model"]["vocab"]) == ByteTokenizer.vocab_size
        else:
            ours = tokenizer_file(config.data.tokenizer).read_bytes()
            is_same = ours == content or _of_text(ours) == _of_text(content)
    except (OSError, ValueError, LookupError, TypeError):  # an unreadable file counts as different
        is_same = False
    why = f"is not {theirs}, the tokenizer that the weights of checkpoint.initial_load_path were trained with"
    return None if is_same else f'data.tokenizer = "{config.data.tokenizer}" {why}'


def _of_text(tokenizer: bytes) -> dict[str, Any]:
    """Return the parts of a tokenizer.json that decide a document's ids; an exported file may differ in other parts."""
    content = parse_json(tokenizer)
    content["model"]["dropout"] = None
    return {key: content.get(key) for key in ("added_tokens", "normalizer", "pre_tokenizer", "model")}


def unaligned_vocabulary(config: Config, dims: ModelDims) -> str | None:
    """Return a warning if rows of the bf16 logits do not start at multiples of 16 bytes on each rank."""
    ranks, size = config.parallelism.tensor_parallel_degree, dims.vocab_size
    if config.training.mixed_precision_param != "bfloat16" or size % (8 * ranks) == 0:
        return None
    larger = -(-size // (64 * ranks)) * 64 * ranks
    each = f" on each of {ranks} ranks" if ranks > 1 else ""
    why = f"is not a multiple of {8 * ranks} (16 bytes in bfloat16{each})"
    slow = "on a GPU the head's three matmuls find no aligned kernel and run several times slower"
    is_given = bool(config.checkpoint.initial_load_path)  # the weights fix the number of rows
    fix = "" if is_given else f"; --model.vocab_size {larger} costs less than that"
    return f"model.vocab_size = {size} {why}: {slow}{fix}"


def no_login(config: Config) -> str | None:
    """Return a warning if a run is to be recorded on wandb's server, and this host has no key for it."""
    if config.metrics.wandb != "online" or has_login():
        return None
    why = "no key for wandb's server is found on this host, so that the run is recorded offline"
    return f'metrics.wandb = "online": {why}; `wandb login`, or set WANDB_API_KEY'


def unread_environment(config: Config) -> tuple[str, ...]:
    """Return a hint for each environment variable of wandb that is ignored, as the config has another value."""
    says = {
        "WANDB_PROJECT": ("metrics.wandb_project", config.metrics.wandb_project),
        "WANDB_MODE": ("metrics.wandb", config.metrics.wandb),
        "WANDB_NAME": ("job.name", config.job.name),
        "WANDB_RUN_NAME": ("job.name", config.job.name),
    }
    if config.metrics.wandb == "off":
        return ()
    return tuple(
        f'{name}={given} of the environment is not used; {key} = "{value}" is'
        for name, (key, value) in says.items()
        if (given := os.environ.get(name, value)) != value
    )


def no_export(config: Config, dims: ModelDims) -> str | None:
    """Return a hint if the model cannot be exported: no class of transformers computes its experts or its cap."""
    if config.model.file or not (wrong := without_place(config.model.name, dims)):
        return None
    what = ", ".join(f"{problem.where} = {problem.saw}" for problem in wrong)
    return f"titanlite export will refuse this model: {what} is computed by no class of transformers"


def unvalidated_checkpoints(config: Config) -> str | None:
    """Return a warning if `checkpoint.keep_best` chooses among fewer than half of the run's checkpoints, else None."""
    key, interval, freq = config.checkpoint.keep_best, config.checkpoint.interval, config.validation.freq
    steps = config.training.steps
    # The last step is saved and validated, whatever its number.
    saved, validated = -(-steps // interval), -(-steps // math.lcm(interval, freq))
    if not key or 2 * validated >= saved:
        return None
    why = f"of {saved:,} checkpoints {validated:,} will have this loss, measured at their own step"
    fix = f"validation.freq = {interval}, or a checkpoint.interval that is a multiple of {freq}, validates each"
    return f"checkpoint.keep_best = {show(key)}: {why}; {fix}"


def of_another_folder(config: Config, origin: Origin) -> str | None:
    """Return a warning if the file is the config of another folder with checkpoints than this run's, else None."""
    beside, own = Path(origin.source).resolve().parent, RunFolder.of(config).path.resolve()
    if Path(origin.source).name != "config.toml" or beside == own:
        return None
    if not complete_steps(RunFolder(beside).checkpoints):
        return None
    fix = f"--job.dump_folder {beside.parent} --job.name {beside.name} goes on with it"
    return f"{origin.source} is the config of the run in {beside}, but this run's folder is {own}; {fix}"


def no_validation(config: Config) -> str | None:
    """Return a hint if the config asks for something of each validation, but turns validation off, else None."""
    keys = idle_keys(config)
    return f"without effect, because validation.enable = false: {', '.join(keys)}" if keys else None


def cut_schedule(config: Config, table: StageTable) -> str | None:
    """Return a notice if the run ends during its warm-up or before its last decay of the learning rate, else None."""
    for n, stage in enumerate(config.data.stage):
        if stage.lr_decay_to is not None and stage.from_tokens > table.rows[-1].asked.from_tokens:
            why = f"the run ends after {table.tokens(table.steps):,} tokens, before the learning rate falls"
            return f"data.stage[{n}].lr_decay_to = {stage.lr_decay_to:g} from {stage.from_tokens:,} tokens on: {why}"
    training, scheduler = config.training, config.lr_scheduler
    unit, ends, warmup = "steps", training.steps, scheduler.warmup_steps
    if training.tokens and scheduler.warmup_tokens is not None:
        unit, ends, warmup = "tokens", training.tokens, scheduler.warmup_tokens
    if warmup <= ends:
        return None
    reached = f"the learning rate rises to {ends / warmup:.2g} of optimizer.lr, and no further"
    return f"training.{unit} = {ends} is less than lr_scheduler.warmup_{unit} = {warmup}: {reached}"
