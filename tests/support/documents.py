"""Sequences of documents by their lengths, or by where they begin."""

import numpy as np
import torch
from torch import Tensor

from titanlite.data.document_starts import document_bounds
from titanlite.kernels.attention import Bounds
from titanlite.models.layers import Sequences


def starts_of(lengths: list[int], S: int) -> Tensor:
    """[M] int32, of documents of these lengths; those that a sample's end cuts begin again."""
    assert sum(lengths) % S == 0
    places = np.arange(sum(lengths), dtype=np.int32)
    return torch.from_numpy(
        np.maximum(np.repeat(np.cumsum([0, *lengths[:-1]]), lengths), places // S * S).astype(np.int32)
    )


def bounds_of(starts: Tensor) -> Bounds:
    at, runs = map(torch.from_numpy, document_bounds(starts.cpu().numpy()))
    return Bounds(at.to(starts.device), runs)


def sequences_of(longest: int, starts: Tensor) -> Sequences:
    return Sequences(longest, starts, {0: bounds_of(starts)})
