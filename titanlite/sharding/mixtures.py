"""A mixture of experts as one operator of a plan: each rank routes and sends its own tokens.

The weights of experts are not in it: how ranks share them out, and add up their gradients, is no matter of tensor
parallelism (`parallel/expert.py`).
"""

import contextlib
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor, nn

from titanlite.kernels.operators import Split, operator
from titanlite.models.experts import MixtureOfExperts
from titanlite.models.layers import runs_forward_of


@operator("planned_mixture", None, splits=(Split((0, None), 0),))
def planned_mixture(x: Tensor, router: Tensor) -> Tensor:
    """Return memory of the shape of a mixture's result, [M, D], for a graph that is planned and never run.

    Args:
        x: [M, D].
        router: [E, D], its weight.
    """
    return torch.empty_like(x)


@contextlib.contextmanager
def mixtures_as_operators(model: nn.Module) -> Iterator[None]:
    """Let each mixture of a model be one operator, but for one that computes in a way of its own.

    Args:
        model: on the meta device; it is as before afterwards.
    """
    found = (m for m in model.modules() if isinstance(m, MixtureOfExperts))
    layers = [m for m in found if runs_forward_of(m, MixtureOfExperts)]
    for layer in layers:
        vars(layer)["forward"] = partial(_forward, layer)
    try:
        yield
    finally:
        for layer in layers:
            del vars(layer)["forward"]


def _forward(layer: MixtureOfExperts, x: Tensor) -> Tensor:
    y = planned_mixture(x, layer.router.weight)
    return y if layer.shared is None else y + layer.shared(x)
