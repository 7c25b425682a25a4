"""Compute the learning rate as a function of the step: linear warm-up, constant, decay."""

import math

from titanlite.config.schema import Config


def change_of_rate(config: Config, last: int, was: float, step: int) -> str | None:
    """Say where the learning rate goes from another schedule's to this one's; None if it goes on as this one says.

    Args:
        config: with the schedule from now on.
        last: the last step that was logged.
        was: its learning rate.
        step: the next one to be trained.
    """
    if was == learning_rate(last, config):
        return None
    now = learning_rate(step, config)
    return f"by a schedule of {config.training.steps:,} steps the learning rate goes from {was:.3g} to {now:.3g}"


def learning_rate(step: int, config: Config) -> float:
    """Return the learning rate of one optimizer step.

    Args:
        step: 1 for the first.
        config: `optimizer.lr`, `lr_scheduler.*` and `training.steps`.

    Returns:
        The rate: rises to the peak at step `warmup_steps`, and would fall to `min_lr_factor` times the peak one step
        after the last, so that the last step trains, too.
    """
    schedule, steps, peak = config.lr_scheduler, config.training.steps, config.optimizer.lr
    warmup = schedule.warmup_steps
    if step <= warmup:
        return peak * step / warmup
    decay_from = warmup if schedule.decay_ratio is None else max(warmup, steps - round(schedule.decay_ratio * steps))
    progress = max(0, step - 1 - decay_from) / max(1, steps - decay_from)  # 0 … 1 at the step after the last
    shape = {
        "cosine": (1 + math.cos(math.pi * progress)) / 2,
        "linear": 1 - progress,
        "sqrt": 1 - math.sqrt(progress),
    }[schedule.decay_type]
    return peak * (schedule.min_lr_factor + (1 - schedule.min_lr_factor) * shape)
