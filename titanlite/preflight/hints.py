"""Name what works in a config, but not as well as it could (hints), or not as was probably meant (warnings).

`titanlite validate` prints them, and a run says them before its first step.
"""

import os
from itertools import product
from pathlib import Path
from typing import Any

from titanlite.config.build import show
from titanlite.config.hugging_face import without_place
from titanlite.config.problems import Origin
from titanlite.config.recipe_schema import ModelDims
from titanlite.config.schema import Config
from titanlite.data.inputs import Inputs
from titanlite.data.stages import StageTable
from titanlite.data.tokenizer import ByteTokenizer, few_ids, rows_for
from titanlite.json_file import parse_json
from titanlite.observe.wandb import has_login


def other_vocabulary(config: Config, inputs: Inputs, vocab_size: int) -> str | None:
    """Say so if many ids of the model can never occur in its text; of token files, known once they were read."""
    if inputs.tokenizer is None or not inputs.is_text:
        return None
    n_ids, whose = inputs.tokenizer.vocab_size, f"data.tokenizer = {show(config.data.tokenizer)}"
    fix = "name the model's tokenizer.json in data.tokenizer"
    if not config.checkpoint.initial_load_path:  # whose weights have so many rows
        fix += f", or set model.vocab_size = {rows_for(n_ids)}"
    return few_ids(n_ids, whose, vocab_size, fix)


def not_chosen(config: Config, is_own_vocabulary: bool, origin: Origin) -> str | None:
    """Name what makes a run the one that is meant, and was left to a default: model, source, tokenizer."""
    chooses = {"model.flavor": config.model.flavor, "data.source": config.data.source}
    if config.data.mixture:
        del chooses["data.source"]
    if not is_own_vocabulary:
        chooses["data.tokenizer"] = config.data.tokenizer
    if config.validation.enable and config.data.source != Config().data.source:  # that which is held out of it
        chooses["validation.source"] = config.validation.source
    left = [f"{key} = {show(value)}" for key, value in chooses.items() if key not in origin.places]
    return f"{', '.join(left)}: not chosen, but the default; give what you mean to train" if left else None


def trained_on(config: Config, inputs: Inputs) -> list[str]:
    """Say so if text that a run is validated on is trained on, where that can be seen."""
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
    """Say so if the text is to be encoded by other ids than those that the weights know, where that can be seen."""
    theirs = Path(os.path.expanduser(config.checkpoint.initial_load_path)) / "tokenizer.json"
    if not os.path.isfile(theirs) or not inputs.is_text:
        return None
    try:
        content = theirs.read_bytes()
        if config.data.tokenizer == "bytes":
            is_same = len(parse_json(content)["model"]["vocab"]) == ByteTokenizer.vocab_size
        else:
            ours = Path(os.path.expanduser(config.data.tokenizer)).read_bytes()
            is_same = ours == content or _of_text(ours) == _of_text(content)
    except (OSError, ValueError, LookupError, TypeError):  # it is none that this run could read, nor needs to
        is_same = False
    why = f"is not {theirs}, the tokenizer that the weights of checkpoint.initial_load_path were trained with"
    return None if is_same else f'data.tokenizer = "{config.data.tokenizer}" {why}'


def _of_text(tokenizer: bytes) -> dict[str, Any]:
    """Return what a tokenizer.json says of a document's ids: an exported one may differ in the rest."""
    content = parse_json(tokenizer)
    content["model"]["dropout"] = None
    return {key: content.get(key) for key in ("added_tokens", "normalizer", "pre_tokenizer", "model")}


def unaligned_vocabulary(config: Config, dims: ModelDims) -> str | None:
    """Say so if the rows of the head's bf16 logits do not start, on each rank, at multiples of 16 bytes."""
    ranks, size = config.parallelism.tensor_parallel_degree, dims.vocab_size
    if config.training.mixed_precision_param != "bfloat16" or size % (8 * ranks) == 0:
        return None
    larger = -(-size // (64 * ranks)) * 64 * ranks
    each = f" on each of {ranks} ranks" if ranks > 1 else ""
    why = f"is not a multiple of {8 * ranks} (16 bytes in bfloat16{each})"
    slow = "on a GPU the head's three matmuls find no aligned kernel and run several times slower"
    is_given = bool(config.checkpoint.initial_load_path)  # with the weights, whose rows are so many
    fix = "" if is_given else f"; --model.vocab_size {larger} costs less than that"
    return f"model.vocab_size = {size} {why}: {slow}{fix}"


def no_login(config: Config) -> str | None:
    """Say so if a run is to be recorded on wandb's server, and this host has no key for it."""
    if config.metrics.wandb != "online" or has_login():
        return None
    why = "no key for wandb's server is found on this host, so that the run is recorded offline"
    return f'metrics.wandb = "online": {why}; `wandb login`, or set WANDB_API_KEY'


def unread_environment(config: Config) -> tuple[str, ...]:
    """Name variables that wandb would read, where the config, which counts, says another value."""
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
    """Say so if a shipped architecture's model has experts or a cap that no class of transformers computes."""
    if config.model.file or not (wrong := without_place(config.model.name, dims)):
        return None
    what = ", ".join(f"{problem.where} = {problem.saw}" for problem in wrong)
    return f"titanlite export will refuse this model: {what} is computed by no class of transformers"


def cut_schedule(config: Config, table: StageTable) -> str | None:
    """Say so if a run is too short for its warm-up or its last decay, as a look at a few steps of a long one is."""
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
