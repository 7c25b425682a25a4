"""Cross-entropy over logits whose vocabulary may be split over ranks.

Each rank reduces its own columns to two numbers per token, its log-sum-exp and the logit of the target if it owns it;
one all-gather of those, 8 bytes a token and rank, replaces gathering the logits. Backward needs no communication.
The logits are read in their own dtype and never stored in float32, and backward writes the gradient over them: at the
peak of a step's memory they would else be there twice, 4 GiB each at Llama-3 8B with 16,384 tokens.

`local_statistics` and `overwrite_with_gradient` are the two memory passes, written as plain functions of tensors so
that `torch.compile` makes one kernel of each. Without it each of their operators stores float32, so they take ROWS
tokens at a time.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from titanlite.kernels.collectives import Group, all_gather
from titanlite.kernels.ignore_index import IGNORE_INDEX

ROWS = 256
"""Tokens of an eager pass over the logits: 64 at 8B's 16,384 tokens, beside 4 GiB of logits 0.4 GiB of float32."""


def local_statistics(logits: Tensor, targets: Tensor, first: int) -> tuple[Tensor, Tensor]:
    """Reduce the columns of one rank.

    Args:
        logits: [M, V/tp].
        targets: [M] int64 in the whole vocabulary, or IGNORE_INDEX.
        first: id of this rank's first column.

    Returns:
        Log-sum-exp over the columns, and the target's logit (0 if another rank owns it): [M] float32 each.
    """
    local = targets - first
    owned = (local >= 0) & (local < logits.shape[1])
    picked = logits.gather(1, torch.where(owned, local, 0)[:, None])[:, 0].float()
    return logits.float().logsumexp(-1), torch.where(owned, picked, 0.0)


def over_ranks(lse: Tensor, picked: Tensor, group: Group | None) -> tuple[Tensor, Tensor]:
    """Combine the statistics of each rank's columns, [M] each, to those of the whole vocabulary; collective."""
    if group is None:
        return lse, picked
    both = all_gather(torch.stack((lse, picked))[None], group)  # [tp, 2, M]
    return both[:, 0].logsumexp(0), both[:, 1].sum(0)


def overwrite_with_gradient(logits: Tensor, targets: Tensor, first: int, lse: Tensor, scale: Tensor) -> None:
    """Replace one rank's logits by the gradient of `scale · Σ loss` with respect to them.

    Args:
        logits: [M, V/tp].
        targets: [M] int64 in the whole vocabulary, or IGNORE_INDEX.
        first: id of this rank's first column.
        lse: [M] float32 log-sum-exp over the whole vocabulary.
        scale: [] float32.
    """
    columns = torch.arange(first, first + logits.shape[1], device=logits.device)
    softmax = (logits.float() - lse[:, None]).exp()
    scale = torch.where(targets == IGNORE_INDEX, 0.0, scale)[:, None]
    logits.copy_((softmax - (columns == targets[:, None]).float()) * scale)


def by_rows(function: Callable[..., tuple[Tensor, Tensor] | None]) -> Callable[..., Any]:
    """Let a pass over the logits take ROWS tokens at a time.

    Args:
        function: `local_statistics` or `overwrite_with_gradient`.

    Returns:
        The same function of the same arguments.
    """

    def in_parts(logits: Tensor, *others: Any) -> Any:
        parts = []
        for m in range(0, len(logits) or 1, ROWS):
            of_rows = (t[m : m + ROWS] if isinstance(t, Tensor) and t.ndim else t for t in others)
            parts.append(function(logits[m : m + ROWS], *of_rows))
        return None if parts[0] is None else tuple(torch.cat(results) for results in zip(*parts, strict=True))

    return in_parts


class CrossEntropy:
    """Sum of the cross-entropy over all targets.

    Args:
        group: the ranks that the vocabulary is split over, or None.
        compile: compile the two memory passes.
    """

    def __init__(self, group: Group | None = None, compile: bool = False) -> None:
        self.group = group
        # Dynamic shapes would cost speed in the widest kernels of a step; M and V never change within a run.
        made = partial(torch.compile, dynamic=False) if compile else by_rows
        self.statistics, self.gradient = made(local_statistics), made(overwrite_with_gradient)

    def __call__(self, logits: Tensor, targets: Tensor, of_sequences: Tensor | None = None) -> Tensor:
        """Sum the loss of all targets that are not IGNORE_INDEX.

        Args:
            logits: [M, V/tp].
            targets: [M] int64.
            of_sequences: [B] float32, to which the loss of each of the B sequences is added, if it is given.

        Returns:
            [] float32, equal on all ranks of the group. Its backward can run once and overwrites `logits`.
        """
        first = self.group.rank * logits.shape[1] if self.group else 0
        passes = self.statistics, self.gradient
        return _CrossEntropy.apply(logits, targets, first, self.group, *passes, of_sequences)  # type: ignore[no-any-return]


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx,
        logits: Tensor,
        targets: Tensor,
        first: int,
        group: Group | None,
        statistics: Callable[..., tuple[Tensor, Tensor]],
        gradient: Callable[..., None],
        of_sequences: Tensor | None,
    ) -> Tensor:
        lse, picked = over_ranks(*statistics(logits, targets, first), group)
        ctx.save_for_backward(logits, targets, lse)
        ctx.first, ctx.gradient = first, gradient
        losses = torch.where(targets == IGNORE_INDEX, 0.0, lse - picked)
        if of_sequences is not None:
            of_sequences += losses.view(len(of_sequences), -1).sum(1)
        return losses.sum()

    @staticmethod
    def backward(ctx, grad: Tensor):  # type: ignore[override]
        if ctx.gradient is None:
            raise RuntimeError("backward through this cross-entropy a second time: the first one overwrote the logits")
        logits, targets, lse = ctx.saved_tensors
        ctx.gradient(logits, targets, ctx.first, lse, grad)
        ctx.gradient = None
        return logits, None, None, None, None, None, None
