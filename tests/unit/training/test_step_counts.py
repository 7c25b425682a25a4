"""Counts of a step that float32 does not have: above 2^24 targets of one source."""

from types import SimpleNamespace
from typing import Any, cast

import torch

from titanlite.kernels.ignore_index import IGNORE_INDEX
from titanlite.training.step import _by_source


def test_targets_of_a_source_are_counted_exactly() -> None:
    """In micro-steps of an odd number, added up as a step does."""
    targets, losses = torch.zeros(3, 5, dtype=torch.long), torch.tensor([1.0, 2.0, 4.0])
    targets[2, 0] = IGNORE_INDEX
    batch = cast("Any", SimpleNamespace(targets=targets.flatten(), sources=torch.tensor([1, 0, 1])))
    each = _by_source(losses, batch, 2)
    assert each.tolist() == [[2.0, 5.0], [5.0, 9.0]]
    many = torch.tensor([0.0, float(2**24)], dtype=each.dtype)
    assert (many + each[1]).tolist() == [5.0, 2**24 + 9]
    assert float(torch.tensor(2.0**24) + 9) != 2**24 + 9  # as float32 would have it
