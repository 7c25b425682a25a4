"""A mixture of experts as one operator of a plan: each rank sends its own tokens, whatever it has of the experts.

How ranks share out the weights of experts is no matter of tensor parallelism (`parallel/expert.py`): to its rows of
tokens a layer has all of them, and a gradient of each that lacks those of other ranks' tokens.
"""

import contextlib
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor, nn

from titanlite.kernels.operators import Split, operator
from titanlite.models.experts import MixtureOfExperts


@operator("planned_mixture", None, splits=(Split((0, None, None, None), 0),))
def planned_mixture(x: Tensor, router: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
    """Return memory of the shape of a mixture's result, [M, D], for a graph that is planned and never run.

    Args:
        x: [M, D].
        router, w13, w2: the layer's weights.
    """
    return torch.empty_like(x)


@contextlib.contextmanager
def mixtures_as_operators(model: nn.Module) -> Iterator[None]:
    """Let each mixture of a model be one operator, but for one that computes in a way of its own.

    Args:
        model: on the meta device; it is as before afterwards.
    """
    layers = [m for m in model.modules() if isinstance(m, MixtureOfExperts)]
    layers = [m for m in layers if type(m).forward is MixtureOfExperts.forward and "forward" not in vars(m)]
    for layer in layers:
        vars(layer)["forward"] = partial(_forward, layer)
    try:
        yield
    finally:
        for layer in layers:
            del vars(layer)["forward"]


def _forward(layer: MixtureOfExperts, x: Tensor) -> Tensor:
    y = planned_mixture(x, layer.router.weight, layer.w13.weight, layer.w2.weight)
    return y if layer.shared is None else y + layer.shared(x)
