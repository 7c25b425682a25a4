"""Norms by group of the optimizer's recipe in one step: of gradients, of weights, and of what an update changes.

They are made in steps that are logged, and in no others. A parameter that tensor-parallel ranks hold whole counts once,
and so do replicas. Weights are read once more for it, 4 bytes of each. What an update changes, kernels of AdamW and
Muon add up themselves; for a rule of the user's own each parameter is copied before, and compared behind it.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import groupby

import torch
import torch.distributed as dist
from torch import Tensor

from titanlite.parallel.mesh import Mesh

KINDS = ("grad_norm", "weight_norm", "update_ratio")
"""Beginnings of the keys in metrics.jsonl: norm of gradients before clipping, of weights before the update, and of what
it changes over the latter."""


class GroupNorms:
    """The norms of one step.

    Args:
        groups: names, in order.
        places: of each parameter of which this rank has a part: number of its group, and whether the ranks of a
            tensor-parallel group all have it.
        shards: this rank's part of each parameter.
        mesh: the mesh.
    """

    def __init__(
        self,
        groups: Sequence[str],
        places: Mapping[str, tuple[int, bool]],
        shards: Mapping[str, Tensor],
        mesh: Mesh,
    ) -> None:
        self._places, self._shards, self._mesh, self._groups = places, shards, mesh, len(groups)
        self._squares: list[dict[tuple[int, bool], list[Tensor]]] = [{} for _ in KINDS]
        self._add(1, list(places), torch._foreach_norm([shards[name] for name in places]) if places else [])

    def add_gradients(self, names: Sequence[str], norms: Sequence[Tensor]) -> None:
        """Take the norm of each gradient, [] float32."""
        self._add(0, names, norms)

    def add_change(self, name: str, square: Tensor) -> None:
        """Take the sum of squares, [] float32, of what changed in a parameter, or in several with one place."""
        self._squares[2].setdefault(self._places[name], []).append(square)

    def add_changes_of_rows(self, runs: Sequence[tuple[str, int]], squares: Tensor) -> None:
        """Take the sum of squares of what changed in each row, [n] float32.

        Args:
            runs: names of the parameters that the rows are of, in order, each with how many.
            squares: of all rows.
        """
        alike = [[*of] for _, of in groupby(runs, lambda run: self._places[run[0]])]  # one sum for each
        for of, rows in zip(alike, squares.split([sum(n for _, n in of) for of in alike]), strict=True):
            self.add_change(of[0][0], rows.sum())

    @contextmanager
    def around(self, names: Sequence[str]) -> Iterator[None]:
        """Measure what changes in parameters meanwhile, by a copy of them; those that the rank has no part of may be
        among them."""
        names = [name for name in names if name in self._places]
        before = [self._shards[name].clone() for name in names]
        yield
        if names:
            torch._foreach_sub_(before, [self._shards[name] for name in names])
            self._add(2, names, torch._foreach_norm(before))

    def _add(self, kind: int, names: Sequence[str], norms: Sequence[Tensor]) -> None:
        by_place: dict[tuple[int, bool], list[Tensor]] = {}
        for name, norm in zip(names, norms, strict=True):
            by_place.setdefault(self._places[name], []).append(norm)
        for place, several in by_place.items():
            self._squares[kind].setdefault(place, []).append(torch.stack(several).square().sum())

    def numbers(self) -> Tensor:
        """Return the numbers of each kind in turn, [kinds · groups] float32, equal on every rank; collective."""
        zero = torch.zeros((), device=self._mesh.device)

        def total(kind: int, group: int) -> Tensor:
            own, shared = (self._squares[kind].get((group, is_shared), []) for is_shared in (False, True))
            parts = [*own, *(square / self._mesh.tp_size for square in shared)] or [zero]
            return torch.stack(parts).sum() if len(parts) > 1 else parts[0]

        squares = torch.stack([total(kind, group) for kind in range(len(KINDS)) for group in range(self._groups)])
        dist.all_reduce(squares)
        gradient, weight, change = (squares / self._mesh.replicas).sqrt().view(len(KINDS), -1)
        return torch.cat((gradient, weight, change / weight))


@contextmanager
def around(norms: GroupNorms | None, names: Sequence[str]) -> Iterator[None]:
    """Measure what changes in parameters meanwhile, if it is asked for."""
    if norms is None:
        yield
        return
    with norms.around(names):
        yield
