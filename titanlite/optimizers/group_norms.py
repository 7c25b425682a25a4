"""Norms of gradients, weights and updates for each group of the optimizer's recipe, in steps that are logged.

A parameter that is replicated over tensor-parallel ranks counts once, and so do replicas of the model. The kernels of
AdamW and Muon add up the squares. For a user's own rule each parameter is copied before the update, and compared with
the copy afterwards.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import groupby

import torch
import torch.distributed as dist
from torch import Tensor

from titanlite.parallel.mesh import Mesh

KINDS = ("grad_norm", "weight_norm", "update_ratio")
"""Prefixes of keys in metrics.jsonl: norm of gradients before clipping, norm of weights before the update, norm of the
update divided by the norm of weights."""

_Sums = dict[tuple[int, bool], list[Tensor]]  # place of `GroupNorms` → sums of squares, [k] float32 each


class GroupNorms:
    """The norms of one step, for each of `groups`. `places` has the place of each parameter of which this rank holds a
    part: (index of its group, whether it is replicated over tensor-parallel ranks).
    """

    def __init__(self, groups: Sequence[str], places: Mapping[str, tuple[int, bool]], mesh: Mesh) -> None:
        self._places, self._mesh, self._groups = places, mesh, groups
        self._gradients, self._updates = _Sums(), _Sums()

    def add_gradients(self, names: Sequence[str], norms: Sequence[Tensor]) -> None:
        """Add the norm, [] float32, of the gradient of each parameter in `names`."""
        by_place: _Sums = {}
        for name, norm in zip(names, norms, strict=True):
            by_place.setdefault(self._places[name], []).append(norm)
        for place, several in by_place.items():
            self._gradients.setdefault(place, []).append(torch.stack(several).square().sum(0, keepdim=True))

    def add_update(self, name: str, squares: Tensor) -> None:
        """Add the sums of squares, [2] float32, of a parameter before the update and of its change. They may cover
        several parameters with the same place; `name` is then any of these."""
        self._updates.setdefault(self._places[name], []).append(squares)

    def add_updates_of_rows(self, runs: Sequence[tuple[str, int]], squares: Tensor) -> None:
        """Add the sums of squares, [2, n] float32, of each of n rows before the update and of its change. `runs` lists
        the rows in order: (parameter, number of successive rows).
        """
        alike = [[*of] for _, of in groupby(runs, lambda run: self._places[run[0]])]  # runs with the same place
        for of, rows in zip(alike, squares.split([sum(n for _, n in of) for of in alike], dim=1), strict=True):
            self.add_update(of[0][0], rows.sum(1))

    def numbers(self) -> dict[str, Tensor]:
        """Return "<kind>.<group>" → norm or ratio (see `KINDS`), [] float32, equal on every rank. Collective."""
        zeros = torch.zeros(2, device=self._mesh.device)

        def total(sums: _Sums, group: int, none: Tensor) -> Tensor:
            own, shared = (sums.get((group, is_shared), []) for is_shared in (False, True))
            parts = [*own, *(squares / self._mesh.tp_size for squares in shared)] or [none]
            return torch.stack(parts).sum(0) if len(parts) > 1 else parts[0]

        of_groups = (
            part
            for group in range(len(self._groups))
            for part in (total(self._gradients, group, zeros[:1]), total(self._updates, group, zeros))
        )
        squares = torch.cat([*of_groups])
        dist.all_reduce(squares)
        gradient, weight, change = (squares / self._mesh.replicas).sqrt().view(-1, len(KINDS)).unbind(1)
        keys = [f"{kind}.{group}" for kind in KINDS for group in self._groups]
        return dict(zip(keys, torch.cat((gradient, weight, change / weight)).unbind(), strict=True))


@contextmanager
def around(norms: GroupNorms | None, name: str, shard: Tensor) -> Iterator[None]:
    """Add to `norms`, if given, how much `shard`, this rank's part of a parameter, changes within the context."""
    if norms is None:
        yield
        return
    before = shard.clone()
    yield
    weight = torch.linalg.vector_norm(before)
    norms.add_update(name, torch.stack((weight, torch.linalg.vector_norm(before.sub_(shard)))).square())
