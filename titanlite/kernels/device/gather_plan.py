"""The plan of an all-gather → matmul: whether it is fused, which kernels run, and how tensors lie in memory.

G is the gathered operand, O the other operand. X is the size of G's dim that is not contracted.
"""

import math
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from titanlite.kernels.collectives import Group
from titanlite.kernels.device.channel import COUNTERS
from titanlite.kernels.device.channel import HEADER as COUNTERS_HEADER
from titanlite.kernels.device.launch import cdiv
from titanlite.kernels.device.operands import Rows, rows_of
from titanlite.kernels.device.specialised_operands import has_steps_for_parts
from titanlite.kernels.device.tiles import Tiles, tiles
from titanlite.kernels.products import (
    FLOAT8,
    NOTHING,
    SLOWER,
    GatherCall,
    contracts_last,
    out_dtype_of,
    out_shapes,
    unsupported_operands,
)
from titanlite.kernels.shapes import DimSplit, split

ROWS, COLS, CONTRACTED_ROWS, CONTRACTED_COLS = 0, 1, 2, 3
"""Kinds of gathered dims: the rows or the columns of G in memory, which the product keeps or contracts."""

UNIT = 128
"""Rows of a shard that share a counter of arrived copies."""
PUBLISHERS = 264
"""Most thread blocks of `general_gather._publish`, the first kernel."""


@dataclass(frozen=True)
class GatherLayout:
    """How one call's shard and its gathered operand G lie in memory."""

    wait: int  # ROWS, COLS, CONTRACTED_ROWS or CONTRACTED_COLS
    whole: DimSplit  # how the gathered dim of G is split over ranks
    rows: int  # of a full shard seen as [rows, columns]
    columns: int  # of a shard seen as [rows, columns]
    segment: int  # rows of a shard that are contiguous in G
    X: int  # size of G's dim that is not contracted
    K: int  # size of the contracted dim


def gather_layout(shape: list[int], dim: int, size: int, ranks: int, form: str) -> GatherLayout:
    """Return the layout of shards of `shape` gathered along `dim` (not negative) to `size`, for a product's `form`."""
    whole = split(shape, dim, size, ranks)
    full = [*shape[:dim], size, *shape[dim + 1 :]]
    last = dim == len(shape) - 1
    if last:
        wait = CONTRACTED_COLS if contracts_last(form) else COLS
        rows, columns, segment = whole.outer, whole.chunk, whole.outer
    else:
        wait = ROWS if contracts_last(form) else CONTRACTED_ROWS
        columns = shape[-1]
        segment = whole.chunk * whole.inner // columns
        rows = whole.outer * segment
    flat = [math.prod(full[:-1]), full[-1]]
    X, K = flat if contracts_last(form) else flat[::-1]
    return GatherLayout(wait, whole, rows, columns, segment, X, K)


def gather_unsupported_reason(call: GatherCall, ranks: int) -> str | None:
    """Return the reason not to fuse a call, or None. Depends only on shapes, dtypes and the group's size."""
    shard, others, form = call.shard, call.others, call.form
    if reason := unsupported_operands(shard.dtype, ranks):
        return reason
    if not others or not others[0].numel() or not math.prod(call.whole):
        return NOTHING
    at = gather_layout(list(shard.shape), call.at, call.size, ranks, form)
    itemsize = shard.dtype.itemsize
    if at.columns * itemsize % 16:
        return f"rows of {at.columns * itemsize} bytes; the copies want a multiple of 16"
    if not at.whole.even and at.wait != ROWS:
        return f"{call.size} rows over {ranks} ranks are uneven along a contracted dim or columns"
    if at.wait >= CONTRACTED_ROWS and at.whole.chunk % (128 // itemsize):
        return f"chunks of {at.whole.chunk} of the contracted dim; the kernels want a multiple of {128 // itemsize}"
    if at.wait == CONTRACTED_COLS and call.scale_of == "shard":
        return "a scale for each shard of the contracted dim"
    if shard.dtype in FLOAT8 and not contracts_last(form):
        return f"float8 in the form {form!r}; Hopper multiplies float8 along rows only"
    if at.K * itemsize % 16:
        return f"{at.K} contracted, {at.K * itemsize} bytes; the kernels want a multiple of 16"
    if ranks * -(-at.rows // UNIT) > COUNTERS - COUNTERS_HEADER:
        return f"{at.rows} rows of a shard; the kernels count up to {(COUNTERS - COUNTERS_HEADER) // ranks * UNIT}"
    M, N = _rows_and_columns(at, others[0], form)
    return SLOWER if tiles("all_gather_matmul", itemsize, ranks, M, N, at.K, fast_accum=True).plain else None


def _rows_and_columns(at: GatherLayout, other: Tensor, form: str) -> tuple[int, int]:
    """Return the numbers of rows and columns of the product of G and `other`."""
    if form.startswith("left"):
        return at.X, other.shape[1]
    return math.prod(other.shape[:-1]), at.X


@dataclass(frozen=True, eq=False)  # compared by identity: a plan is the key of its launches, hashed at every call
class GatherPlan:
    """All properties of a call that depend only on its shapes, dtypes and strides, and on the rank."""

    at: GatherLayout
    other: Rows  # how kernels read the other operand
    pick: Tiles
    specialised: bool  # whether `specialised_gather` runs the call
    gathered: tuple[int, ...]  # shape of G, or [outer, padded dim, inner] if not all chunks are full
    matrix: tuple[int, int]  # `gathered` as [rows, columns]
    out: list[int]  # shape of the product
    out_dtype: torch.dtype
    tma_store: bool  # whether no tile spans the parts of two ranks, so that TMA may store tiles
    moves_scale: bool  # whether scales are gathered with G
    scale_bytes: int  # offset of the scales in a slot
    slot_bytes: int
    length: int  # 8-byte words of this rank's shard per outer index
    slot_stride: int  # 8-byte words of a full shard per outer index
    own_segment: int  # rows of this rank's shard that are contiguous in G
    size: int  # rows of G per outer index, without padding
    block: int  # words that a thread block of `_publish` copies at once
    publishers: int  # thread blocks of `_publish`


def plan_gather(call: GatherCall, ranks: Group, choice: Tiles | None = None) -> GatherPlan:
    """Plan a call for which `gather_unsupported_reason` is None. choice: tiles, in place of the tuning table's."""
    shard, size, form, fast_accum, other = call.shard, call.size, call.form, call.fast_accum, call.others[0]
    at = gather_layout(list(shard.shape), call.at, size, ranks.size, form)
    left, itemsize = form.startswith("left"), shard.dtype.itemsize
    dtype = out_dtype_of(shard.dtype, call.out_dtype)
    M, N = _rows_and_columns(at, other, form)
    pick = choice or tiles("all_gather_matmul", itemsize, ranks.size, M, N, at.K, fast_accum, dtype.itemsize)
    aligned_rows = N * dtype.itemsize % 16 == 0
    specialised = pick.specialised and form == "left" and at.wait == ROWS and aligned_rows and at.whole.even
    # That kernel needs a counter for each m rows. `gather_unsupported_reason` ensures enough counters for m ≥ UNIT.
    specialised = specialised and dtype.itemsize == 2 and pick.m >= UNIT and at.segment % pick.m == 0
    specialised = specialised and has_steps_for_parts(pick, at.K, itemsize, fast_accum)
    pick = pick if specialised else pick.narrow()
    BX = pick.m if left else pick.n
    by_columns = at.wait in (COLS, CONTRACTED_COLS)
    together = at.whole.chunk if by_columns else at.segment
    whole_tiles = at.wait >= CONTRACTED_ROWS or (at.whole.even and together % BX == 0)
    tma_store = whole_tiles and aligned_rows
    own = at.whole.length(ranks.rank)
    length = own * at.whole.inner * itemsize // 8
    block = min(2048, triton.next_power_of_2(max(1, length)))
    scale_bytes = -(-at.rows * at.columns * itemsize // 128) * 128
    columns = at.columns * (ranks.size if by_columns else 1)
    padded = (at.whole.outer, at.whole.chunk * ranks.size, at.whole.inner)
    return GatherPlan(
        at=at,
        other=rows_of([other.t() if left else other.flatten(0, -2)], may_transpose=shard.dtype not in FLOAT8)[0],
        pick=pick,
        specialised=specialised,
        gathered=tuple(call.whole) if at.whole.even else padded,
        matrix=(math.prod(padded) // columns, columns),
        out=out_shapes(call.whole, [other], form)[0],
        out_dtype=dtype,
        tma_store=tma_store,
        moves_scale=call.moves_scale,
        scale_bytes=scale_bytes,
        slot_bytes=scale_bytes + 4 * at.rows * ranks.size + at.columns * itemsize,
        length=length,
        slot_stride=at.whole.chunk * at.whole.inner * itemsize // 8,
        own_segment=at.rows if by_columns else max(1, own * at.whole.inner // at.columns),
        size=0 if by_columns else at.whole.size * at.whole.inner // at.columns,
        block=block,
        publishers=min(PUBLISHERS, max(1, at.whole.outer * cdiv(length, block))),
    )
