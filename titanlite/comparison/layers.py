"""Find the first layer and tensor in which two configs differ by more than rounding, from sketches of tensors.

`training/sketch_steps.py` makes the sketches in the first steps. Each is a few weighted sums of a tensor's elements.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from titanlite.comparison.judge import BEYOND

Sketches = Mapping[str, NDArray[np.float64]]

_RESOLUTION = 2.0**-20  # relative effect of summing float32 in another order


@dataclass(frozen=True)
class Parting:
    """The first tensor in which two runs differ by more than rounding."""

    step: int  # the first step in which the runs differ
    tensor: str  # name of the first tensor that differs in this step, in order of computation
    difference: float  # relative difference of the runs in the tensor
    rounding: float  # largest relative difference that nudged weights have made in the tensor up to this step
    others: int  # number of further tensors of this step that differ


def first_parting(first: Sketches, other: Sketches, nudged: Sketches) -> Parting | None:
    """Find the first tensor that differs by more than `judge.BEYOND` times the largest effect of a nudge on it so far.

    Sketches have keys "step tensor", those of `first` in order of computation. Tensors that `other` lacks are skipped.
    """
    found: Parting | None = None
    so_far: dict[str, float] = {}  # by tensor: largest difference of the nudged run
    for key, sketch in first.items():
        step, _, tensor = key.partition(" ")
        rounding = so_far[tensor] = max(so_far.get(tensor, _RESOLUTION), _relative(nudged[key], sketch))
        if key not in other or (difference := _relative(other[key], sketch)) <= BEYOND * rounding:
            continue
        if found is None:
            found = Parting(int(step), tensor, difference, rounding, 0)
        elif int(step) > found.step:
            break
        else:
            found = replace(found, others=found.others + 1)
    return found


def _relative(x: NDArray[np.float64], of: NDArray[np.float64]) -> float:
    length = float(np.linalg.norm(of))
    return float(np.linalg.norm(x - of)) / length if length else float(bool(x.any()))
