"""AdamW on many tensors at once, with the division that clips their gradients and the choice to leave a step out.

On a GPU it is one kernel for all tensors, and one pass over what it changes (`titanlite/kernels/device/adamw.py`); else
it is torch's.

Source: Loshchilov and Hutter 2019, "Decoupled Weight Decay Regularization", algorithm 2.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class AdamWState:
    """What an update changes besides its gradients; tensors of one name belong together.

    Attributes:
        parameters: float32, contiguous, none of them empty.
        exp_avg: running mean of the gradients, float32 or bfloat16, all alike.
        exp_avg_sq: running mean of their squares, the same.
        weight_decays: of each parameter.
        updates: [] float32, how many there have been; counted by the caller.
        beta1: decay of `exp_avg`.
        beta2: decay of `exp_avg_sq`.
        eps: added to the root of `exp_avg_sq`.
    """

    parameters: list[Tensor]
    exp_avg: list[Tensor]
    exp_avg_sq: list[Tensor]
    weight_decays: list[float]
    updates: Tensor
    beta1: float
    beta2: float
    eps: float


def adamw(state: AdamWState) -> Callable[[list[Tensor], float, Tensor, Tensor], None]:
    """Prepare the update of a state.

    Args:
        state: its tensors are changed in place, and stay where they are.

    Returns:
        What applies one update, or none. It takes

        - gradients of the parameters, float32, contiguous; their values are not defined afterwards;
        - the learning rate;
        - [] float32 that gradients are divided by, to clip them;
        - [] float32 that is 1 to leave everything as it is, else 0.

        `state.updates` already counts the update that is asked for.

    Raises:
        ValueError: on a GPU, tensors that are not contiguous, or of another dtype or size.
    """
    if state.updates.is_cuda and state.parameters:
        from titanlite.kernels.device.adamw import Update

        return Update(state).step
    return functools.partial(_definition, state)


def _definition(state: AdamWState, gradients: list[Tensor], lr: float, divisor: Tensor, skip: Tensor) -> None:
    tensors = state.parameters, gradients, state.exp_avg, state.exp_avg_sq, state.weight_decays
    for parameter, gradient, *kept, weight_decay in zip(*tensors, strict=True):
        exp_avg, exp_avg_sq = (moment.float() for moment in kept)  # no copy if they are float32
        torch._fused_adamw_(
            [parameter],
            [gradient],
            [exp_avg],
            [exp_avg_sq],
            [],  # no running maxima
            [state.updates],
            lr=lr,
            beta1=state.beta1,
            beta2=state.beta2,
            weight_decay=weight_decay,
            eps=state.eps,
            amsgrad=False,
            maximize=False,
            grad_scale=divisor,
            found_inf=skip,
        )
        for narrow, updated in zip(kept, (exp_avg, exp_avg_sq), strict=True):
            if narrow is not updated:
                narrow.copy_(updated)
