"""Cross-entropy over logits whose vocabulary may be split over ranks, optionally with capped logits and a z-loss.

Each rank reduces its own columns to two numbers per token: their log-sum-exp, and the target's logit if the rank owns
it. One all-gather of these, 8 bytes per token and rank, replaces gathering the logits. Backward needs no communication.
Logits are read in their own dtype and never stored in float32, and backward overwrites them with the gradient: a second
copy would be 4 GiB at the peak of memory, for Llama-3 8B with 16,384 tokens.

A model may cap its logits softly, `cap · tanh(logits / cap)`: both passes compute this in float32, and store no capped
logits. The z-loss, `z_loss · Σ lse²`, keeps the softmax's divisor near 1, and needs no further number per token.

`local_statistics` and `overwrite_with_gradient` are the two passes over memory. On a GPU each is a kernel that reads
the logits once (`titanlite/kernels/device/cross_entropy.py`). Elsewhere each of their operations stores a float32
tensor, so they take ROWS tokens at a time.

Source: Chowdhery et al. 2022, "PaLM", section 5, for the z-loss; Gemma Team 2024, "Gemma 2", section 2, for the cap.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from titanlite.device import has_memory
from titanlite.kernels.collectives import Group, all_gather
from titanlite.kernels.ignore_index import IGNORE_INDEX
from titanlite.kernels.operators import operator

ROWS = 256
"""Tokens at a time in a pass of the definition. For Llama-3 8B they take 0.4 GiB in float32, all logits 4 GiB."""


def by_rows(function: Callable[..., tuple[Tensor, Tensor] | None]) -> Callable[..., Any]:
    """Make `function`, a pass over the logits, take ROWS tokens at a time (all at once if the logits are fake)."""

    @functools.wraps(function)
    def in_parts(logits: Tensor, *others: Any) -> Any:
        parts = []
        rows = ROWS if has_memory(logits) else len(logits) or 1
        for m in range(0, len(logits) or 1, rows):
            of_rows = (t[m : m + rows] if isinstance(t, Tensor) and t.ndim else t for t in others)
            parts.append(function(logits[m : m + rows], *of_rows))
        return None if parts[0] is None else tuple(torch.cat(results) for results in zip(*parts, strict=True))

    return in_parts


def softcapped(logits: Tensor, softcap: float) -> Tensor:
    """Return float32 logits, capped softly to ±softcap; not capped if `softcap` is 0."""
    return softcap * (logits.float() / softcap).tanh() if softcap else logits.float()


@operator(
    "cross_entropy_statistics",
    "cross_entropy.launch_cross_entropy_statistics",
    "(Tensor logits, Tensor targets, int first, float softcap) -> (Tensor, Tensor)",
)
@by_rows
def local_statistics(logits: Tensor, targets: Tensor, first: int, softcap: float) -> tuple[Tensor, Tensor]:
    """Reduce one rank's columns of the logits to two numbers per token.

    Args:
        logits: [M, V/tp].
        targets: [M] int64, ids in the whole vocabulary, or IGNORE_INDEX.
        first: id of the first column in the whole vocabulary.
        softcap: cap of the logits; 0: none.

    Returns:
        Log-sum-exp over the columns, and the target's logit (0 if another rank owns it): [M] float32 each.
    """
    local = targets - first
    owned = (local >= 0) & (local < logits.shape[1])
    picked = softcapped(logits.gather(1, torch.where(owned, local, 0)[:, None])[:, 0], softcap)
    return softcapped(logits, softcap).logsumexp(-1), torch.where(owned, picked, 0.0)


def over_ranks(lse: Tensor, picked: Tensor, group: Group | None) -> tuple[Tensor, Tensor]:
    """Combine the ranks' results of `local_statistics`, [M] each, to those of the whole vocabulary. Collective."""
    if group is None:
        return lse, picked
    both = all_gather(torch.stack((lse, picked))[None], group)  # [tp, 2, M]
    return both[:, 0].logsumexp(0), both[:, 1].sum(0)


@operator(
    "cross_entropy_gradient",
    "cross_entropy.launch_cross_entropy_gradient",
    "(Tensor(a!) logits, Tensor targets, int first, Tensor lse, Tensor scale, float softcap, float z_loss) -> ()",
)
@by_rows
def overwrite_with_gradient(
    logits: Tensor, targets: Tensor, first: int, lse: Tensor, scale: Tensor, softcap: float, z_loss: float
) -> None:
    """Replace one rank's logits by the gradient of `scale · Σ (loss + z_loss · lse²)` with respect to these logits.

    Args:
        logits, targets, first, softcap: see `local_statistics`.
        lse: [M] float32 log-sum-exp over the whole vocabulary.
        scale: [] float32.
        z_loss: coefficient of the squares of `lse`.
    """
    columns = torch.arange(first, first + logits.shape[1], device=logits.device)
    gradient = (softcapped(logits, softcap) - lse[:, None]).exp()  # the softmax
    if z_loss:
        gradient = gradient * (1 + 2 * z_loss * lse)[:, None]
    gradient = gradient - (columns == targets[:, None]).float()
    if softcap:
        gradient = gradient * (1 - (logits.float() / softcap).tanh().square())
    logits.copy_(gradient * torch.where(targets == IGNORE_INDEX, 0.0, scale)[:, None])


class CrossEntropy:
    """Computes the sum of the cross-entropy over all targets.

    Args:
        group: the ranks that the vocabulary is split over, or None.
        softcap: cap of the logits; 0: none.
        z_loss: coefficient of the z-loss.
    """

    def __init__(self, group: Group | None = None, *, softcap: float = 0.0, z_loss: float = 0.0) -> None:
        self.group, self.softcap, self.z_loss = group, softcap, z_loss

    def __call__(
        self,
        logits: Tensor,
        targets: Tensor,
        of_sequences: Tensor | None = None,
        squares: Tensor | None = None,
    ) -> Tensor:
        """Sum the loss of all targets that are not IGNORE_INDEX.

        The sum does not include the z-loss, but the gradient in backward does, as if `z_loss · squares` were added.

        Args:
            logits: [M, V/tp].
            targets: [M] int64.
            of_sequences: [B] float32; the loss of each of the B sequences is added to it. None: not computed.
            squares: [] float32; the sum over all targets of squared log-sum-exps is added to it. None: not computed.

        Returns:
            [] float32, equal on all ranks of the group. Its backward can run once and overwrites `logits`.
        """
        first = self.group.rank * logits.shape[1] if self.group else 0
        given = logits, targets, first, self.group, self.softcap, self.z_loss, of_sequences, squares
        return _CrossEntropy.apply(*given)  # type: ignore[no-any-return]


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx,
        logits: Tensor,
        targets: Tensor,
        first: int,
        group: Group | None,
        softcap: float,
        z_loss: float,
        of_sequences: Tensor | None,
        squares: Tensor | None,
    ) -> Tensor:
        lse, picked = local_statistics(logits, targets, first, softcap)
        lse, picked = over_ranks(lse, picked, group)
        ctx.save_for_backward(logits, targets, lse)
        ctx.first, ctx.numbers = first, (softcap, z_loss)
        losses = torch.where(targets == IGNORE_INDEX, 0.0, lse - picked)
        if of_sequences is not None:
            of_sequences += losses.view(len(of_sequences), -1).sum(1)
        if squares is not None:
            squares += torch.where(targets == IGNORE_INDEX, 0.0, lse.square()).sum()
        return losses.sum()

    @staticmethod
    def backward(ctx, grad: Tensor):  # type: ignore[override]
        if ctx.numbers is None:
            raise RuntimeError("backward through this cross-entropy a second time: the first one overwrote the logits")
        logits, targets, lse = ctx.saved_tensors
        overwrite_with_gradient(logits, targets, ctx.first, lse, grad, *ctx.numbers)
        torch.autograd.graph.increment_version(logits)  # as an operation of torch does: others may have saved them
        ctx.numbers = None
        return logits, None, None, None, None, None, None, None
