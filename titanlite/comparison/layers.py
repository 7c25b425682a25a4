"""Find the first layer and tensor in which two configs part by more than rounding, by sketches of their first steps."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from titanlite.comparison.judge import BEYOND

Sketches = Mapping[str, NDArray[np.float64]]

_RESOLUTION = 2.0**-20  # what float32 sums in another order may differ by, relative


@dataclass(frozen=True)
class Parting:
    """The place where two runs part."""

    step: int  # the first in which they do
    tensor: str  # the first of it, in the order in which a step computes them
    difference: float  # relative
    rounding: float  # the largest relative difference of that tensor that a nudge of the weights has made until then
    others: int  # more tensors of that step that part


def first_parting(first: Sketches, other: Sketches, nudged: Sketches) -> Parting | None:
    """Find the first tensor that differs by more than `judge.BEYOND` times what a nudge has made of it until then.

    Sketches of the first are in the order in which its steps computed them; tensors that `other` lacks are left out.
    """
    found: Parting | None = None
    so_far: dict[str, float] = {}  # by tensor
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
