"""Describe a run in a few lines before its first step, and its result and possible next commands after the last."""

import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import groupby
from operator import itemgetter
from typing import Any

import torch
import torch.distributed as dist

from titanlite.checkpoint.publish import complete_steps, step_folder
from titanlite.checkpoint.saved_state import read_state
from titanlite.config.schema import Config
from titanlite.config.stages import SOLE
from titanlite.data.corpus import Corpus
from titanlite.data.mixture import Mixture
from titanlite.data.order import epochs, order_in_words
from titanlite.data.stages import StageTable
from titanlite.errors import TitanliteError
from titanlite.observe.console import WIDTH, duration
from titanlite.observe.metric_table import METRICS
from titanlite.observe.metrics import RunError, read_metrics
from titanlite.parallel.mesh import Mesh
from titanlite.parallel.process_group import ranks_of_a_host
from titanlite.preflight.run_folder import RunFolder
from titanlite.preflight.trained_model import find_trained_model
from titanlite.streams import with_relative_paths
from titanlite.training.build import Run
from titanlite.training.report import epoch
from titanlite.training.schedule import change_of_rate, learning_rate

_WIDTH = 8  # characters of the first column


def first_lines(run: Run, sources: Mapping[str, Corpus], mixture: Mixture, start: int, folder: RunFolder) -> list[str]:
    """Return lines about the model, layout and data of a run, and where it is recorded. `start`: the last step done."""
    config = run.config
    name = config.model.file or f"{config.model.name} {config.model.flavor}"
    steps, table, window = config.training.steps, mixture.table, config.data.shuffle_window
    next_step = table.row(min(start + 1, table.steps))
    has = "more, which are counted as they are tokenized"
    if all(source.is_whole for source in sources.values()):
        has = f"{sum(source.tokens for source in sources.values()):,}: {epochs(epoch(mixture, max(start, steps)))}"
    has = f"data.source has {has}" if len(sources) == 1 and "" in sources else f"the sources of the mixture have {has}"
    all_steps = f"{table.tokens(steps):,} in {steps:,} steps{_sizes_of_steps(table, steps)}"
    used = f", of which a token uses {run.n_active:,}" if run.n_active < run.n_elements else ""
    lines = [
        _line("model", f"{name}, {run.n_elements:,} parameters{used}"),
        _line("layout", _mesh_in_words(run.mesh, dist.get_world_size())),
        _line("tokens", f"{all_steps}; {has}"),
        *(_line("source", text) for text in _of_mixture(mixture)),
        *([_line("order", order_in_words(window, table.unit_len, next_step.asked.tokens_per_step))] if window else []),
        _line("folder", str(folder.path)),
        *([_line("wandb", text)] if (text := _where_wandb_records(config, folder)) else []),
    ]
    if config.metrics.tensorboard:
        lines.append(_line("tensorboard", f"in {folder.tensorboard}"))
        lines.append(_line("", _pasteable("tensorboard", "--logdir", str(folder.path.parent))))
    return lines


def _sizes_of_steps(table: StageTable, steps: int) -> str:
    """Return the tokens of a step, in words; where steps differ, how many there are of each size, past ones too."""
    ends = [*(row.from_step for row in table.rows[1:]), steps]
    rows = [
        (row.asked.tokens_per_step, min(end, steps) - row.from_step) for row, end in zip(table.rows, ends, strict=True)
    ]
    counted = groupby((row for row in rows if row[1] > 0), itemgetter(0))
    sizes = [(size, sum(n for _, n in same)) for size, same in counted]
    if len(sizes) == 1:
        return f" of {sizes[0][0]:,}"
    return f": {', then '.join(f'{n:,} of {size:,}' for size, n in sizes)}"


def _of_mixture(mixture: Mixture) -> list[str]:
    """Return a line for each source of a mixture: its share of the run's tokens, and its epochs."""
    steps = mixture.table.steps
    if SOLE in mixture.units:
        return []
    tokens, total = mixture.tokens(steps), max(1, mixture.table.tokens(steps))
    return [
        f"{name}: {tokens[name] / total:.2%} of the tokens" + (f", {epochs(n)}" if n == n else "")
        for name, n in mixture.epochs(steps).items()
    ]


def last_lines(
    config: Config, folder: RunFolder, last: int, seconds: float, can_export: bool, table: StageTable
) -> list[str]:
    """Return lines about the time up to step `last`, the lowest losses of the run, and possible next commands."""
    rows: list[dict[str, Any]] = []
    with suppress(OSError, RunError):  # a damaged file is reported elsewhere, or at the next start
        rows = read_metrics(folder.metrics)
    path, saved, since = str(folder.path), complete_steps(folder.checkpoints), dict[str, int]()
    with suppress(TitanliteError):  # told at the next start, too
        since |= read_state(step_folder(folder.checkpoints, saved[-1]), saved[-1]).measured_since if saved else {}
    lines = [_line("took", f"{duration(seconds)} to step {last:,} of {config.training.steps:,}")]
    losses = [metric for metric in METRICS.values() if metric.loss_of]
    if said := [
        f"{metric.loss_of} {text}" for metric in losses if (text := _lowest(rows, metric.key, since.get(metric.key, 0)))
    ]:
        lines.append(_line("lowest", ", ".join(said)))
    if saved and last < config.training.steps:
        lines.append(_line("resume", _resume(config, folder, last)))
    elif saved:
        lines.append(_line("longer", _resume(config, folder, last)))
        if not config.data.stage and (text := _jump(config, last, table)):  # of stages the next start reports it
            lines.append(_line("", text))
    lines.append(_line("compare", _pasteable("titanlite", "compare", path)))
    if saved and can_export:
        lines.append(_line("export", _pasteable("titanlite", "export", path)))
    with suppress(OSError, TitanliteError):  # of a run that `titanlite generate` refuses, as without a tokenizer
        find_trained_model("titanlite generate", folder.path, None, None, averaged=False)
        lines.append(_line("generate", _pasteable("titanlite", "generate", path, "--prompt", _prompt(config))))
    return lines


def _jump(config: Config, last: int, table: StageTable) -> str | None:
    """Return a notice if the learning rate jumps where a run of twice as many steps or tokens goes on, else None."""
    training = config.training
    twice = replace(training, steps=2 * training.steps, tokens=training.tokens and 2 * training.tokens)
    return change_of_rate(replace(config, training=twice), last, learning_rate(last, config, table), table)


def _prompt(config: Config) -> str:
    """Return a sample of the run that a command line takes as a prompt: no empty one, and none like a flag."""
    for text in config.validation.samples:
        if text and not text.startswith("-") and text.isprintable() and len(text) <= 50:
            return text
    return "Once upon a time"


def _line(name: str, text: str) -> str:
    return f"{name:{_WIDTH}}  {text}"


def _pasteable(*words: str) -> str:
    """Break a command into lines that can be pasted, so that the console need not fold it."""
    lines, room = [""], WIDTH - _WIDTH - len("   \\ ")
    for word in map(shlex.quote, words):
        if lines[-1] and len(with_relative_paths(f"{lines[-1]} {word}")) > room:
            lines.append(f"  {word}")
        else:
            lines[-1] += f" {word}" if lines[-1] else word
    return f" \\\n{_line('', '')}".join(lines)


def _mesh_in_words(mesh: Mesh, world: int) -> str:
    """Return the devices of the run, their number, and the degrees of parallelism, in words."""
    device = torch.cuda.get_device_name(mesh.device) if mesh.device.type == "cuda" else "CPU process"
    is_several = world > 1 and mesh.device.type != "cuda"
    axes = {"replicas": mesh.replicas, "FSDP": mesh.dp_size // mesh.replicas, "tensor parallel": mesh.tp_size}
    group, context = mesh.expert_group, mesh.context_group
    split = " × ".join(f"{name} {degree}" for name, degree in axes.items() if degree > 1)
    split += f" (sequences over {context.size})" if context is not None else ""
    split += f" (experts over {group.size})" if group is not None else ""
    return f"{world} × {device}{'es' * is_several}" + (f": {split}" if split else "")


def _where_wandb_records(config: Config, folder: RunFolder) -> str:
    """Return where Weights & Biases records the run; "" if it is off."""
    metrics = config.metrics
    group = f", group {metrics.wandb_group}" if metrics.wandb_group else ""
    return {
        "offline": f"offline, in {folder.path / 'wandb'}",
        "online": f"online, project {metrics.wandb_project}{group}",
    }.get(metrics.wandb, "")


def _lowest(rows: Sequence[dict[str, Any]], key: str, since: int) -> str:
    """Return the lowest value of a metric after the step `since`, and its step, in words; "" if there is none."""
    found = [(row[key], row["step"]) for row in rows if row.get(key) is not None and row["step"] > since]
    return "{:.4f} at step {:,}".format(*min(found)) if found else ""


def _resume(config: Config, folder: RunFolder, last: int) -> str:
    """Return the command that resumes the run. After the last step it doubles the number of steps or tokens."""
    world = dist.get_world_size()
    more = [] if last < config.training.steps else ["--training.steps", str(2 * config.training.steps)]
    if more and config.training.tokens:
        more = ["--training.tokens", str(2 * config.training.tokens)]
    more += ["--job.stop_after", "0"] if config.job.stop_after else []
    more += ["--checkpoint.resume", "auto"] if config.checkpoint.resume != "auto" else []
    if ranks_of_a_host() is not None:  # several hosts, on which `titanlite train` cannot start
        return " ".join(["the same command again", *more])
    return _pasteable("titanlite", "train", str(folder.config), "--gpus", str(world), *more)
