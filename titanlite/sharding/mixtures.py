"""Plan a mixture of experts as one operator: each rank routes and sends its own tokens.

The operator does not have the weights of experts, which `parallel/expert.py` distributes over ranks.
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
    """Stand for a mixture in a graph that is never run: return an empty tensor like `x` [M, D]; `router` is [E, D]."""
    return torch.empty_like(x)


@contextlib.contextmanager
def mixtures_as_operators(model: nn.Module) -> Iterator[None]:
    """Within the context, run each mixture of experts as one operator, unless a user's class has its own forward."""
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
