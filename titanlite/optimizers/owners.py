"""Assign each matrix to an owner, one of all ranks, and list the rows that ranks exchange for it.

The matrices of a bucket are exchanged together (`parallel/share_matrices.py`). With replicas (HSDP) the owners are
spread over all replicas: a rank computes less, and all replicas get the same bits. An owner collects rows from its own
replica, and sends the results to all replicas.

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
    """The rectangle of a parameter that a rank holds: its first row and column, and its size."""

    first_row: int
    first_column: int
    rows: int
    columns: int


class Stack(NamedTuple):
    """B matrices of the same shape [R, C], parts of the same parameter, with the same owner."""

    parameter: str
    rows: Tensor  # [B, R], indices of rows of the whole parameter
    columns: int
    owner: int


class RowRun(NamedTuple):
    """Rows of a stack that this rank, their holder or owner, exchanges with another rank."""

    stack: int  # index of the stack in the bucket
    at: Tensor  # [n] int64, indices of rows: in the shard of a holder, or in an owner's stack viewed as [B·R, C]
    first_column: int  # in an owner's stack; 0 on a holder, which sends all its columns
    columns: int  # number of columns that are sent


@dataclass
class Transfer:
    """The rows that this rank sends, or receives, in one all-to-all exchange, in order of the other ranks."""

    rows: list[RowRun] = field(default_factory=list[RowRun])
    sizes: list[int] = field(default_factory=list[int])  # elements for, or from, each rank

    def add(self, rows: Iterable[RowRun]) -> None:
        """Append the rows that are sent to, or received from, the next rank."""
        some = [r for r in rows if len(r.at) and r.columns]
        self.rows += some
        self.sizes.append(sum(len(r.at) * r.columns for r in some))


@dataclass(frozen=True)
class Bucket:
    """Matrices that are exchanged together, and the rows that this rank sends and receives in the two exchanges."""

    stacks: list[Stack]  # of all owners
    own: list[int]  # indices of the stacks that this rank owns
    given: Transfer  # rows of this rank's shards, sent to the owners
    collected: Transfer  # rows that this rank gets as an owner
    returned: Transfer  # rows of this rank's results, sent to all holders
    taken: Transfer  # rows of results that this rank gets as a holder


def held_by_each_rank(parameters: Mapping[str, Tensor]) -> list[dict[str, Rectangle]]:
    """Return, for each rank, the rectangle of each parameter that the rank holds."""
    places = dict[DeviceMesh | None, list[list[int]]]()
    places[None] = [[]] * dist.get_world_size()  # all ranks hold all of a plain parameter
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


def assign(
    matrices: Sequence[Matrix], ranks: int, steps: int, most: int, share: float | None = None
) -> list[list[Stack]]:
    """Group matrices into buckets of stacks, equal on every rank. Other arguments as in `share_matrices`."""
    buckets = list[dict[tuple[str, int, int], list[Matrix]]]()
    for i, bucket, owner in share_matrices([matrix.shape for matrix in matrices], ranks, steps, most, share):
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
    """Return the bucket of these stacks for `rank`.

    `held` has the rectangles of each rank. The ranks of a replica are successive.
    """
    ranks = len(held)
    own = [i for i, stack in enumerate(stacks) if stack.owner == rank]
    bucket = Bucket(stacks, own, Transfer(), Transfer(), Transfer(), Transfer())
    is_source = _sources(held, ranks // replicas)
    for other in range(ranks):
        as_holder, as_owner = list[RowRun](), list[RowRun]()
        for i in (i for i, stack in enumerate(stacks) if stack.owner == other):
            has = held[rank][stacks[i].parameter]
            as_holder.append(RowRun(i, _rows_inside(stacks[i], has)[1] - has.first_row, 0, has.columns))
        for i in own:
            has = held[other][stacks[i].parameter]
            as_owner.append(RowRun(i, _rows_inside(stacks[i], has)[0], has.first_column, has.columns))
        bucket.taken.add(as_holder)
        bucket.given.add(rows for rows in as_holder if is_source(rank, stacks[rows.stack]))
        bucket.returned.add(as_owner)
        bucket.collected.add(rows for rows in as_owner if is_source(other, stacks[rows.stack]))
    return bucket


def _sources(held: Sequence[Mapping[str, Rectangle]], of_replica: int) -> Callable[[int, Stack], bool]:
    """Return a function of (rank, stack): whether the rank sends its rectangle to the stack's owner. Of the ranks with
    the same rectangle, the first in the owner's replica does, or else the first. `of_replica`: ranks per replica."""

    def is_source(rank: int, stack: Stack) -> bool:
        mine, name = held[rank][stack.parameter], stack.parameter
        same = [other for other in range(len(held)) if held[other][name] == mine]
        return rank == min(same, key=lambda r: (r // of_replica != stack.owner // of_replica, r))

    return is_source


def _rows_inside(stack: Stack, has: Rectangle) -> tuple[Tensor, Tensor]:
    """Return the stack's rows inside a rectangle: (indices in the stack viewed as [B·R, C], rows of the parameter)."""
    flat = stack.rows.flatten()
    places = ((flat >= has.first_row) & (flat < has.first_row + has.rows)).nonzero().squeeze(1)
    return places, flat[places]
