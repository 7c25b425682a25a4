"""Train a router by losses of its own, beside that of its tokens, and count where it sends them.

A model returns logits alone, so a loss of the router's own is a gradient that an identity adds in backward
(`with_loss`). Each micro-batch has such a loss, a mean over its tokens; it counts by the micro-batch's share of the
step's targets, since gradients of micro-batches and ranks are summed.

M tokens, E experts, K experts of a token.

Source: Fedus et al. 2021, "Switch Transformers", eq. 4 to 6; Zoph et al. 2022, "ST-MoE", eq. 5.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from titanlite.kernels.collectives import Group, named_group, total
from titanlite.kernels.operators import operator


def balance_loss(logits: Tensor, choices: Tensor, group: Group | None = None) -> Tensor:
    """Return E · Σ f·p, K where experts are used alike: f the share of tokens that chose an expert, p its mean
    probability. So `transformers` has it.

    Args:
        logits: [M, E] float32.
        choices: [M, K] int32; they have no gradient.
        group: the ranks that have equally many of a micro-batch's tokens each, or None: these are all.

    Returns:
        [] in `logits.dtype`: this rank's term, and with the gradient of its tokens. f is that of all tokens, and has
        none; p is a mean, so that the ranks' terms add up to the loss.
    """
    counts = count_choices(choices, logits.shape[1], None if group is None else group.name)
    if group is not None:
        counts = counts / group.size
    share = counts.to(logits.dtype) / len(choices)
    loss = logits.shape[1] * (share * logits.softmax(1).mean(0)).sum()
    return loss if group is None else loss / group.size


def z_loss(logits: Tensor, group: Group | None = None) -> Tensor:
    """Return the mean square of what a softmax divides by, as a logarithm.

    Args:
        logits: [M, E] float32.
        group: as of `balance_loss`.

    Returns:
        [] in `logits.dtype`: this rank's term.
    """
    loss = logits.logsumexp(1).square().mean()
    return loss if group is None else loss / group.size


def with_loss(x: Tensor, loss: Tensor, share: Tensor) -> Tensor:
    """Return `x`; in backward the loss gets `share` as its gradient.

    Args:
        x: any; the result must have a gradient.
        loss: [].
        share: [], of this micro-batch.
    """
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
def count_choices(choices: Tensor, n_experts: int, group: str | None = None) -> Tensor:
    """Count the tokens of each expert.

    Adding up over ranks is part of it: activation checkpointing keeps the result, and ranks meet once.

    Args:
        choices: [M, K] int32.
        n_experts: E.
        group: name of the process group whose ranks' tokens are counted together; None: this one's alone.

    Returns:
        [E] int64.
    """
    counts = torch.zeros(n_experts, dtype=torch.int64, device=choices.device)
    chosen = choices.flatten().long()
    counts = counts.scatter_add(0, chosen, torch.ones_like(chosen))
    return counts if group is None else total(counts, named_group(group))


@operator(
    "count_routing",
    None,
    "(Tensor choices, Tensor logits, Tensor losses, Tensor share, Tensor(a!) counts, Tensor(b!) sums) -> Tensor",
)
def count_routing(
    choices: Tensor, logits: Tensor, losses: Tensor, share: Tensor, counts: Tensor, sums: Tensor
) -> Tensor:
    """Add what a micro-batch's routing is to what has been counted.

    Recomputation in backward must not repeat it: activation checkpointing keeps its result, whatever a save-list says.

    Args:
        choices: [M, K] int32.
        logits: [M, E] float32.
        losses: [2] float32, balance and z.
        share: [], of the micro-batch.
        counts: [E] int64, tokens of each expert.
        sums: [3] float64: the entropy of each token's distribution over experts, in nats; both losses by their shares.

    Returns:
        [0], so that there is something to keep.
    """
    counts += count_choices.definition(choices, len(counts))
    entropy = torch.special.entr(logits.softmax(1)).sum(1).double().sum()
    sums += torch.cat((entropy[None], (losses * share).double()))
    return losses.new_empty(0)
