"""Device code of `titanlite.kernels.aligned_rows`.

Each thread block computes where all groups begin, and writes the rows of `PLACES` places of the aligned layout.
"""

import triton
import triton.language as tl
from torch import Tensor

from titanlite.kernels.aligned_rows import ALIGNMENT, aligned_places
from titanlite.kernels.device.launch import cdiv, launch

PLACES = 128
"""Places of the aligned layout that one thread block fills."""


@triton.jit
def _aligned_rows(
    slots, offsets, row_of, token_of, begins, places,
    K: tl.constexpr, G: tl.constexpr, WIDTH: tl.constexpr, ALIGNMENT: tl.constexpr, PLACES: tl.constexpr,
):  # fmt: skip
    g, place = tl.arange(0, WIDTH), tl.program_id(0) * PLACES + tl.arange(0, PLACES)
    n = tl.load(offsets + g + 1, mask=g < G, other=0) - tl.load(offsets + g, mask=g < G, other=0)
    ends = tl.cumsum((n + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT, 0)
    is_before = (ends[None, :] <= place[:, None]) & (g < G)[None, :]
    group = tl.sum(is_before.to(tl.int32), 1)
    begin = tl.max(tl.where(is_before, ends[None, :], 0), 1)
    row = tl.load(offsets + group, mask=group < G, other=0) + place - begin
    there = row < tl.load(offsets + group + 1, mask=group < G, other=0)
    slot = tl.load(slots + row, mask=there, other=0)
    tl.store(row_of + place, tl.where(there, row, -1), mask=place < places)
    tl.store(token_of + place, tl.where(there, slot // K, -1), mask=place < places)
    if tl.program_id(0) == 0:
        tl.store(begins + 1 + g, ends, mask=g < G)
        tl.store(begins + g, tl.zeros((WIDTH,), tl.int32), mask=g == 0)


def launch_aligned_rows(slots: Tensor, offsets: Tensor, top_k: int) -> tuple[Tensor, Tensor, Tensor]:
    G = len(offsets) - 1
    places = aligned_places(len(slots), G)
    row_of, token_of, begins = slots.new_empty(places), slots.new_empty(places), offsets.new_empty(G + 1)
    tensors = slots, offsets, row_of, token_of, begins
    launch(
        _aligned_rows, (places, G, top_k), cdiv(places, PLACES), tensors,
        lambda: (*tensors, places, top_k, G, triton.next_power_of_2(G), ALIGNMENT, PLACES), num_warps=4,
    )  # fmt: skip
    return row_of, token_of, begins
