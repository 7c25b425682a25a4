"""The matrices that weights are made of: each part of a fused one, and of each expert, by itself.

An update that orthogonalises sees them as if they were weights of their own: `wq`, `wk` and `wv` of `wqkv`, `w1` and
`w3` of `w13`, those of every expert. The queries of all heads are one matrix, as in programs that keep `q_proj` apart;
so it does not change with how heads share keys.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from titanlite.models.experts import GroupedProjection
from titanlite.models.layers import Projection


@dataclass(frozen=True, eq=False)
class Matrix:
    """One matrix: some rows of a parameter, all columns.

    Attributes:
        parameter: its name.
        part: of its layer, as "wq"; of an expert with its number, as "w1 3".
        rows: [R] int64, increasing, of the whole parameter.
        columns: C.
    """

    parameter: str
    part: str
    rows: Tensor
    columns: int

    @property
    def shape(self) -> tuple[int, int]:
        """R and C."""
        return len(self.rows), self.columns


def matrices_of(model: nn.Module) -> dict[str, list[Matrix]]:
    """Take all projections of a model apart.

    Args:
        model: sharded or not; its weights are not read.

    Returns:
        By the name of the parameter, in order of the parts.
    """
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
