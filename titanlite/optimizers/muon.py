"""Muon: momentum and update run on each rank's shards; one rank, the owner of a matrix, orthogonalises all of it.

Matrices are processed in buckets. The owners collect the rows of a bucket's matrices (`owners.py`), orthogonalise them
and send the results back, in two all-to-all exchanges. While a bucket is computed, the rows of the next one and the
results of the previous one are in transit. For a matrix p [R, C] with gradient g, momentum m and weight decay λ:

    m ← μ m + (1 - μ) g;   u = μ m + (1 - μ) g
    p ← (1 - lr·λ) p - lr·0.2·√max(R, C) · orthogonalise(u)

The factor 0.2·√max(R, C) makes an update as large as AdamW's: AdamW's learning rate and weight decay can be reused.

Sources: Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks"; factor and decay are from Liu et
al. 2025, "Muon is Scalable for LLM Training".
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, ClassVar, NamedTuple

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
    nesterov: bool = True  # False, and always for Dion2: u = m
    scale: float = 0.2  # root mean square of an update, about that of AdamW
    eps: float = 1e-7  # lower limit of the norm that a matrix is divided by
    dtype: torch.dtype = torch.bfloat16  # of rows and results in the exchanges
    state_dtype: torch.dtype = torch.float32  # of the momentum
    bucket: int = BUCKET  # elements that an owner collects for one bucket
    beta2: float = 0.95  # β₂ of NorMuon
    share: float | None = None  # of the shorter side of a matrix that Dion2 orthogonalises; None: all of it


class Pace(NamedTuple):
    """The learning-rate factor and the weight decay of one parameter."""

    lr_factor: float = 1.0  # factor of the learning rate
    weight_decay: float = 0.1  # λ


class Muon:
    """Updates parameters that share a `MuonRule`. A parameter is one matrix, or several fused by rows. Make this after
    FSDP's lazy initialisation. Construction and each step are collective over all ranks.

    Attributes:
        locals: this rank's shard of each parameter.
        kept: {"momentum": parameter → tensor of the shape of this rank's shard}.
        buckets: groups of matrices that are exchanged together.

    Raises:
        ValueError: the matrices of a parameter do not contain each of its rows exactly once.
    """

    _decays_at_once: ClassVar[bool] = True  # False: momentum decays after the update, where that is not zero

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
            stacks = assign(ordered, len(held), len(rule.polynomials), rule.bucket, rule.share)
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
        """Apply one update, or none if `skip` is 1, which the host does not know: rows are exchanged in any case.

        Gradients are divided by `divisor`. `decay_factor` multiplies all weight decays. See `UpdateRule.step`.
        """
        if not self.buckets:
            return
        self._begin(skip)
        # Bucket i is orthogonalised while rows of bucket i + 1 are collected and results of bucket i - 1 go back.
        gradients = tensor_table("gradient", [grads[name] for name in self.locals])  # new tensors in each step
        coming = self._collect(self._tables[0], gradients, divisor, skip)
        previous: tuple[_Tables, _Exchange] | None = None  # the bucket before, and the exchange of its results
        for current, following in zip(self._tables, (*self._tables[1:], None), strict=True):
            collected = coming.wait()
            if following is not None:
                coming = self._collect(following, gradients, divisor, skip)
            # The results have no name, so that their memory is free once they are copied for sending.
            returning = self._hand_back(current, self._orthogonalise(current, collected))
            if previous is not None:
                self._apply(*previous, lr, skip, norms, decay_factor)
            previous = current, returning
        assert previous is not None  # noqa: S101  # there is a bucket
        self._apply(*previous, lr, skip, norms, decay_factor)
        self._end()

    def _begin(self, skip: Tensor) -> None:
        """Do nothing; a subclass may prepare its state here before the first bucket of a step."""

    def _end(self) -> None:
        """Do nothing; a subclass may finish its state here after the last bucket of a step."""

    def _collect(self, tables: "_Tables", grads: TensorTable, divisor: Tensor, skip: Tensor) -> "_Exchange":
        """Update the momentum of this rank's rows, and begin to send the owners the rows to orthogonalise."""
        sent, rule, decays = self._empty(tables.bucket.given), self.rule, self._decays_at_once
        of = rule.momentum, rule.nesterov and decays, decays
        momentum_rows(tables.shard_to_given, grads, self._momenta, sent, divisor, skip, *of)
        return self._exchange(sent, tables.bucket.given, tables.bucket.collected)

    def _orthogonalise(self, tables: "_Tables", collected: Tensor) -> Tensor:
        """Orthogonalise the matrices that this rank owns; return them flattened, stack after stack."""
        whole = collected.new_empty(sum(math.prod(shape) for shape in tables.own))
        put_rows(tables.collected_to_stacks, whole, collected)
        for matrices, _, _ in self._at_once(tables, whole):
            self._replace(matrices)
        return whole

    def _replace(self, matrices: Tensor) -> None:
        """Replace matrices [B, R, C] by their updates, without the scale."""
        orthogonalise(matrices, self.rule.polynomials, self.rule.eps, out=matrices)

    def _at_once(self, tables: "_Tables", whole: Tensor) -> Iterator[tuple[Tensor, int, int]]:
        """Yield (matrices to compute together [n, R, C], index of their stack, index of the first one in the stack)."""
        first = 0
        for number, shape in enumerate(tables.own):
            stack = whole[first : first + math.prod(shape)].view(shape)
            first += stack.numel()
            # The number of matrices may change the kernel of a batched matmul, and so owners might change the result.
            together = 1 if torch.are_deterministic_algorithms_enabled() else len(stack)
            for i in range(0, len(stack), together):
                yield stack[i : i + together], number, i

    def _hand_back(self, tables: "_Tables", results: Tensor) -> "_Exchange":
        """Begin to send the orthogonalised rows back to the ranks that hold them."""
        sent = self._empty(tables.bucket.returned)
        take_rows(tables.stacks_to_returned, results, sent)
        return self._exchange(sent, tables.bucket.returned, tables.bucket.taken)

    def _apply(
        self,
        tables: "_Tables",
        returning: "_Exchange",
        lr: float,
        skip: Tensor,
        norms: GroupNorms | None,
        decay_factor: float,
    ) -> None:
        """Wait for the results of a bucket, and update the rows that this rank holds."""
        squares = update_rows(
            tables.taken_to_shard,
            self._parameters,
            returning.wait(),
            tables.scales,
            tables.decays,
            lr,
            skip,
            measure=norms is not None,
            decay_factor=decay_factor,
            momenta=None if self._decays_at_once else self._momenta,
            momentum=self.rule.momentum,
        )
        if norms is not None and squares is not None:
            stacks, rows = tables.bucket.stacks, tables.bucket.taken.rows
            norms.add_updates_of_rows([(stacks[each.stack].parameter, len(each.at)) for each in rows], squares)

    def _empty(self, transfer: Transfer) -> Tensor:
        return torch.empty(sum(transfer.sizes), dtype=self.rule.dtype, device=self.mesh.device)

    def _exchange(self, sent: Tensor, goes: Transfer, comes: Transfer) -> "_Exchange":
        received = self._empty(comes)
        return _Exchange(dist.all_to_all_single(received, sent, comes.sizes, goes.sizes, async_op=True), sent, received)

    # Positions of rows.

    def _tables_of(self, bucket: Bucket, numbers: Mapping[str, int]) -> "_Tables":
        """Compute where each row that this rank holds or owns is, in its tensor and in the buffers of the exchanges.

        `numbers` are the indices of the parameters in `locals`.
        """
        in_given, in_taken = dict(_places_of_runs(bucket.given)), dict(_places_of_runs(bucket.taken))
        given, taken, scales, decays = [], [], [], []
        for rows in bucket.taken.rows:  # all rows that this rank holds
            name, matrix_rows, columns, _ = bucket.stacks[rows.stack]
            in_shard = numbers[name], rows.at * rows.columns, rows.columns
            given.append((*in_shard, in_given.get(rows.stack, NOWHERE)))
            taken.append((*in_shard, in_taken[rows.stack]))
            pace, n = self.paces[name], len(rows.at)
            scale = pace.lr_factor * self.rule.scale * math.sqrt(max(matrix_rows.shape[1], columns))
            scales.append(torch.full((n,), scale, dtype=torch.float64))
            decays.append(torch.full((n,), pace.lr_factor * pace.weight_decay, dtype=torch.float64))
        shapes = {i: (*bucket.stacks[i].rows.shape, bucket.stacks[i].columns) for i in bucket.own}  # [B, R, C]
        sizes = map(math.prod, shapes.values())
        starts = dict(zip(shapes, accumulate(sizes, initial=0), strict=False))  # offset of each; the last sum is unused

        def of_stacks(transfer: Transfer) -> RowTable:
            """Pair the rows of this rank's stacks with their places in the buffer of `transfer`."""
            firsts = (r.at * shapes[r.stack][2] + r.first_column + starts[r.stack] for r in transfer.rows)
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
            own=list(shapes.values()),
        )


@dataclass(frozen=True, eq=False)
class _Tables:
    """A bucket, and tables with the source and destination of each row that is moved for it."""

    bucket: Bucket
    shard_to_given: RowTable  # rows of this rank's shards, with their places in `bucket.given`
    taken_to_shard: RowTable  # the same rows, with their places in `bucket.taken`
    collected_to_stacks: RowTable  # rows of this rank's stacks, with their places in `bucket.collected`
    stacks_to_returned: RowTable  # the same rows, with their places in `bucket.returned`
    scales: Tensor  # for each row of `taken_to_shard`: lr times this is the factor of the update
    decays: Tensor  # for each row of `taken_to_shard`: lr times this is the weight decay
    own: list[tuple[int, ...]]  # [B, R, C] of each of this rank's stacks


class _Exchange(NamedTuple):
    """An all-to-all exchange in progress."""

    work: Any
    sent: Tensor  # kept alive until the exchange is done
    received: Tensor

    def wait(self) -> Tensor:
        self.work.wait()
        return self.received


def _places_of_runs(transfer: Transfer) -> Iterator[tuple[int, int]]:
    """Yield, for each run of rows, (index of its stack, offset of its first element in the exchange's buffer)."""
    first = 0
    for rows in transfer.rows:
        yield rows.stack, first
        first += len(rows.at) * rows.columns
