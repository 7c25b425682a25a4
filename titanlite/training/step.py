"""One optimizer step, top to bottom.

The host never waits for the device here. The device decides whether the update is applied, and keeps the results. The
loop reads them in one copy, one step later. To log a new number, add an entry to the results.
"""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from titanlite.float8.convert import precompute_scales
from titanlite.kernels.cross_entropy import IGNORE_INDEX
from titanlite.models.own_model import require_whole
from titanlite.observe.profiler import span
from titanlite.observe.step_profile import OPTIMIZER
from titanlite.parallel.mesh import Mesh
from titanlite.parallel.replicated_gradients import reduce_replicated_gradients

if TYPE_CHECKING:
    from titanlite.data.batches import Batch
    from titanlite.training.build import Run

NONE = -1.0
"""Stands for the loss of a source that has no targets in a step. It is not logged."""


def train_step(
    run: "Run",
    batches: "list[Batch]",
    lr: float,
    stop_requested: bool,
    attended: float = 0.0,
    sources: Sequence[str] = (),
    lacks_data: bool = False,
    *,
    logged: bool = False,
) -> dict[str, Tensor]:
    """Take one optimizer step, or none if the loss or a gradient is not finite, no token has a target, or a rank has no
    data for it.

    Args:
        batches: this rank's micro-batches.
        lr: learning rate.
        stop_requested: whether this process was asked to stop; every rank gets this in its results.
        attended: tokens to which a token of the batches attends, as `mean_attended` counts them.
        sources: names of sources, in the order of their numbers in batches; for losses by source.
        lacks_data: whether the batches of this rank are padding.
        logged: whether norms of the optimizer's groups are measured.

    Returns:
        By name, tensors [] float32 on the device, equal on every rank. For the loop: `skipped`, 1 if the update was
        skipped; `stop_asked` and `lacked_data`, numbers of ranks; `attended`, the mean over ranks; and `targets`, the
        number of targets of the global batch. To be logged: `loss`, the mean over the global batch's targets;
        `grad_norm`, of all gradients before clipping; with a z-loss its mean `z_loss`, without its coefficient;
        `loss.<source>`, `NONE` if the source has no targets; and if the step is `logged`, the numbers of `GroupNorms`.
    """
    # Count targets. All ranks of a tensor-parallel group count the same ones, hence the division. Integers are rounded
    # once: float32 is exact up to 2^24.
    n_by_batch = torch.stack([(batch.targets != IGNORE_INDEX).sum() for batch in batches])
    n_all = n_by_batch.sum()
    dist.all_reduce(n_all)
    n_targets = (n_all // run.mesh.tp_size).float()
    divisor_of_loss = n_targets.clamp(min=1)  # without targets all losses are 0
    # For routers: each micro-batch's share of the step's targets, over all ranks that split its sequences.
    if run.routers is not None and run.mesh.context is not None:
        dist.all_reduce(n_by_batch, group=run.mesh.context.get_group())
    shares = n_by_batch / divisor_of_loss

    # Forward and backward, then the norm of the gradients.
    loss_terms, by_source = _forward_backward(run, batches, divisor_of_loss, shares, len(sources))
    gradients = run.optimizer.gradients()
    reduce_replicated_gradients(run.parameters, run.mesh.tp_group)  # in place, so that `gradients` are reduced
    group_norms = run.optimizer.group_norms() if logged else None
    grad_norm = run.optimizer.norm(gradients, group_norms)

    # One all-reduce sums the terms of all ranks.
    of_host = {"stop_asked": stop_requested, "attended": attended / dist.get_world_size(), "lacked_data": lacks_data}
    terms = loss_terms | {name: torch.full_like(loss_terms["loss"], number) for name, number in of_host.items()}
    totals = torch.stack([*terms.values()])
    dist.all_reduce(totals)
    results = dict(zip(terms, totals.unbind(), strict=True))
    if sources:
        dist.all_reduce(by_source)

    # Every rank takes the same decision, since it depends on reduced values alone. A sum is finite only if both are.
    skip = (~torch.isfinite(results["loss"] + grad_norm) | (results["lacked_data"] > 0) | (n_targets == 0)).float()
    max_norm = run.config.training.max_norm
    divisor = (grad_norm / max_norm).clamp(min=1.0) if max_norm > 0 else torch.ones_like(grad_norm)  # of gradients

    # Update, and prepare the next step.
    with span(OPTIMIZER):
        run.optimizer.step(gradients, lr, divisor, skip, group_norms)
        if run.average is not None:
            run.average.update(skip)
        run.model.zero_grad(set_to_none=True)
        precompute_scales(run.parameters, run.mesh.fsdp)
        if run.routers is not None:
            run.routers.balance(skip)
    results |= {"grad_norm": grad_norm, "skipped": skip, "targets": n_targets}
    if sources:
        total, count = by_source
        of_sources = torch.where(count > 0, total / count, NONE).float().unbind()
        results |= {f"loss.{name}": mean for name, mean in zip(sources, of_sources, strict=True)}
    return results if group_norms is None else results | group_norms.numbers()


def _forward_backward(
    run: "Run", batches: "list[Batch]", divisor: Tensor, shares: Tensor, n_sources: int
) -> tuple[dict[str, Tensor], Tensor]:
    """Run forward and backward of each micro-batch of a step, and sum up gradients.

    Losses are divided by `divisor`, [] float32, the number of targets of the step. `shares`, [micro-steps] float32, are
    the fractions of these targets in each micro-batch, over all ranks that split its sequences.

    Returns:
        This rank's terms of the means `loss` and, if there is one, `z_loss`, [] float32 each; and sums of losses and
        targets of each source, [2, sources] float64.
    """
    loss = torch.zeros((), device=run.mesh.device)
    squares = torch.zeros_like(loss) if run.config.training.z_loss else None  # sum of the z-loss's terms
    by_source = torch.zeros(2, n_sources, dtype=torch.float64, device=run.mesh.device)
    for batch, share in zip(batches, shares, strict=True):
        if run.routers is not None:
            run.routers.begin(share, _of_rank(batch.is_counted, run.mesh))
        logits = run.model(batch.tokens, sequences=batch.sequences)  # [M, V/tp]
        if run.mesh.tp_size == 1:  # with tensor parallelism the plan checks the head
            require_whole(logits.shape, [len(batch.targets), run.dims.vocab_size], run.model, run.config.model)
        if batch.sources is None:
            part = run.loss(logits, batch.targets, squares=squares) / divisor
        else:
            losses = torch.zeros_like(batch.sources, dtype=torch.float32)  # of each sequence
            part = run.loss(logits, batch.targets, losses, squares) / divisor
            by_source += _by_source(losses, batch, n_sources)
        del logits  # the largest tensor: backward can free it early
        part.backward()
        loss += part.detach()
    means = {"loss": loss} if squares is None else {"loss": loss, "z_loss": squares / divisor}
    return {name: mean / run.mesh.tp_size for name, mean in means.items()}, by_source


def _of_rank(is_counted: Tensor | None, mesh: Mesh) -> Tensor | None:
    """Return the entries of `is_counted`, [M], for the M/tp consecutive tokens that this rank has between layers."""
    return None if is_counted is None else is_counted.chunk(mesh.tp_size)[mesh.tp.get_local_rank()]


def _by_source(losses: Tensor, batch: "Batch", n_sources: int) -> Tensor:
    """Sum `losses`, [B] for sequences, and their numbers of targets by source: [2, sources] float64."""
    assert batch.sources is not None  # noqa: S101
    targets = (batch.targets != IGNORE_INDEX).view(len(losses), -1).sum(1)
    is_of = batch.sources[None] == torch.arange(n_sources, device=losses.device)[:, None]  # a scatter's order is random
    return (torch.stack((losses.double(), targets.double()))[:, None] * is_of).sum(2)


@torch.no_grad()
def validation_loss(run: "Run", batches: "Iterable[Batch]") -> Tensor:
    """Return [2] float64 on the device: summed loss and number of targets over all ranks, each with as many batches."""
    totals = torch.zeros(2, dtype=torch.float64, device=run.mesh.device)
    for batch in batches:
        totals[0] += run.loss(run.model(batch.tokens, sequences=batch.sequences), batch.targets)
        totals[1] += (batch.targets != IGNORE_INDEX).sum()
    dist.all_reduce(totals)
    return totals / run.mesh.tp_size
