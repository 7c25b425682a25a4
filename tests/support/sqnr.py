"""Signal to noise."""

import math

from torch import Tensor


def sqnr(got: Tensor, truth: Tensor) -> float:
    """Decibels."""
    truth = truth.double()
    noise = (got.double() - truth).norm().item()
    return 20 * math.log10(truth.norm().item() / noise) if noise else math.inf
