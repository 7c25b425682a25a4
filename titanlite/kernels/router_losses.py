"""Auxiliary losses of a router, and counts of the tokens that it sends to each expert.

A model returns only logits, so an auxiliary loss enters as a gradient: `with_loss` is an identity in forward, and gives
the loss its gradient in backward. The loss is a mean over the counted tokens of a micro-batch, and is weighted with the
micro-batch's share of the step's targets, since gradients of micro-batches and ranks are summed.

M tokens, E experts, K experts per token.

Source: Fedus et al. 2021, "Switch Transformers", eq. 4 to 6; Zoph et al. 2022, "ST-MoE", eq. 5.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from titanlite.kernels.collectives import Group, all_reduce, named_group
from titanlite.kernels.operators import device_code, operator

_launch_count = device_code("routing.launch_count_choices")


def router_losses(logits: Tensor, choices: Tensor, is_counted: Tensor, group: Group | None = None) -> Tensor:
    """Return the balance loss and the z-loss, means over the counted tokens.

    The balance loss is E · Σ f·p, as in `transformers`: f is the share of tokens that chose an expert, p the expert's
    mean probability. It is K if experts are used equally. The z-loss is the mean square of the logits' log-sum-exp.

    Args:
        logits: [M, E] float32.
        choices: [M, K] int32, the experts of each token; without a gradient.
        is_counted: [M] bool, whether a token is counted.
        group: the ranks that share the micro-batch's tokens; None: this rank has all.

    Returns:
        [2] in `logits.dtype`: this rank's terms of the two losses, to be summed over the ranks. f includes the tokens
        of all ranks, and has no gradient. Zeros if no token is counted.
    """
    (M, E), K, size = logits.shape, choices.shape[1], 1 if group is None else group.size
    counts = count_choices(choices, is_counted, E, None if group is None else group.name)
    # This factor turns means over all M tokens into means over counted tokens. If all are counted it is exactly 1, so
    # that the bits are those of plain means.
    more = (size * M * K / counts.sum().clamp(min=1).double()).to(logits.dtype)
    is_counted = is_counted.to(logits.dtype)
    share = counts.to(logits.dtype) / size / M
    balance = E * (share * (logits.softmax(1) * is_counted[:, None]).mean(0)).sum()
    z = (logits.logsumexp(1) * is_counted).square().mean()
    return torch.stack((balance * more, z)) / size * more


def with_loss(x: Tensor, loss: Tensor, share: Tensor) -> Tensor:
    """Return `x`, which must require a gradient. In backward `loss`, [], receives the gradient `share`, []."""
    return _WithLoss.apply(x, loss, share)  # type: ignore[no-any-return]


class _WithLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor, share: Tensor) -> Tensor:
        ctx.save_for_backward(share.to(loss.dtype, copy=True))  # a copy: the next micro-batch overwrites it
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad, ctx.saved_tensors[0], None


def _count_on_gpus(choices: Tensor, is_counted: Tensor, n_experts: int, group: str | None = None) -> Tensor:
    return _all_counts(_launch_count(choices, is_counted, n_experts), group)


def _all_counts(counts: Tensor, group: str | None) -> Tensor:
    return counts if group is None else all_reduce(counts, "sum", named_group(group))


@operator("count_choices", _count_on_gpus)
def count_choices(choices: Tensor, is_counted: Tensor, n_experts: int, group: str | None = None) -> Tensor:
    """Count the tokens that chose each expert.

    The operator includes the sum over ranks: activation checkpointing keeps its result, so ranks communicate only once.

    Args:
        choices, is_counted: see `router_losses`.
        n_experts: E.
        group: name of the process group over which to sum; None: count only this rank's tokens.

    Returns:
        [E] int64.
    """
    counts = torch.zeros(n_experts, dtype=torch.int64, device=choices.device)
    counts = counts.scatter_add(0, choices.flatten().long(), is_counted.long().repeat_interleave(choices.shape[1]))
    return _all_counts(counts, group)


@operator("count_routing", None, "(Tensor counted, Tensor numbers, Tensor(a!) counts, Tensor(b!) sums) -> Tensor")
def count_routing(counted: Tensor, numbers: Tensor, counts: Tensor, sums: Tensor) -> Tensor:
    """Add the numbers of a micro-batch's routing to the running sums `counts` and `sums`.

    Recomputation in backward must not add them again, so activation checkpointing always keeps the result.

    Args:
        counted: [E] int64, counted tokens of each expert, as `count_choices` counts this rank's.
        numbers: [4] float64, see `routing_numbers`.
        counts, sums: [E] int64 and [4] float64.

    Returns:
        [0], for activation checkpointing to keep.
    """
    counts += counted
    sums += numbers
    return numbers.new_empty(0)


def routing_numbers(logits: Tensor, is_counted: Tensor, losses: Tensor, share: Tensor) -> Tensor:
    """Return what `MixtureOfExperts.sums` adds up of a micro-batch.

    Args:
        logits, is_counted: see `router_losses`.
        losses: [2] float32, balance loss and z-loss.
        share: [], the micro-batch's share of the step.

    Returns:
        [4] float64: entropy of each counted token's distribution over the experts, in nats; balance loss times `share`;
        z-loss times `share`; `share`.
    """
    entropy = (torch.special.entr(logits.softmax(1)).sum(1) * is_counted).double().sum()
    return torch.cat((entropy[None], (losses * share).double(), share[None].double()))
