"""Lay out groups of rows so that each group begins at a multiple of 16, as TMA requires for transposed float8 matrices.

A place is a position in this layout. It holds a row of a group, or padding (-).

rows       0 0 0 | 1 1 1 1 1 | 2                        offsets 0, 3, 8, 9
places     0 0 0 - - …  | 1 1 1 1 1 - … | 2 - …         begins 0, 16, 32, 48
"""

import torch
from torch import Tensor

from titanlite.kernels.operators import operator

ALIGNMENT = 16


def aligned_places(rows: int, groups: int) -> int:
    """Return the number of places that suffice for `rows` rows in `groups` groups, whatever the groups' sizes."""
    return (rows + groups * (ALIGNMENT - 1)) // ALIGNMENT * ALIGNMENT


@operator("aligned_rows", "aligned_rows.launch_aligned_rows")
def aligned_rows(slots: Tensor, offsets: Tensor, top_k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Find the row and the token at each place of the padded layout.

    Args:
        slots: [R] int32, m·K + k for a row that is token m at its k-th expert.
        offsets: [G + 1] int32, the first row of each group, and the end of the last group.
        top_k: K, experts per token.

    Returns:
        The row and the token at each of P places, [P] int32 each, -1 for padding; and the first place of each group
        with the end of the last group, [G + 1] int32.
    """
    padded = (offsets.diff() + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
    begins = torch.cat([offsets.new_zeros(1), padded.cumsum(0, dtype=torch.int32)])
    places = torch.arange(aligned_places(len(slots), len(padded)), dtype=torch.int32, device=slots.device)
    group = torch.searchsorted(begins[1:], places, right=True).clamp(max=len(padded) - 1)
    row = offsets[group] + places - begins[group]
    row = torch.where((places < begins[-1]) & (row < offsets[group + 1]), row, -1)
    token = slots[row.clamp(min=0)] // top_k if len(slots) else row
    return row, torch.where(row >= 0, token, -1), begins
