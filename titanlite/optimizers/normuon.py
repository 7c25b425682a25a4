"""NorMuon: Muon with a second moment for each row, which gives the rows of an update about equal norms.

    o = orthogonalise(u)                       as in `muon.py`
    v ← β₂ v + (1 - β₂) · mean over columns of o²      [R]
    o' = o / (√v + ε)
    p ← (1 - lr·λ) p - lr·0.2·√(R·C) · o' / ‖o'‖       the size of Muon's update, and of AdamW's

The owner of a matrix computes v for its rows. After each step v of all rows is reduced to every rank, so that a
checkpoint can be resumed with other owners of the matrices.

Source: Li et al. 2025, "NorMuon: Making Muon more efficient and scalable".
"""

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from titanlite.device import host_tensors
from titanlite.models.matrices import Matrix
from titanlite.optimizers.muon import Muon, MuonRule, Pace
from titanlite.parallel.mesh import Mesh

_EPS = 1e-8  # ε, and the lower limit of the norm that a matrix is divided by


class NorMuon(Muon):
    """Updates parameters as `Muon` does, with normalised rows.

    Attributes:
        second_moment: parameter → second moment of each of its rows, [rows], on every rank.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        mesh: Mesh,
        matrices: Mapping[str, Sequence[Matrix]],
        rule: MuonRule,
        paces: Mapping[str, Pace],
    ) -> None:
        super().__init__(parameters, mesh, matrices, rule, paces)
        sizes, on = [len(parameter) for parameter in parameters.values()], mesh.device
        first_row = dict(zip(parameters, accumulate(sizes, initial=0), strict=False))
        exact = torch.promote_types(rule.dtype, torch.float32)
        self._skip = torch.zeros((), device=on)
        self._moment = torch.zeros(sum(sizes), dtype=rule.state_dtype, device=on)
        self._new = torch.zeros(sum(sizes), dtype=exact, device=on)  # moments of owned rows; 0 for others
        self.second_moment = dict(zip(parameters, self._moment.split(sizes), strict=True))
        own = {tables: [tables.bucket.stacks[i] for i in tables.bucket.own] for tables in self._tables}
        with host_tensors():  # [B, R] for each stack that this rank owns: indices of its rows in `_moment`
            self._rows = {t: [(s.rows + first_row[s.parameter]).to(on) for s in stacks] for t, stacks in own.items()}

    def _begin(self, skip: Tensor) -> None:
        self._skip = skip
        self._new.zero_()

    def _end(self) -> None:
        dist.all_reduce(self._new)  # exact: each row is nonzero only on its owner
        self._moment.copy_(self._new)

    def _orthogonalise(self, tables: Any, collected: Tensor) -> Tensor:
        whole = super()._orthogonalise(tables, collected)
        for matrices, stack, first in self._at_once(tables, whole):
            self._normalise(matrices, self._rows[tables][stack][first : first + len(matrices)])
        return whole

    def _normalise(self, matrices: Tensor, rows: Tensor) -> None:
        """Divide rows of B matrices [B, R, C] by the root of their second moment. Then scale each matrix to the norm of
        an orthonormal one. `rows` [B, R] are the indices of the rows in `_moment`.
        """
        x = matrices.to(self._new.dtype)
        before = self._moment[rows].to(x.dtype)
        moment = torch.where(self._skip > 0, before, before.lerp(x.square().mean(2), 1 - self.rule.beta2))
        self._new.index_copy_(0, rows.flatten(), moment.flatten())
        x = x / (moment.sqrt() + _EPS).unsqueeze(2)
        norm = torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True)
        matrices.copy_(x * (math.sqrt(min(x.shape[1:])) / norm.clamp(min=_EPS)))
