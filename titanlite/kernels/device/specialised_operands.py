"""Host code for operands of the specialised kernels: views in blocks for TMA, and steps that are loaded at once."""

from functools import cache

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl

from titanlite.kernels.device.channel import Channel
from titanlite.kernels.device.launch import Blocks, cdiv
from titanlite.kernels.device.operands import Rows
from titanlite.kernels.device.specialised_matmul import PART, first_columns
from titanlite.kernels.device.tiles import Tiles, in_steps
from titanlite.kernels.products import MAX_RANKS

SHARED_MEMORY = 232448
"""Bytes of shared memory that a thread block may have on sm_90."""

_DTYPES = {
    torch.bfloat16: gl.bfloat16,
    torch.float16: gl.float16,
    torch.float8_e4m3fn: gl.float8e4nv,
    torch.float8_e5m2: gl.float8e5,
}


@cache
def _layout(box: tuple[int, int], dtype: torch.dtype) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for(list(box), _DTYPES[dtype])


def consumers(dtype: torch.dtype) -> int:
    """Return how many consumers share a tile: two of one warpgroup for float8, one of two warpgroups for 16 bits."""
    return 2 if dtype.itemsize == 1 else 1


def stages(pick: Tiles, itemsize: int, ring: int = 0) -> int:
    """Return how many steps' operands fit into shared memory, beside `ring` bytes of buffers for copies."""
    words = 2048  # bytes of barriers and of Triton's warp specialisation
    free = SHARED_MEMORY - words - ring - pick.m * PART.value * 2
    return free // ((pick.m + pick.n) * pick.k * itemsize)


def operand_blocks(operand: Tensor, rows: Rows, n: int, k: int) -> Blocks:
    """View an operand [N, K] in blocks for TMA: `first_columns(n)` of a tile's n columns, and k elements of a step."""
    box = (first_columns(n), k) if rows.k_major else (k, n)
    return blocks(operand, rows.shape, rows.stride, box)


def rest_blocks(operand: Tensor, rows: Rows, n: int, k: int) -> Blocks | None:
    """View an operand like `operand_blocks`, but a tile's columns beyond `first_columns(n)`; None if there are none."""
    rest = n - first_columns(n)
    return blocks(operand, rows.shape, rows.stride, (rest, k)) if rest else None


def has_steps_for_parts(pick: Tiles, K: int, itemsize: int, fast_accum: bool) -> bool:
    """Return whether a tile has at least as many steps as parts, since each step stores a part of the previous tile.
    True for sums in steps, where a tile is stored before the next one begins."""
    return in_steps(itemsize, fast_accum) or pick.n // PART.value <= cdiv(K, pick.k)


def blocks(matrix: Tensor, shape: tuple[int, int], stride: int, box: tuple[int, int]) -> Blocks:
    """View the beginning of a tensor as a matrix, in blocks of the shape `box`. stride: elements from row to row."""
    return Blocks(matrix, shape, stride, box, _layout(box, matrix.dtype))


def peer_blocks(to: Channel, dtype: torch.dtype, columns: int, box: tuple[int, int]) -> list[Blocks | None]:
    """View the two slots of each rank as one matrix of `columns` columns, in blocks of the shape `box`. The list has
    `MAX_RANKS` elements, None for missing ranks."""
    key = (dtype, columns, box)
    found = to.blocks.get(key)
    if found is None:
        rows = 2 * to.capacity // (columns * dtype.itemsize)
        slots = [slots[: rows * columns * dtype.itemsize].view(dtype) for slots in to.peers]
        found = [blocks(memory, (rows, columns), columns, box) for memory in slots] + [None] * (MAX_RANKS - to.ranks)
        to.blocks[key] = found
    return found
