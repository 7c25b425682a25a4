"""The learning rate at chosen steps, as numbers worked out by hand."""

import pytest

from titanlite.config.schema import Config, LRScheduler, Optimizer, Training
from titanlite.training.schedule import change_of_rate, learning_rate

PEAK, STEPS = 2.0, 100
COSINE, LINEAR, SQRT = ({"warmup_steps": 20, "decay_type": kind} for kind in ("cosine", "linear", "sqrt"))
STABLE = {"decay_ratio": 0.4}  # warm-up to 20, constant to 61, decay to 101, one step after the last
FLOOR = {"min_lr_factor": 0.1}
TO_ZERO = {"min_lr_factor": 0.0}


@pytest.mark.parametrize(
    ("keys", "step", "rate"),
    [
        (COSINE, 1, 0.1),
        (COSINE, 20, 2.0),
        (COSINE | FLOOR, 61, 2 * (0.1 + 0.9 * 0.5)),
        (LINEAR | STABLE | TO_ZERO, 61, 2.0),
        (LINEAR | STABLE | TO_ZERO, 81, 1.0),
        (SQRT | STABLE | FLOOR, 71, 2 * (0.1 + 0.9 * 0.5)),
        ({"warmup_steps": 0, "decay_type": "linear"} | TO_ZERO, 1, 2.0),
        ({"warmup_steps": 0, "decay_type": "linear"} | TO_ZERO, 100, 2 / 100),
        ({"warmup_steps": 100}, 100, 2.0),  # warm-up is all of the run
        ({"warmup_steps": 60, "decay_ratio": 0.4, "decay_type": "linear"} | TO_ZERO, 61, 2.0),
        ({"warmup_steps": 20, "min_lr_factor": 1.0}, 77, 2.0),
        (LINEAR | {"decay_ratio": 0.333} | TO_ZERO, 69, 2 * 32 / 33),  # whole steps: from 68 on
        ({"warmup_steps": 99} | TO_ZERO, 100, 2.0),  # a decay of one step would end after it
    ],
)
def test_rate(keys, step, rate):
    config = Config(training=Training(steps=STEPS), optimizer=Optimizer(lr=PEAK), lr_scheduler=LRScheduler(**keys))
    assert learning_rate(step, config) == pytest.approx(rate, rel=1e-12, abs=1e-15)


def test_a_schedule_of_more_steps_says_where_the_rate_goes():
    keys = LRScheduler(**(COSINE | TO_ZERO))
    short, long = (
        Config(training=Training(steps=steps), optimizer=Optimizer(lr=PEAK), lr_scheduler=keys) for steps in (100, 180)
    )
    was = learning_rate(100, short)
    assert change_of_rate(short, 100, was) is None
    text = "with a schedule of 180 steps the learning rate jumps from 0.000771 to 1"
    assert change_of_rate(long, 100, was) == text


def test_a_schedule_of_more_steps_that_goes_on_at_the_same_rate_is_no_jump():
    """Half of the decay is done before step 3 of 3, and before step 4 of 5."""
    keys = LRScheduler(warmup_steps=1)
    short, long = (Config(training=Training(steps=steps), lr_scheduler=keys) for steps in (3, 5))
    was = learning_rate(3, short)
    assert was != learning_rate(3, long)
    assert change_of_rate(long, 3, was) is None
    assert change_of_rate(long, 2, was) is not None


@pytest.mark.parametrize(
    ("kind", "ratio", "floor", "rates"),
    [
        ("linear", None, 0.0, "0.5 1 1 0.875 0.75 0.625 0.5 0.375 0.25 0.125"),
        ("linear", None, 0.1, "0.5 1 1 0.8875 0.775 0.6625 0.55 0.4375 0.325 0.2125"),
        ("linear", 0.8, 0.0, "0.5 1 1 0.875 0.75 0.625 0.5 0.375 0.25 0.125"),
        ("linear", 0.3, 0.1, "0.5 1 1 1 1 1 1 1 0.7 0.4"),
        ("cosine", None, 0.0, "0.5 1 1 0.961939766 0.853553391 0.691341716 0.5 0.308658284 0.146446609 0.0380602337"),
        ("cosine", 0.8, 0.1, "0.5 1 1 0.96574579 0.868198052 0.722207545 0.55 0.377792455 0.231801948 0.13425421"),
        ("cosine", 0.3, 0.0, "0.5 1 1 1 1 1 1 1 0.75 0.25"),
        ("sqrt", None, 0.1, "0.5 1 1 0.681801948 0.55 0.448864808 0.363603897 0.288487526 0.220577137 0.158127088"),
        ("sqrt", 0.3, 0.0, "0.5 1 1 1 1 1 1 1 0.422649731 0.183503419"),
    ],
)
def test_rates_are_those_of_torchtitan(kind, ratio, floor, rates):
    """Ten steps, two of warm-up, as its v0.2.2 has them, as shares of the peak."""
    keys = LRScheduler(warmup_steps=2, decay_ratio=ratio, decay_type=kind, min_lr_factor=floor)
    config = Config(training=Training(steps=10), optimizer=Optimizer(lr=PEAK), lr_scheduler=keys)
    ours = [learning_rate(step, config) / PEAK for step in range(1, 11)]
    assert ours == pytest.approx([float(rate) for rate in rates.split()], rel=1e-8)  # nine digits are written
