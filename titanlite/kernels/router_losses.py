"""Auxiliary losses of a router, and counts of the tokens that it sends to each expert.

A model returns only logits, so an auxiliary loss is a gradient that an identity adds in backward (`with_loss`). It is a
mean over a micro-batch's tokens that count (`data/document_starts.py`), times the micro-batch's share of the step's
targets, since gradients of micro-batches and ranks are summed.

M tokens, E experts, K experts of a token.

Source: Fedus et al. 2021, "Switch Transformers", eq. 4 to 6; Zoph et al. 2022, "ST-MoE", eq. 5.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from titanlite.kernels.collectives import Group, all_reduce, named_group
from titanlite.kernels.operators import operator


def router_losses(logits: Tensor, choices: Tensor, is_counted: Tensor, group: Group | None = None) -> Tensor:
    """Return the balance loss and the z-loss: means over the tokens that are counted.

    The balance loss is E · Σ f·p, as in `transformers`: f the share of tokens that chose an expert, p its mean
    probability; it is K if experts are used equally. The z-loss is the mean square of the logits' log-sum-exp.

    Args:
        logits: [M, E] float32.
        choices: [M, K] int32; they have no gradient.
        is_counted: [M] bool.
        group: the ranks with the micro-batch's other tokens; None: there are no others.

    Returns:
        [2] in `logits.dtype`: this rank's terms, whose sum over the ranks is the loss. f is of all tokens, and has no
        gradient. Zeros if no token is counted.
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
    """Return `x`, which must have a gradient; in backward the loss, [], gets this micro-batch's `share` as its own."""
    return _WithLoss.apply(x, loss, share)  # type: ignore[no-any-return]


class _WithLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor, share: Tensor) -> Tensor:
        ctx.save_for_backward(share.to(loss.dtype, copy=True))  # the next micro-batch writes another
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad, ctx.saved_tensors[0], None


@operator("count_choices", None)
def count_choices(choices: Tensor, is_counted: Tensor, n_experts: int, group: str | None = None) -> Tensor:
    """Count the tokens of each expert.

    The sum over ranks is part of the operator: activation checkpointing keeps the result, so ranks meet once.

    Args:
        choices, is_counted: as of `router_losses`.
        n_experts: E.
        group: name of the process group whose tokens are counted together; None: only this rank's.

    Returns:
        [E] int64.
    """
    counts = torch.zeros(n_experts, dtype=torch.int64, device=choices.device)
    counts = counts.scatter_add(0, choices.flatten().long(), is_counted.long().repeat_interleave(choices.shape[1]))
    return counts if group is None else all_reduce(counts, "sum", named_group(group))


@operator(
    "count_routing",
    None,
    "(Tensor choices, Tensor is_counted, Tensor logits, Tensor losses, Tensor share, "
    "Tensor(a!) counts, Tensor(b!) sums) -> Tensor",
)
def count_routing(
    choices: Tensor,
    is_counted: Tensor,
    logits: Tensor,
    losses: Tensor,
    share: Tensor,
    counts: Tensor,
    sums: Tensor,
) -> Tensor:
    """Add a micro-batch's routing to running sums.

    Recomputation in backward must not repeat it: activation checkpointing keeps its result, whatever a save-list says.

    Args:
        logits, choices, is_counted: as of `router_losses`.
        losses: [2] float32, balance and z.
        share: [], of the micro-batch.
        counts: [E] int64, tokens of each expert.
        sums: [4] float64: the entropies of tokens' distributions over experts, in nats; both losses times their shares;
            and the shares.

    Returns:
        [0], for activation checkpointing to keep.
    """
    counts += count_choices.definition(choices, is_counted, len(counts))
    entropy = (torch.special.entr(logits.softmax(1)).sum(1) * is_counted).double().sum()
    sums += torch.cat((entropy[None], (losses * share).double(), share[None].double()))
    return losses.new_empty(0)
