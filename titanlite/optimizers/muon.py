"""Muon: momentum and update on each rank's shards; one owner for each matrix, which orthogonalises it whole.

Matrices go through in buckets. The owners collect the rows of a bucket (`owners.py`), orthogonalise and hand back, in
two exchanges of all ranks. While a bucket is computed, the rows of the next and the results of the last travel.

    m ← μ m + (1 - μ) g;   u = μ m + (1 - μ) g
    p ← (1 - lr·λ) p - lr·0.2·√max(R, C) · orthogonalise(u)

The factor gives an update the size of AdamW's, so that AdamW's learning rate and weight decay carry over.

Sources: Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks"; factor and decay are from Liu et
al. 2025, "Muon is Scalable for LLM Training".
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from titanlite.device import host_tensors
from titanlite.float8.weight import local_data
from titanlite.kernels.orthogonalise import ITERATIONS, Polynomials, orthogonalise
from titanlite.kernels.row_table import NOWHERE, RowTable, TensorTable, table, tensor_table
from titanlite.kernels.rows import momentum_rows, put_rows, take_rows, update_rows
from titanlite.models.matrices import Matrix
from titanlite.optimizers.group_norms import GroupNorms
from titanlite.optimizers.owners import Bucket, Transfer, assign, held_by_each_rank, schedule
from titanlite.parallel.mesh import Mesh
from titanlite.parallel.share_matrices import BUCKET


@dataclass(frozen=True)
class MuonRule:
    """The constants of the update, the same for all matrices of a `Muon`."""

    polynomials: Polynomials = ITERATIONS["polar_express"]
    momentum: float = 0.95  # μ
    nesterov: bool = True  # else u = m
    scale: float = 0.2  # root mean square of an update, as AdamW's
    eps: float = 1e-7  # the least norm that a matrix is divided by
    dtype: torch.dtype = torch.bfloat16  # of the exchanges
    state_dtype: torch.dtype = torch.float32  # of the momentum
    bucket: int = BUCKET  # elements that a rank collects at a time
    beta2: float = 0.95  # β₂ of NorMuon


class Pace(NamedTuple):
    """The factors of one parameter."""

    lr_factor: float = 1.0  # of the learning rate
    weight_decay: float = 0.1  # λ


class Muon:
    """The update of parameters, matrices or several fused, that share a `MuonRule`; made after FSDP's lazy
    initialisation. To build it, and each step, is collective over all ranks.

    Attributes:
        locals: this rank's shard of each parameter.
        kept: {"momentum": by the parameter's name, laid out as this rank's shard}.
        buckets: the matrices that travel together.

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
        self._momenta = tensor_table("momentum", [*zeros.values()])
        self._parameters = tensor_table("parameter", [*self.locals.values()])
        with host_tensors():
            for name, parameter in parameters.items():
                rows = torch.cat([m.rows for m in matrices.get(name, ())] or [torch.empty(0, dtype=torch.int64)])
                if not torch.equal(rows.sort().values, torch.arange(len(parameter))):
                    raise ValueError(f"Muon: the matrices of {name} do not have each of its {len(parameter)} rows once")
            ordered = [matrix for name in parameters for matrix in matrices[name]]
            held, rank = held_by_each_rank(parameters), dist.get_rank()
            stacks = assign(ordered, len(held), len(rule.polynomials), rule.bucket)
            self.buckets = [schedule(each, held, rank, mesh.replicas) for each in stacks]
            numbers = {name: i for i, name in enumerate(self.locals)}
            self._tables = [self._tables_of(bucket, numbers) for bucket in self.buckets]

    # One step.

    @torch.no_grad()
    def step(
        self,
        grads: dict[str, Tensor],
        lr: float,
        divisor: Tensor,
        skip: Tensor,
        norms: GroupNorms | None = None,
        decay_factor: float = 1.0,
    ) -> None:
        """Apply one update, or none, with gradients as of `UpdateRule.step`; `decay_factor` is of all weight decays."""
        if not self.buckets:
            return
        self._begin(skip)
        shards = tensor_table("gradient", [grads[name] for name in self.locals])  # allocated anew each step
        coming, previous = self._collect(self._tables[0], shards, divisor, skip), None
        for tables, following in zip(self._tables, (*self._tables[1:], None), strict=True):
            collected = coming.wait()
            if following is not None:  # its rows travel while this bucket is computed
                coming = self._collect(following, shards, divisor, skip)
            returning = self._hand_back(tables, self._orthogonalise(tables, collected))
            if previous is not None:  # its results have travelled while this bucket was computed
                self._apply(*previous, lr, skip, norms, decay_factor)
            previous = tables, returning
        assert previous is not None  # noqa: S101
        self._apply(*previous, lr, skip, norms, decay_factor)
        self._end()

    def _begin(self, skip: Tensor) -> None:
        """Prepare a step."""

    def _end(self) -> None:
        """Finish a step."""

    def _collect(self, tables: "_Tables", grads: TensorTable, divisor: Tensor, skip: Tensor) -> "_Exchange":
        """Update the momentum, and begin to send the owners what they orthogonalise."""
        sent, rule = self._empty(tables.bucket.given), self.rule
        momentum_rows(tables.shard_to_given, grads, self._momenta, sent, divisor, skip, rule.momentum, rule.nesterov)
        return self._exchange(sent, tables.bucket.given, tables.bucket.collected)

    def _orthogonalise(self, tables: "_Tables", collected: Tensor) -> Tensor:
        """Return the results of this rank's stacks, flat, one after another."""
        whole = collected.new_empty(sum(math.prod(shape) for shape in tables.own))
        put_rows(tables.collected_to_stacks, whole, collected)
        for matrices, _, _ in self._at_once(tables, whole):
            orthogonalise(matrices, self.rule.polynomials, self.rule.eps, out=matrices)
        return whole

    def _at_once(self, tables: "_Tables", whole: Tensor) -> Iterator[tuple[Tensor, int, int]]:
        """Yield (matrices that are computed together [n, R, C], number of their stack, place of the first in it)."""
        first = 0
        for number, shape in enumerate(tables.own):
            stack = whole[first : first + math.prod(shape)].view(shape)
            first += stack.numel()
            # The kernel of a batched matmul may depend on the number of matrices, and so on the number of owners.
            together = 1 if torch.are_deterministic_algorithms_enabled() else len(stack)
            for i in range(0, len(stack), together):
                yield stack[i : i + together], number, i

    def _hand_back(self, tables: "_Tables", results: Tensor) -> "_Exchange":
        """Begin to send results to the holders."""
        sent = self._empty(tables.bucket.returned)
        take_rows(tables.stacks_to_returned, results, sent)
        return self._exchange(sent, tables.bucket.returned, tables.bucket.taken)

    def _apply(
        self,
        tables: "_Tables",
        taken: "_Exchange",
        lr: float,
        skip: Tensor,
        norms: GroupNorms | None,
        decay_factor: float,
    ) -> None:
        """Update rows of this rank's shards."""
        given = tables.taken_to_shard, self._parameters, taken.wait(), tables.scales, tables.decays, lr, skip
        squares = update_rows(*given, measure=norms is not None, decay_factor=decay_factor)
        if norms is not None and squares is not None:
            stacks, rows = tables.bucket.stacks, tables.bucket.taken.rows
            norms.add_updates_of_rows([(stacks[each.stack].parameter, len(each.at)) for each in rows], squares)

    def _empty(self, transfer: Transfer) -> Tensor:
        return torch.empty(sum(transfer.sizes), dtype=self.rule.dtype, device=self.mesh.device)

    def _exchange(self, sent: Tensor, goes: Transfer, comes: Transfer) -> "_Exchange":
        received = self._empty(comes)
        return _Exchange(dist.all_to_all_single(received, sent, comes.sizes, goes.sizes, async_op=True), sent, received)

    # Where each row is.

    def _tables_of(self, bucket: Bucket, numbers: Mapping[str, int]) -> "_Tables":
        """Look up each row that this rank holds or owns, in its tensor and in the exchanges."""
        in_given, in_taken = dict(_places_of_runs(bucket.given)), dict(_places_of_runs(bucket.taken))
        given, taken, scales, decays = [], [], [], []
        for rows in bucket.taken.rows:  # all that this rank holds
            name, of, columns, _ = bucket.stacks[rows.stack]
            run = numbers[name], rows.at * rows.columns, rows.columns
            given.append((*run, in_given.get(rows.stack, NOWHERE)))
            taken.append((*run, in_taken[rows.stack]))
            pace, n = self.paces[name], len(rows.at)
            scale = pace.lr_factor * self.rule.scale * math.sqrt(max(of.shape[1], columns))
            scales.append(torch.full((n,), scale, dtype=torch.float64))
            decays.append(torch.full((n,), pace.lr_factor * pace.weight_decay, dtype=torch.float64))
        own = {i: (*bucket.stacks[i].rows.shape, bucket.stacks[i].columns) for i in bucket.own}
        starts = dict(zip(own, accumulate(map(math.prod, own.values()), initial=0), strict=False))

        def of_stacks(transfer: Transfer) -> RowTable:
            firsts = (rows.at * own[rows.stack][2] + rows.first_column + starts[rows.stack] for rows in transfer.rows)
            places = (first for _, first in _places_of_runs(transfer))
            runs = zip(transfer.rows, firsts, places, strict=True)
            return table((0, at, rows.columns, place) for rows, at, place in runs).on(self.mesh.device)

        on = self.mesh.device
        return _Tables(
            bucket=bucket,
            shard_to_given=table(given).on(on),
            taken_to_shard=table(taken).on(on),
            collected_to_stacks=of_stacks(bucket.collected),
            stacks_to_returned=of_stacks(bucket.returned),
            scales=torch.cat(scales).to(on) if scales else torch.empty(0, device=on),
            decays=torch.cat(decays).to(on) if decays else torch.empty(0, device=on),
            own=list(own.values()),
        )


@dataclass(frozen=True, eq=False)
class _Tables:
    """A bucket, with the tables by which its rows are moved."""

    bucket: Bucket
    shard_to_given: RowTable  # rows of this rank's shards, with their places in `bucket.given`
    taken_to_shard: RowTable  # the same rows, with their places in `bucket.taken`
    collected_to_stacks: RowTable  # rows of this rank's stacks, with their places in `bucket.collected`
    stacks_to_returned: RowTable  # the same rows, with their places in `bucket.returned`
    scales: Tensor  # of each row of `taken_to_shard`: the update's factor of the learning rate
    decays: Tensor  # of each row of `taken_to_shard`: the weight decay's factor of the learning rate
    own: list[tuple[int, ...]]  # [B, R, C] of each of this rank's stacks


class _Exchange(NamedTuple):
    """An exchange of all ranks that has begun."""

    work: Any
    sent: Tensor  # alive until it is done
    received: Tensor

    def wait(self) -> Tensor:
        self.work.wait()
        return self.received


def _places_of_runs(transfer: Transfer) -> Iterator[tuple[int, int]]:
    """Yield (stack of a run of rows, place of its first element in the exchange)."""
    first = 0
    for rows in transfer.rows:
        yield rows.stack, first
        first += len(rows.at) * rows.columns
