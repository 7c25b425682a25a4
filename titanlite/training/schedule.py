"""Compute the learning rate of a step: linear warm-up, constant, decay. With `training.tokens` it follows tokens."""

import math

from titanlite.config.schema import Config
from titanlite.data.stages import StageTable


def change_of_rate(config: Config, step: int, was: float | None, table: StageTable | None = None) -> str | None:
    """Return a notice if step `step` had another learning rate, `was`, than this config gives to it, else None.

    There is none where the next step has the rate `was`, as far as three digits tell: it goes on without a jump.
    """
    if was is None or was == learning_rate(step, config, table):
        return None
    before, now = f"{was:.3g}", f"{learning_rate(step + 1, config, table):.3g}"
    training = config.training
    end = f"{training.tokens:,} tokens" if training.tokens else f"{training.steps:,} steps"
    return f"with a schedule of {end} the learning rate jumps from {before} to {now}" if before != now else None


def learning_rate(step: int, config: Config, table: StageTable | None = None) -> float:
    """Return the learning rate of one optimizer step; the first is step 1.

    `table`, the stages of the run, is needed only with `training.tokens` or `data.stage`.

    Returns:
        The rate. It rises to the peak at step `warmup_steps`, and would reach `min_lr_factor` times the peak one step
        after the last, so that the last step trains, too. With `training.tokens` it depends on the number of tokens
        trained on: including this step during warm-up, before this step afterwards. If stages have `lr_decay_to`, the
        rate falls in these stages only.
    """
    schedule, peak = config.lr_scheduler, config.optimizer.lr
    before, after, warmup, end = step - 1, step, schedule.warmup_steps, config.training.steps
    if config.training.tokens:
        assert table is not None  # noqa: S101
        before, after, end = table.tokens(step - 1), table.tokens(step), config.training.tokens
        warmup = table.tokens(warmup) if schedule.warmup_tokens is None else schedule.warmup_tokens
    if after <= warmup:
        return peak * after / warmup
    if any(stage.lr_decay_to is not None for stage in config.data.stage):
        assert table is not None  # noqa: S101
        return peak * _factor_of_stages(before, end, config, table)
    decay_from = warmup if schedule.decay_ratio is None else max(warmup, end - round(schedule.decay_ratio * end))
    shape = _shape(max(0, before - decay_from) / max(1, end - decay_from), schedule.decay_type)
    return peak * (schedule.min_lr_factor + (1 - schedule.min_lr_factor) * shape)


def _shape(progress: float, decay_type: str) -> float:
    """Map the progress of a decay, 0 … 1, to the share that remains, 1 … 0."""
    return {
        "cosine": (1 + math.cos(math.pi * progress)) / 2,
        "linear": 1 - progress,
        "sqrt": 1 - math.sqrt(progress),
    }[decay_type]


def _factor_of_stages(at: int, end: int, config: Config, table: StageTable) -> float:
    """Return the fraction of the peak at `at`, a step or token count, by `lr_decay_to` of stages. The run ends at
    `end`.
    """
    starts: dict[int, int] = {}
    for row in table.rows:
        starts.setdefault(row.asked.from_tokens, row.from_tokens if config.training.tokens else row.from_step)
    decays = {stage.from_tokens: stage.lr_decay_to for stage in config.data.stage}
    factor = 1.0
    for start, to, stop in zip(starts.values(), map(decays.get, starts), [*[*starts.values()][1:], end], strict=True):
        if at < start or to is None:
            continue
        progress = min(1.0, (at - start) / max(1, stop - start))
        factor = to + (factor - to) * _shape(progress, config.lr_scheduler.decay_type)
    return factor
