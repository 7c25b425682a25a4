"""Muon on each rank's shards: momentum where they lie, orthogonalisation of whole matrices by one owner each.

Momentum and the update are elementwise, on the shards. Between the two, rows of each matrix are collected by its owner
(`owners.py`), orthogonalised in the dtype of the matmuls, and handed back: two exchanges of all ranks for a bucket. The
rows of the next bucket travel while one is computed, and so do the results of the last.

    m ← μ m + (1 - μ) g;   u = μ m + (1 - μ) g
    p ← (1 - lr·λ) p - lr·0.2·√max(R, C) · orthogonalise(u)

The factor gives the update of a matrix the size that AdamW's has, whose learning rate and weight decay carry over.

Sources: Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks"; the factor and the decay are of
Liu et al. 2025, "Muon is Scalable for LLM Training".
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from titanlite.float8.weight import local_data
from titanlite.kernels.orthogonalise import ITERATIONS, Polynomials, orthogonalise
from titanlite.parallel.mesh import Mesh
from titanlite.training.optimizers.matrices import Matrix
from titanlite.training.optimizers.owners import Bucket, RowRun, Transfer, assign, held_by_each_rank, schedule


@dataclass(frozen=True)
class MuonRule:
    """How all matrices are updated."""

    polynomials: Polynomials = ITERATIONS["polar_express"]
    momentum: float = 0.95  # μ
    nesterov: bool = True  # else u = m
    scale: float = 0.2  # root mean square of an update, as AdamW's is
    eps: float = 1e-7  # the least norm that a matrix is divided by
    dtype: torch.dtype = torch.bfloat16  # of what travels, and of the matmuls
    state_dtype: torch.dtype = torch.float32  # of the momentum
    bucket: int = 1 << 27  # elements that a rank collects at a time


class Pace(NamedTuple):
    """How fast one parameter moves."""

    lr_factor: float = 1.0  # of the learning rate
    weight_decay: float = 0.1  # λ


class Muon:
    """The update of the parameters that have this rule. Building it, and each step, is collective over all ranks.

    Args:
        parameters: by name; all are matrices, or fused of some. After FSDP's lazy initialisation.
        mesh: the mesh.
        matrices: of each parameter, which have each of its rows once; from `matrices_of`.
        rule: how they are updated.
        paces: of each parameter.

    Attributes:
        locals: this rank's shard of each parameter.
        kept: state of each kind, "momentum" alone, by the parameter's name, laid out as this rank's shard of it.
        buckets: of matrices that travel together.

    Raises:
        ValueError: the matrices of a parameter do not have each of its rows once.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        mesh: Mesh,
        matrices: Mapping[str, Sequence[Matrix]],
        rule: MuonRule,
        paces: Mapping[str, Pace],
    ) -> None:
        self.rule, self.paces, self.mesh = rule, dict(paces), mesh
        self.locals = {name: local_data(p) for name, p in parameters.items()}
        zeros = {name: torch.zeros_like(p, dtype=rule.state_dtype) for name, p in self.locals.items()}
        self.kept = {"momentum": zeros}
        for name, parameter in parameters.items():
            rows = torch.cat([m.rows for m in matrices.get(name, ())] or [torch.empty(0, dtype=torch.int64)])
            if not torch.equal(rows.sort().values, torch.arange(len(parameter))):
                raise ValueError(f"Muon: the matrices of {name} do not have each of its {len(parameter)} rows once")
        ordered = [matrix for name in parameters for matrix in matrices[name]]
        held, rank = held_by_each_rank(parameters), dist.get_rank()
        stacks = assign(ordered, len(held), len(rule.polynomials), rule.bucket)
        self.buckets = [_on(schedule(each, held, rank, mesh.replicas), mesh.device) for each in stacks]

    @torch.no_grad()
    def step(self, grads: dict[str, Tensor], lr: float, divisor: Tensor, skip: Tensor) -> None:
        """Apply one update, or none.

        Args:
            grads: this rank's shards; their values are not defined afterwards.
            lr: learning rate.
            divisor: [] float32 that gradients are divided by, to clip them.
            skip: [] float32; 1 leaves parameters and state as they are.
        """
        for name, momentum in self.kept["momentum"].items():
            self._accumulate(grads[name], momentum, divisor, skip)
        if not self.buckets:
            return
        coming, going = self._collect(self.buckets[0], grads), None
        for bucket, behind in zip(self.buckets, (*self.buckets[1:], None), strict=True):
            collected = coming.wait()
            if behind is not None:
                coming = self._collect(behind, grads)
            result = bucket, self._hand_back(bucket, self._orthogonalise(bucket, collected))
            if going is not None:
                self._apply(*going, lr, skip)
            going = result
        if going is not None:
            self._apply(*going, lr, skip)

    def _accumulate(self, grad: Tensor, momentum: Tensor, divisor: Tensor, skip: Tensor) -> None:
        """Update the momentum, and turn the gradient into what is orthogonalised."""
        grad.div_(divisor)
        new = torch.lerp(momentum.to(grad.dtype), grad, 1 - self.rule.momentum)
        grad.copy_(grad.lerp(new, self.rule.momentum) if self.rule.nesterov else new)
        momentum.copy_(torch.where(skip > 0, momentum, new.to(momentum.dtype)))

    def _collect(self, bucket: Bucket, updates: dict[str, Tensor]) -> "_Exchange":
        """Begin to send rows to the owners."""
        of = [(updates[bucket.stacks[r.stack].parameter], r.at) for r in bucket.given.rows]
        pieces = [shard.index_select(0, at).to(self.rule.dtype).flatten() for shard, at in of]
        return _Exchange(pieces, bucket.given, bucket.collected, self.rule.dtype, self.mesh.device)

    def _orthogonalise(self, bucket: Bucket, collected: Tensor) -> dict[int, Tensor]:
        """Return the results of this rank's stacks, [B·R, C] each, by their place in the bucket."""
        shapes = {i: bucket.stacks[i].rows.shape for i in bucket.own}
        whole = {i: collected.new_empty(shapes[i].numel(), bucket.stacks[i].columns) for i in bucket.own}
        for rows, piece in _by_run(bucket.collected, collected):
            whole[rows.stack].narrow(1, rows.first_column, rows.columns).index_copy_(0, rows.at, piece)
        rule = self.rule
        return {
            i: orthogonalise(x.view(*shapes[i], -1), rule.polynomials, rule.eps).flatten(0, 1) for i, x in whole.items()
        }

    def _hand_back(self, bucket: Bucket, results: dict[int, Tensor]) -> "_Exchange":
        """Begin to send results to the holders."""
        of = [(results[r.stack].narrow(1, r.first_column, r.columns), r.at) for r in bucket.returned.rows]
        pieces = [result.index_select(0, at).flatten() for result, at in of]
        return _Exchange(pieces, bucket.returned, bucket.taken, self.rule.dtype, self.mesh.device)

    def _apply(self, bucket: Bucket, taken: "_Exchange", lr: float, skip: Tensor) -> None:
        """Update rows of this rank's shards."""
        for rows, piece in _by_run(bucket.taken, taken.wait()):
            name, of, columns, _ = bucket.stacks[rows.stack]
            shard, (lr_factor, weight_decay) = self.locals[name], self.paces[name]
            own_lr, scale = lr * lr_factor, self.rule.scale * math.sqrt(max(of.shape[1], columns))
            old = shard.index_select(0, rows.at)
            new = (old * (1 - own_lr * weight_decay)).sub_(piece.to(old.dtype), alpha=own_lr * scale)
            shard.index_copy_(0, rows.at, torch.where(skip > 0, old, new))


class _Exchange:
    """One exchange of all ranks, on its way."""

    def __init__(
        self, pieces: list[Tensor], sent: Transfer, received: Transfer, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._sent = torch.cat(pieces) if pieces else torch.empty(0, dtype=dtype, device=device)
        self._received = torch.empty(sum(received.sizes), dtype=dtype, device=device)
        self._work = dist.all_to_all_single(self._received, self._sent, received.sizes, sent.sizes, async_op=True)

    def wait(self) -> Tensor:
        """Return what has come."""
        assert self._work is not None  # noqa: S101
        self._work.wait()
        return self._received


def _by_run(transfer: Transfer, flat: Tensor) -> Iterator[tuple[RowRun, Tensor]]:
    """Cut what has come into rows, [n, columns] each."""
    sizes = [len(rows.at) * rows.columns for rows in transfer.rows]
    for rows, piece in zip(transfer.rows, flat.split(sizes), strict=True):
        yield rows, piece.view(len(rows.at), rows.columns)


def _on(bucket: Bucket, device: torch.device) -> Bucket:
    """Move the places of rows to a device."""
    for transfer in (bucket.given, bucket.collected, bucket.returned, bucket.taken):
        transfer.rows = [rows._replace(at=rows.at.to(device)) for rows in transfer.rows]
    return bucket
