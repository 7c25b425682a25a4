"""Who orthogonalises which matrix, and what travels for it.

A matrix has one owner, among all ranks, and a bucket that it travels in (`parallel/share_matrices.py`).

With replicas (HSDP) the owners are spread over all of them: a rank computes less, and all replicas get the same bits,
from one owner. An owner collects from its own replica, and hands results to all.

    holders  —rows of the momentum→  owner  —rows of the update→  holders
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from titanlite.models.matrices import Matrix
from titanlite.parallel.initialise import local_slice
from titanlite.parallel.mesh import place_of_each_rank
from titanlite.parallel.share_matrices import share_matrices


class Rectangle(NamedTuple):
    """The part of a parameter that a rank has."""

    first_row: int
    first_column: int
    rows: int
    columns: int


class Stack(NamedTuple):
    """Matrices of one shape, of one parameter, with one owner.

    `rows` is [B, R]: rows of the whole parameter.
    """

    parameter: str
    rows: Tensor
    columns: int
    owner: int


class RowRun(NamedTuple):
    """Rows that travel between this rank and another.

    Attributes:
        stack: its place in the bucket.
        at: [n] int64; on a holder, of its shard; on an owner, of the stack with its matrices below one another.
        first_column: of the stack, on an owner; 0 on a holder, whose columns all travel.
        columns: that travel.
    """

    stack: int
    at: Tensor
    first_column: int
    columns: int


@dataclass
class Transfer:
    """All that this rank sends, or receives, in one exchange of all ranks: runs of rows, in order of the other rank."""

    rows: list[RowRun] = field(default_factory=list[RowRun])
    sizes: list[int] = field(default_factory=list[int])  # elements for, or from, each rank

    def add(self, rows: Iterable[RowRun]) -> None:
        """Append what goes to, or comes from, the next rank."""
        some = [r for r in rows if len(r.at) and r.columns]
        self.rows += some
        self.sizes.append(sum(len(r.at) * r.columns for r in some))


@dataclass(frozen=True)
class Bucket:
    """Matrices that travel together.

    Attributes:
        stacks: of all owners.
        own: places in `stacks` of those that this rank owns.
        given: rows of this rank's shards, sent to the owners.
        collected: the same as the owner gets them.
        returned: rows of results, sent to all holders.
        taken: the same as the holder gets them.
    """

    stacks: list[Stack]
    own: list[int]
    given: Transfer
    collected: Transfer
    returned: Transfer
    taken: Transfer


def held_by_each_rank(parameters: Mapping[str, Tensor]) -> list[dict[str, Rectangle]]:
    """Return what each rank has of each parameter."""
    places = dict[DeviceMesh | None, list[list[int]]]()
    places[None] = [[]] * dist.get_world_size()  # a plain parameter is whole on all of them
    held = [dict[str, Rectangle]() for _ in places[None]]
    for name, parameter in parameters.items():
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        if mesh is not None and mesh not in places:
            places[mesh] = place_of_each_rank(mesh)
        for of_rank, place in zip(held, places[mesh], strict=True):
            of_rank[name] = _rectangle(parameter, place)
    return held


def _rectangle(parameter: Tensor, place: list[int]) -> Rectangle:
    rows, columns = parameter.shape
    part = local_slice(torch.empty(rows, columns, device="meta"), parameter, place)
    return Rectangle(*divmod(int(part.storage_offset()), columns), *part.shape)


def assign(matrices: Sequence[Matrix], ranks: int, steps: int, most: int) -> list[list[Stack]]:
    """Give each matrix an owner, and put them into buckets.

    Args:
        matrices: all of them, in the same order on every rank.
        ranks: that may own some.
        steps: polynomials.
        most: elements that a rank collects at a time; or one matrix, if it is larger.

    Returns:
        The stacks of each bucket.
    """
    buckets = list[dict[tuple[str, int, int], list[Matrix]]]()
    for i, bucket, owner in share_matrices([matrix.shape for matrix in matrices], ranks, steps, most):
        if bucket == len(buckets):
            buckets.append({})
        matrix = matrices[i]
        buckets[bucket].setdefault((matrix.parameter, len(matrix.rows), owner), []).append(matrix)
    return [
        [
            Stack(name, torch.stack([m.rows for m in of]), of[0].columns, owner)
            for (name, _, owner), of in bucket.items()
        ]
        for bucket in buckets
    ]


def schedule(stacks: list[Stack], held: Sequence[Mapping[str, Rectangle]], rank: int, replicas: int) -> Bucket:
    """Say what a rank does for a bucket.

    Args:
        stacks: of the bucket.
        held: from `held_by_each_rank`.
        rank: this one.
        replicas: of the model, each on as many ranks in succession.
    """
    ranks = len(held)
    own = [i for i, stack in enumerate(stacks) if stack.owner == rank]
    bucket = Bucket(stacks, own, Transfer(), Transfer(), Transfer(), Transfer())
    is_source = _sources(held, ranks // replicas)
    for other in range(ranks):
        of_other = [i for i, stack in enumerate(stacks) if stack.owner == other]
        as_holder = [_in_shard(i, stacks[i], held[rank][stacks[i].parameter]) for i in of_other]
        bucket.taken.add(as_holder)
        bucket.given.add(rows for rows in as_holder if is_source(rank, stacks[rows.stack]))
        as_owner = [_in_stack(i, stacks[i], held[other][stacks[i].parameter]) for i in own]
        bucket.returned.add(as_owner)
        bucket.collected.add(rows for rows in as_owner if is_source(other, stacks[rows.stack]))
    return bucket


def _sources(held: Sequence[Mapping[str, Rectangle]], of_replica: int) -> Callable[[int, Stack], bool]:
    """Return the test that a rank is the one that sends its rectangle to the owner of a stack: of those that have the
    same one it is the first, of the owner's replica if there is one in it."""

    def is_source(rank: int, stack: Stack) -> bool:
        mine, name = held[rank][stack.parameter], stack.parameter
        same = [other for other in range(len(held)) if held[other][name] == mine]
        return rank == min(same, key=lambda r: (r // of_replica != stack.owner // of_replica, r))

    return is_source


def _rows_inside(stack: Stack, has: Rectangle) -> tuple[Tensor, Tensor]:
    """Return places in a stack, its matrices below one another, of rows that a rank has; and these rows."""
    flat = stack.rows.flatten()
    places = ((flat >= has.first_row) & (flat < has.first_row + has.rows)).nonzero().squeeze(1)
    return places, flat[places]


def _in_stack(i: int, stack: Stack, has: Rectangle) -> RowRun:
    return RowRun(i, _rows_inside(stack, has)[0], has.first_column, has.columns)


def _in_shard(i: int, stack: Stack, has: Rectangle) -> RowRun:
    return RowRun(i, _rows_inside(stack, has)[1] - has.first_row, 0, has.columns)
