"""The matrices that Muon orthogonalises: each part of a fused weight, and each part of each expert, by itself.

`wqkv` consists of `wq`, `wk` and `wv`; `w13` of `w1` and `w3`. The queries of all heads are one matrix, as in programs
with a separate `q_proj`, so the update does not depend on how heads share keys.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from titanlite.models.experts import GroupedProjection
from titanlite.models.layers import Projection


@dataclass(frozen=True, eq=False)
class Matrix:
    """One matrix: some rows of a parameter, all columns."""

    parameter: str  # name of the parameter
    part: str  # name of the part of the layer, such as "wq"; of an expert with its number, such as "w1 3"
    rows: Tensor  # [R] int64, increasing indices of rows of the whole parameter
    columns: int  # C, number of columns

    @property
    def shape(self) -> tuple[int, int]:
        """Shape (R, C) of the matrix."""
        return len(self.rows), self.columns


def matrices_of(model: nn.Module) -> dict[str, list[Matrix]]:
    """Return the matrices of each projection by its parameter's name, in order of the parts; weights are not read."""
    found: dict[str, list[Matrix]] = {}
    for place, layer in model.named_modules():
        if not isinstance(layer, Projection):
            continue
        name, (n_rows, columns) = f"{place}.weight".lstrip("."), layer.weight.shape
        found[name] = []
        for part, rows in layer.split(torch.arange(n_rows)).items():
            if isinstance(layer, GroupedProjection):
                pieces = enumerate(rows.chunk(layer.n_experts))
                found[name] += [Matrix(name, f"{part} {number}", piece, columns) for number, piece in pieces]
            else:
                found[name].append(Matrix(name, part, rows, columns))
    return found
