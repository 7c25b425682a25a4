"""Format the config file of `titanlite new`: each choice, with its reason as a comment above it."""

import textwrap
from collections.abc import Mapping, Sequence
from operator import attrgetter

from titanlite import recipes
from titanlite.byte_size import byte_size
from titanlite.commands.new_choices import (
    FITTED_FROM,
    MIXTURE_LR,
    MOST_TOKENS_A_STEP,
    TOKENS_A_PARAMETER,
    Choices,
    fitted_learning_rate,
)
from titanlite.commands.new_text import TextSize
from titanlite.config.build import show
from titanlite.forecast.outlook import large
from titanlite.forecast.search import RESERVE_GIB, fastest_by
from titanlite.preflight.host_memory import shows_gpus
from titanlite.preflight.machine import Machine

_WIDTH = 100
_MOST_OTHERS = 3  # most alternatives named in a comment


def config_text(choices: Choices, file: str, size: TextSize) -> str:
    """Return the text of the config file, with comments. `file`: its path, for the commands in the comments."""
    return comment(_heading(choices, file)) + keys_text(choices, reasons_of_keys(choices, size))


def comment(paragraphs: Sequence[str]) -> str:
    """Return paragraphs as the lines of a comment. One that begins with a space is code, and keeps its lines."""
    return "".join(f"{_comment_lines(text)}\n" for text in paragraphs)


def keys_text(choices: Choices, reasons: Mapping[str, str | None]) -> str:
    """Return the keys of the config file, each with its reason. A key whose reason is None is left out."""
    text, before = "", ""
    for key, why in reasons.items():
        section, _, name = key.partition(".")
        if why is not None:
            text += f"\n[{section}]\n" * (section != before) + f"{_comment_lines(why)}\n" * bool(why)
            text += f"{name} = {show(attrgetter(key)(choices.config))}\n"
            before = section
    return text


def reasons_of_keys(choices: Choices, size: TextSize) -> dict[str, str | None]:
    """Return by key the comment that explains its value. A key whose comment is None is left out of the file."""
    config, world, is_cpu = choices.config, choices.machine.world, choices.machine.rates is None
    validation, is_text = config.validation, choices.inputs.sources["data.source"].kind != "tokens"
    of_tokenizer = ""
    if config.data.tokenizer == "bytes":
        of_tokenizer = "256 ids, one for each byte; better: the path of a tokenizer.json"
    elif size.trained:
        of_tokenizer = f"{size.trained}; keep the file, without which the model cannot read or write text"
    no_more = "no more than are trained on; of fewer, all are taken again"
    at_once = "; more are hardly faster on a CPU" if is_cpu else f": {_others(choices, 'at_a_time', ('degree',))}"
    fused = world > 1 and config.parallelism.async_tensor_parallel
    is_auto = config.activation_checkpoint.recipe == recipes.AUTO
    left = f"of {choices.machine.gib:.1f} GiB, {RESERVE_GIB:g} are left to CUDA and NCCL"
    by_hand = "with text that is held out of data.source: set enable = true, and name it as source"
    return {
        "job.name": "its folder is outputs/<name>",
        "model.name": "",
        "model.flavor": _of_size(choices),
        "model.vocab_size": _of_vocabulary(choices),
        "data.source": _of_source(choices, size),
        "data.max_tokens": no_more if config.data.max_tokens else None,
        "data.tokenizer": of_tokenizer if is_text else None,
        "training.steps": _of_steps(choices),
        "training.seq_len": _of_length(choices),
        "training.local_batch_size": f"sequences at a time{at_once}",
        "training.global_batch_size": _of_batch(choices),
        "training.mixed_precision_param": "most CPUs have no fast bfloat16" if is_cpu else None,
        "optimizer.lr": _of_lr(choices),
        "lr_scheduler.warmup_steps": "about a fiftieth of the steps, at most 2,000",
        "parallelism.tensor_parallel_degree": _of_layout(choices) if world > 1 else None,
        "parallelism.data_parallel_replicate_degree": _of_replicas(choices),
        "parallelism.expert_parallel_degree": _of_experts(choices),
        "parallelism.context_parallel_degree": _of_context(choices),
        "parallelism.async_tensor_parallel": "its collectives run inside its matmuls" if fused else None,
        "activation_checkpoint.recipe": _of_save_list(choices),
        "activation_checkpoint.budget_gib": left if is_auto else None,
        "float8.recipe": _of_float8(choices),
        "compile.enable": None if config.compile.enable else "compiling takes longer than it gains on a CPU",
        "validation.enable": "on the part that python_stdlib leaves out" if validation.enable else by_hand,
        "validation.freq": "steps between validations" if validation.enable else None,
        "validation.steps": "global batches of each" if validation.enable and validation.steps > 0 else None,
        "checkpoint.interval": "about an hour of steps, or the whole run",
    }


def outlook_in_words(choices: Choices) -> str:
    """Return in words the speed of a run and the time that it takes."""
    run, unit = choices.outlook, "process" if choices.machine.rates is None else "GPU"
    speed = f"{run.tokens_per_second:,.0f} tokens a second and {unit}, MFU {run.mfu:.0%}"
    return f"{speed}, {large(run.tokens_per_day)} tokens a day: {large(choices.tokens)} tokens take {run.lasts}"


def start_command(machine: Machine, file: str) -> str:
    """Return the command that trains a config on a machine."""
    if machine.rates is not None and machine.world > machine.rates.host:
        hosts = -(-machine.world // machine.rates.host)
        where = f"--nnodes {hosts} --nproc-per-node {machine.world // hosts}"
        return f"torchrun {where} --rdzv-backend c10d --rdzv-endpoint HOST:29500 train.py --config {file}"
    is_hidden = machine.rates is None and shows_gpus()  # training would use the GPUs
    return f"{'CUDA_VISIBLE_DEVICES= ' * is_hidden}titanlite train {file} --gpus {machine.world}"


def _heading(choices: Choices, file: str) -> list[str]:
    machine, model = choices.machine, choices.config.model
    start = start_command(machine, file).replace(" train.py", " \\\n#         train.py")
    lines = [f"{model.name} {model.flavor} on {machine}.", "", f"    {start}", ""]
    if machine.rates is None:
        how = f"A rough guess, from the speed of a matmul on this CPU: {outlook_in_words(choices)}."
        lines.append(f"{how} Of its memory the run takes {byte_size(choices.chosen.on_device * machine.world)}.")
        return lines
    if machine.is_measured:
        how = f"By the forecast (titanlite plan {file} {machine.flags}), attention by {machine.rates.attention_by}: "
        how += f"{outlook_in_words(choices)}."
    else:
        how = f"A rough guess, by the data sheet of this GPU alone: {outlook_in_words(choices)}."
    lines.append(f"{how} A GPU holds {byte_size(choices.chosen.on_device)} of {machine.gib:.1f} GiB.")
    return lines


def _of_size(choices: Choices) -> str:
    used = f", of which a token uses {large(choices.active)}" if choices.active < choices.parameters else ""
    return f"{large(choices.parameters)} parameters{used}"


def _of_vocabulary(choices: Choices) -> str | None:
    if (rows := choices.config.model.vocab_size) is None:
        return None
    n_ids = choices.inputs.tokenizer.vocab_size if choices.inputs.tokenizer else 0
    what = f"the {n_ids:,} ids of the tokenizer" if 0 < n_ids <= rows else "the ids of the recipe"
    return f"{what}, rounded up to a multiple of 128"


def _of_source(choices: Choices, size: TextSize) -> str:
    tokens = size.in_words(choices.trained_on)
    if choices.inputs.sources["data.source"].name == "python_stdlib":
        return f"Python's own library, which every machine has, enough to see a run work: {tokens}"
    return f"your text: {tokens}. titanlite prepare makes tokens of it ahead of time, so that no GPU waits"


def _of_steps(choices: Choices) -> str:
    each, more = "for each parameter", "compute; more make a better model of this size"
    if choices.active < choices.parameters:
        each += f" that a token uses, {choices.tokens / choices.parameters:.3g} for each of all"
        more = "compute for dense models; mixtures often take more"
    ratio, best = choices.tokens / choices.active, f"about {TOKENS_A_PARAMETER} are the best use of {more}"
    return f"{large(choices.tokens)} tokens, {ratio:.3g} {each}; {best}"


def _of_batch(choices: Choices) -> str:
    training, micro_steps = choices.config.training, choices.chosen.memory.micro_steps
    tokens = (training.global_batch_size or 1) * training.seq_len
    batch = f"{large(tokens)} tokens a step, in {micro_steps:,} micro-step{'s' * (micro_steps > 1)}"
    law = f"0.292·C^0.3271 tokens for the C = {choices.compute:.2g} FLOPs of the run (arXiv 2401.02954)"
    if tokens >= MOST_TOKENS_A_STEP:
        law += ", and no more than Llama 3 405B's for its first 2.87 trillion (arXiv 2407.21783)"
    return f"{batch}: {law}, rounded to a power of two and whole micro-batches"


def _of_length(choices: Choices) -> str:
    S = choices.config.training.seq_len
    if choices.dims.max_seq_len == S:
        return "all the positions that the model has"
    if choices.machine.rates is None:
        return "short, for a CPU: attention and the loss take less"
    return "long, as models of this size are trained" if S == 8192 else "usual for a model of this size"


def _of_lr(choices: Choices) -> str:
    of = "0.3118·C^−0.125 for the C of the run (arXiv 2401.02954)"
    if choices.compute < FITTED_FROM:
        of = f"0.3118·C^−0.125 (arXiv 2401.02954) at C = {FITTED_FROM:.0e}, the smallest run that it was fitted to"
    if choices.config.optimizer.lr < (fitted := fitted_learning_rate(choices.compute)):
        return f"for dense models {fitted:g}, by {of}; at that a router may spike. Begin with {MIXTURE_LR:g}"
    return f"{of}. If the loss spikes, halve it"


def _of_layout(choices: Choices) -> str:
    degree, world, rates = choices.chosen.degree, choices.machine.world, choices.machine.rates
    shards = world // degree // choices.chosen.replicas
    why = f"FSDP over {'all ' * (shards == world)}{shards}" + f" × tensor parallel {degree}" * (degree > 1)
    has_others = any(c.degree != degree for c in choices.candidates)
    if rates is None or not (has_others or choices.dims.experts is None):
        return why
    return f"{why}: {_others(choices, 'degree', name='tensor parallel {}')}"


def _of_replicas(choices: Choices) -> str | None:
    """Return the reason for the number of replicas. None: the run is on one host."""
    rates, world = choices.machine.rates, choices.machine.world
    if rates is None or world <= rates.host:
        return None
    replicas, degree = choices.chosen.replicas, choices.chosen.degree
    shards = f"replicas of the weights, each split over {world // replicas // degree} ranks"
    return f"{shards}: {_others(choices, 'replicas', ('degree', 'at_a_time'))}"


def _of_experts(choices: Choices) -> str | None:
    if choices.dims.experts is None or choices.machine.world == choices.chosen.degree:
        return None
    return f"ranks that share the experts of a layer out: {_others(choices, 'experts_over', ('degree',))}"


def _of_context(choices: Choices) -> str | None:
    if choices.chosen.context_over == 1:
        return None
    return f"ranks that share the tokens of a sequence out: {_others(choices, 'context_over', ('degree',))}"


def _of_save_list(choices: Choices) -> str:
    recipe = choices.chosen.recipe
    if choices.machine.rates is None:
        return "everything is kept: it fits" if recipe == "none" else "it fits only if all is computed again"
    is_auto = recipe == recipes.AUTO
    what = "the fastest list for this memory, found when the run starts" if is_auto else "what blocks keep for backward"
    return f"{what}: {_others(choices, 'recipe', ('degree', 'at_a_time', 'context_over'))}"


def _of_float8(choices: Choices) -> str:
    if choices.float8 is None or choices.float8 < 1.02:
        return "linear layers in bfloat16" if choices.machine.rates is not None else ""
    gain = f'"rowwise" would be {choices.float8:.2f} times as fast by the forecast'
    return f"{gain}: compare some thousand steps of both with titanlite compare before you rely on it"


def _others(choices: Choices, attribute: str, alike: Sequence[str] = (), name: str = "{}") -> str:
    """Return in words how much slower other values of `attribute` are, the least slow first, or that they do not fit.

    Only candidates that equal the chosen one in the attributes `alike` are compared. `name`: format of a value.
    """
    chosen = choices.chosen
    same = [c for c in choices.candidates if all(getattr(c, other) == getattr(chosen, other) for other in alike)]
    of = fastest_by(same, lambda option: getattr(option, attribute))
    possible, too_large = dict[str, float](), list[str]()
    for value, option in of.items():
        text, share = name.format(value), 1 - option.tokens_per_second / chosen.tokens_per_second
        if value == getattr(chosen, attribute):
            continue
        if not option.fits:
            too_large.append(f"{text} ({byte_size(option.on_device)})")
        elif share >= 0.001:
            possible[f"{text} is {share:.1%} slower"] = share
        else:
            possible[f"{text} is only {-share:.1%} faster and takes {byte_size(option.on_device)}"] = share
    parts = sorted(possible, key=possible.__getitem__)[:_MOST_OTHERS]
    if too_large:
        parts.append(f"too large: {', '.join(too_large[:_MOST_OTHERS])}")
    return "; ".join(parts) or "nothing else is possible"


def _comment_lines(text: str) -> str:
    if not text or text.startswith(" "):
        return f"# {text}".rstrip()
    return textwrap.fill(text, _WIDTH, initial_indent="# ", subsequent_indent="# ", break_on_hyphens=False)
