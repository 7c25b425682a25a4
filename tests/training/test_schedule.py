"""The learning rate at chosen steps, as numbers worked out by hand."""

import math

import pytest

from titanlite.config.schema import Config, LRScheduler, Optimizer, Training
from titanlite.training.schedule import learning_rate

PEAK, STEPS = 2.0, 100
COSINE, LINEAR, SQRT = ({"warmup_steps": 20, "decay_type": kind} for kind in ("cosine", "linear", "sqrt"))
STABLE = {"decay_ratio": 0.4}  # warm-up to 20, constant to 60, decay to 100
FLOOR = {"min_lr_factor": 0.1}
TO_ZERO = {"min_lr_factor": 0.0}


@pytest.mark.parametrize(
    ("keys", "step", "rate"),
    [
        (COSINE, 1, 0.1),
        (COSINE, 10, 1.0),
        (COSINE, 20, 2.0),
        (COSINE | TO_ZERO, 40, 2 * (1 + math.sqrt(0.5)) / 2),
        (COSINE | TO_ZERO, 60, 1.0),
        (COSINE | TO_ZERO, 100, 0.0),
        (COSINE | FLOOR, 60, 2 * (0.1 + 0.9 * 0.5)),
        (COSINE | FLOOR, 100, 0.2),
        (LINEAR | TO_ZERO, 21, 2 * 79 / 80),
        (LINEAR | TO_ZERO, 80, 0.5),
        (LINEAR | FLOOR, 100, 0.2),
        (SQRT | TO_ZERO, 40, 1.0),
        (SQRT | FLOOR, 100, 0.2),
        (LINEAR | STABLE | TO_ZERO, 21, 2.0),
        (LINEAR | STABLE | TO_ZERO, 60, 2.0),
        (LINEAR | STABLE | TO_ZERO, 80, 1.0),
        (LINEAR | STABLE | TO_ZERO, 100, 0.0),
        (SQRT | STABLE | FLOOR, 70, 2 * (0.1 + 0.9 * 0.5)),
        ({"warmup_steps": 0, "decay_type": "linear"} | TO_ZERO, 1, 2 * 99 / 100),
        ({"warmup_steps": 100}, 100, 2.0),  # warm-up is all of the run
        ({"warmup_steps": 60, "decay_ratio": 0.4, "decay_type": "linear"} | TO_ZERO, 60, 2.0),
        ({"warmup_steps": 20, "min_lr_factor": 1.0}, 77, 2.0),
        (LINEAR | {"decay_ratio": 0.333} | TO_ZERO, 68, 2 * 32 / 33),  # whole steps: from 67 on
        ({"warmup_steps": 99} | FLOOR, 100, 0.2),  # decay is one step
    ],
)
def test_rate(keys, step, rate):
    config = Config(training=Training(steps=STEPS), optimizer=Optimizer(lr=PEAK), lr_scheduler=LRScheduler(**keys))
    assert learning_rate(step, config) == pytest.approx(rate, rel=1e-12, abs=1e-15)


@pytest.mark.parametrize("keys", [COSINE, LINEAR, SQRT, SQRT | STABLE])
def test_rises_to_the_peak_and_never_again(keys):
    config = Config(training=Training(steps=STEPS), optimizer=Optimizer(lr=PEAK), lr_scheduler=LRScheduler(**keys))
    rates = [learning_rate(step, config) for step in range(1, STEPS + 1)]
    assert rates[:20] == sorted(rates[:20])
    assert rates[19:] == sorted(rates[19:], reverse=True)
    assert max(rates) == PEAK
