"""Write the file of `titanlite new`: each choice, with its reason as a comment above it."""

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from titanlite import recipes
from titanlite.byte_size import byte_size
from titanlite.commands.new_choices import FITTED_FROM, MIXTURE_LR, TOKENS_A_PARAMETER, Choices, fitted_learning_rate
from titanlite.config.build import show
from titanlite.forecast.outlook import large
from titanlite.forecast.search import RESERVE_GIB, Candidate, fastest_by
from titanlite.preflight.host_memory import shows_gpus
from titanlite.preflight.machine import Machine

_WIDTH = 100
_MOST_OTHERS = 3  # that are named beside a choice
_STDLIB_TOKENS = 3 * 10**7


@dataclass(frozen=True)
class _Key:
    """One line of the file, and its reason."""

    name: str
    value: object
    why: str = ""


def config_text(choices: Choices, file: str) -> str:
    """Return a run as a commented config; `file` is named in its commands."""
    c = choices.config
    sections: dict[str, Sequence[_Key]] = {
        "job": [_Key("name", c.job.name, "its folder is outputs/<name>")],
        "model": _model_keys(choices),
        "data": _data_keys(choices),
        "training": _training_keys(choices),
        "optimizer": [_Key("lr", c.optimizer.lr, _of_lr(choices))],
        "lr_scheduler": [_Key("warmup_steps", c.lr_scheduler.warmup_steps, "a fiftieth of the steps, at most 2,000")],
        "parallelism": _layout_keys(choices),
        "activation_checkpoint": _save_list_keys(choices),
        "float8": [_Key("recipe", "none", _of_float8(choices))],
        "compile": [_Key("enable", False, "compiling takes longer than it gains on a CPU")] * (not c.compile.enable),
        "validation": _validation_keys(choices),
        "checkpoint": [_Key("interval", c.checkpoint.interval, "about an hour of steps, or the whole run")],
    }
    text = "\n".join(_comment_lines(line) for line in _heading(choices, file)) + "\n"
    for section, keys in sections.items():
        if keys:
            text += f"\n[{section}]\n"
            text += "".join(
                f"{_comment_lines(key.why)}\n" * bool(key.why) + f"{key.name} = {show(key.value)}\n" for key in keys
            )
    return text


def outlook_in_words(choices: Choices) -> str:
    """Return the speed and the length of a run in words."""
    run, unit = choices.outlook, "process" if choices.machine.rates is None else "GPU"
    speed = f"{run.tokens_per_second:,.0f} tokens a second and {unit}, MFU {run.mfu:.0%}"
    return f"{speed}, {large(run.tokens_per_day)} tokens a day: {large(choices.tokens)} tokens take {run.lasts}"


def start_command(machine: Machine, file: str) -> str:
    """Return the command that trains a config on a machine."""
    if machine.rates is not None and machine.world > machine.rates.host:
        hosts = -(-machine.world // machine.rates.host)
        where = f"--nnodes {hosts} --nproc-per-node {machine.world // hosts}"
        return f"torchrun {where} --rdzv-backend c10d --rdzv-endpoint HOST:29500 train.py --config {file}"
    is_hidden = machine.rates is None and shows_gpus()  # which it would take
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
    if machine.world > machine.rates.host:
        how += " That is for GPUs of one host; between hosts it takes longer."
    lines.append(f"{how} A GPU holds {byte_size(choices.chosen.on_device)} of {machine.gib:.1f} GiB.")
    return lines


def _model_keys(choices: Choices) -> list[_Key]:
    model = choices.config.model
    used = f", of which a token uses {large(choices.active)}" if choices.active < choices.parameters else ""
    keys = [_Key("name", model.name), _Key("flavor", model.flavor, f"{large(choices.parameters)} parameters{used}")]
    if model.vocab_size is not None:
        n_ids = choices.inputs.tokenizer.vocab_size if choices.inputs.tokenizer else 0
        what = f"the {n_ids:,} ids of the tokenizer" if 0 < n_ids <= model.vocab_size else "the ids of the recipe"
        keys.append(_Key("vocab_size", model.vocab_size, f"{what}, rounded up to a multiple of 128"))
    return keys


def _data_keys(choices: Choices) -> list[_Key]:
    data, source = choices.config.data, choices.inputs.sources["data.source"]
    if source.name == "python_stdlib":
        times = choices.tokens / (choices.inputs.tokens.get("data.source") or _STDLIB_TOKENS)
        again = f", taken {times:,.0f} times here" if times >= 2 else ""
        why = f"Python's own library, some 30 million bytes that every machine has{again}: enough to see a run work"
    else:
        why = "your text; titanlite prepare makes tokens of it ahead of time, so that no GPU waits"
    keys = [_Key("source", data.source, why)]
    if data.max_tokens:
        keys.append(_Key("max_tokens", data.max_tokens, "no more than are trained on; of fewer, all are taken again"))
    if source.kind != "tokens":
        what = "256 ids, one for each byte; better: the path of a tokenizer.json" if data.tokenizer == "bytes" else ""
        keys.append(_Key("tokenizer", data.tokenizer, what))
    return keys


def _training_keys(choices: Choices) -> list[_Key]:
    training, world = choices.config.training, choices.machine.world
    sequences = training.global_batch_size or 1
    per_step = sequences * training.seq_len
    ratio, each = choices.tokens / choices.active, "for each parameter"
    best = f"about {TOKENS_A_PARAMETER} are the best use of compute; more make a better model of this size"
    if choices.active < choices.parameters:
        each += f" that a token uses, {choices.tokens / choices.parameters:.3g} for each of all"
        best = f"about {TOKENS_A_PARAMETER} are the best use of compute for dense models; mixtures often take more"
    micro_steps = sequences // (training.local_batch_size * world // choices.chosen.degree)
    batch = f"{large(per_step)} tokens a step, in {micro_steps:,} micro-step{'s' * (micro_steps > 1)}"
    law = f"0.292·C^0.3271 tokens for the C = {choices.compute:.2g} FLOPs of the run (arXiv 2401.02954)"
    keys = [
        _Key("steps", training.steps, f"{large(choices.tokens)} tokens, {ratio:.3g} {each}; {best}"),
        _Key("seq_len", training.seq_len, _of_length(choices)),
        _Key("local_batch_size", training.local_batch_size, _of_at_a_time(choices)),
        _Key("global_batch_size", sequences, f"{batch}: {law}, rounded to whole micro-batches"),
    ]
    if choices.machine.rates is None:
        keys.append(_Key("mixed_precision_param", training.mixed_precision_param, "most CPUs have no fast bfloat16"))
    return keys


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


def _of_at_a_time(choices: Choices) -> str:
    same = [c for c in choices.candidates if c.degree == choices.chosen.degree]
    if choices.machine.rates is None:
        return "sequences at a time; more are hardly faster on a CPU"
    return "sequences at a time: " + _others(same, choices.chosen, "at_a_time", "{}")


def _layout_keys(choices: Choices) -> list[_Key]:
    mesh, world, chosen = choices.config.parallelism, choices.machine.world, choices.chosen
    if world == 1:
        return []
    shards = world // chosen.degree
    why = f"FSDP over {shards} × tensor parallel {chosen.degree}" if chosen.degree > 1 else f"FSDP over all {world}"
    if choices.machine.rates is not None and any(c.degree != chosen.degree for c in choices.candidates):
        why += ": " + _others(choices.candidates, chosen, "degree", "tensor parallel {}")
    elif choices.machine.rates is not None and choices.dims.experts is None:
        why += ": nothing else is possible"
    keys = [_Key("tensor_parallel_degree", chosen.degree, why)]
    if choices.dims.experts is not None and shards > 1:
        alike = [c for c in choices.candidates if c.degree == chosen.degree]
        why = f"ranks that share the experts of a layer out: {_others(alike, chosen, 'experts_over', '{}')}"
        keys.append(_Key("expert_parallel_degree", chosen.experts_over, why))
    if mesh.async_tensor_parallel:
        keys.append(_Key("async_tensor_parallel", True, "its collectives run inside its matmuls"))
    return keys


def _save_list_keys(choices: Choices) -> list[_Key]:
    chosen = choices.chosen
    alike = [c for c in choices.candidates if (c.degree, c.at_a_time) == (chosen.degree, chosen.at_a_time)]
    kept = choices.config.activation_checkpoint
    if choices.machine.rates is None:
        why = "everything is kept: it fits" if chosen.recipe == "none" else "it fits only if all is computed again"
        return [_Key("recipe", chosen.recipe, why)]
    others = _others(alike, chosen, "recipe", "{}")
    if chosen.recipe == recipes.AUTO:
        why = f"the fastest list for this memory, found when the run starts: {others}"
        left = f"of {choices.machine.gib:.1f} GiB, {RESERVE_GIB:g} are left to CUDA and NCCL"
        return [_Key("recipe", chosen.recipe, why), _Key("budget_gib", kept.budget_gib, left)]
    return [_Key("recipe", chosen.recipe, f"what blocks keep for backward: {others}")]


def _of_float8(choices: Choices) -> str:
    if choices.float8 is None or choices.float8 < 1.02:
        return "linear layers in bfloat16" if choices.machine.rates is not None else ""
    gain = f'"rowwise" would be {choices.float8:.2f} times as fast by the forecast'
    return f"{gain}: compare some thousand steps of both with titanlite compare before you rely on it"


def _validation_keys(choices: Choices) -> list[_Key]:
    validation = choices.config.validation
    if not validation.enable:
        why = "with text that is held out of data.source: set enable = true, and name it as source"
        return [_Key("enable", False, why)]
    return [
        _Key("enable", True, "on the part that python_stdlib leaves out"),
        _Key("freq", validation.freq, "steps between validations"),
        *([_Key("steps", validation.steps, "global batches of each")] if validation.steps > 0 else []),
    ]


def _others(candidates: Sequence[Candidate], chosen: Candidate, attribute: str, name: str) -> str:
    """Return what is against each other value of a property, the nearest to the chosen one first."""
    of = fastest_by(candidates, lambda option: getattr(option, attribute))
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
