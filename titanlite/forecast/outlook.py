"""Predict from a run's speed its share of the device's peak FLOPs, its tokens per day, and how long it takes."""

from dataclasses import dataclass

import numpy as np

from titanlite.config.recipe_schema import ModelDims
from titanlite.config.schema import Config
from titanlite.config.stages import sequences_per_step
from titanlite.forecast.attended import AttendedShare
from titanlite.models.find import build_model
from titanlite.observe.peak_flops import mean_attended, token_flops_of, windows_of


@dataclass(frozen=True)
class Outlook:
    """The speed and length of a run.

    Attributes:
        tokens_per_second: per device.
        mfu: model FLOPs utilisation, counted as in metrics.jsonl.
        tokens_per_day: of all devices together.
        days: duration of the run, without validation and saving.
    """

    tokens_per_second: float
    mfu: float
    tokens_per_day: float
    steps: int
    days: float

    @property
    def lasts(self) -> str:
        """Return the duration of the run in words."""
        if self.days >= 1:
            return f"{self.days:,.1f} days"
        return f"{24 * self.days:,.1f} hours" if self.days >= 1 / 24 else f"{1440 * self.days:,.1f} minutes"


def token_flops(config: Config, dims: ModelDims, attended: AttendedShare | None = None) -> float:
    """Return the FLOPs of a training step per token. `attended` None: attention is causal, without document masks."""
    seq_len = config.training.seq_len
    model = build_model(config.model, dims, seq_len)
    lengths = attended.lengths if attended else np.array([seq_len])
    return token_flops_of(model, dims).total(mean_attended(windows_of(model), lengths))


def outlook(config: Config, flops: float, world: int, tokens_per_second: float, peak: float) -> Outlook:
    """Predict a run's duration. `flops`: of one token; `tokens_per_second` and `peak`, FLOPs per second: per device."""
    training = config.training
    step = sequences_per_step(config, world) * training.seq_len
    return Outlook(
        tokens_per_second=tokens_per_second,
        mfu=tokens_per_second * flops / peak,
        tokens_per_day=86_400 * tokens_per_second * world,
        steps=training.steps,
        days=training.steps * step / (86_400 * tokens_per_second * world),
    )


def large(n: float) -> str:
    """Write a number with three significant digits and a word for its size: `1.71 million`, `160 billion`."""
    for unit, name in ((1e12, "trillion"), (1e9, "billion"), (1e6, "million")):
        if n >= 0.9995 * unit:  # or three digits would say 1e+03 of the smaller one
            return f"{n / unit:.3g} {name}"
    return f"{n:,.0f}"
