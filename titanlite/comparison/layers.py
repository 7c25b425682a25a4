"""Find the first layer and tensor in which two configs part by more than rounding, by sketches of their first steps."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from titanlite.comparison.judge import BEYOND

Sketches = Mapping[str, NDArray[np.float64]]

_RESOLUTION = 2.0**-20  # what float32 sums in another order may differ by, relative


@dataclass(frozen=True)
class Parting:
    """The place where two runs part.

    Attributes:
        step: the first in which they do.
        tensor: the first of it, in the order in which a step computes them; "" if none does.
        difference: of it, relative.
        rounding: the largest relative difference up to there that a nudge of the weights makes.
        others: tensors of that step that part, too.
    """

    step: int
    tensor: str
    difference: float
    rounding: float
    others: int


def first_parting(first: Sketches, other: Sketches, nudged: Sketches) -> Parting | None:
    """Find the first tensor that differs by more than `judge.BEYOND` times what a nudge makes.

    Args:
        first: sketches of the baseline, in the order in which its steps computed them.
        other: of the run in question; what it does not have is not looked at.
        nudged: of the baseline with `training.nudge`.
    """
    found: Parting | None = None
    rounding = _RESOLUTION
    for key, sketch in first.items():
        if key not in other:
            continue
        rounding = max(rounding, _relative(nudged[key], sketch))
        difference = _relative(other[key], sketch)
        step, _, tensor = key.partition(" ")
        if found is not None and int(step) > found.step:
            break
        if difference <= BEYOND * rounding:
            continue
        if found is None:
            found = Parting(int(step), tensor, difference, rounding, 0)
        else:
            found = Parting(found.step, found.tensor, found.difference, found.rounding, found.others + 1)
    return found


def _relative(x: NDArray[np.float64], of: NDArray[np.float64]) -> float:
    length = float(np.linalg.norm(of))
    return float(np.linalg.norm(x - of)) / length if length else float(bool(x.any()))
