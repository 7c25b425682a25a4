"""All-gather → matmul in two launches: publish this rank's shard, then pull the others' while multiplying.

The common shapes take `specialised_gather`, behind one thread block that meets the peers; the others `general_gather`.

G stands for the gathered operand, O for the other one; X is G's dim that is kept, Y is O's. Where the contracted dim is
the gathered one, a tile walks through it rank by rank, its own first.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from titanlite.kernels.collectives import Group
from titanlite.kernels.device.channel import COUNTERS, Channel, channel, multiprocessors
from titanlite.kernels.device.channel import HEADER as COUNTERS_HEADER
from titanlite.kernels.device.general_gather import _gather_matmul, _publish
from titanlite.kernels.device.launch import Blocks, cdiv, ready
from titanlite.kernels.device.operands import Rows, aligned, rows_of
from titanlite.kernels.device.protocol import meet
from titanlite.kernels.device.specialised_gather import gather_matmul
from titanlite.kernels.device.specialised_matmul import PART
from titanlite.kernels.device.specialised_operands import (
    blocks,
    consumers,
    has_steps_for_parts,
    operand_blocks,
    peer_blocks,
    rest_blocks,
    stages,
)
from titanlite.kernels.device.tiles import Tiles, tiles
from titanlite.kernels.products import (
    FLOAT8,
    MAX_RANKS,
    NOTHING,
    SLOWER,
    GatherCall,
    gather_scale,
    out_dtype_of,
    out_shapes,
    products,
)
from titanlite.kernels.shapes import DimSplit, split

ROWS, COLS, CONTRACTED_ROWS, CONTRACTED_COLS = 0, 1, 2, 3
"""Places of the gathered dim in G as stored: a row or a column, kept or contracted."""

UNIT = 128
"""Rows of a shard whose arrival is counted together."""
COPY_BYTES = 128
"""Bytes of each row that the specialised kernel copies at once: the width that TMA swizzles."""
PUBLISHERS = 264
"""Thread blocks of the first kernel."""


@dataclass(frozen=True)
class GatherLayout:
    """The places of everything, for one call.

    Attributes:
        wait: ROWS, COLS, CONTRACTED_ROWS or CONTRACTED_COLS.
        whole: the gathered dim in G.
        rows: of a full shard seen as [rows, columns].
        columns: of a shard.
        segment: rows of a shard that lie together in G.
        X: kept dim of G.
        K: contracted dim.
    """

    wait: int
    whole: DimSplit
    rows: int
    columns: int
    segment: int
    X: int
    K: int


def gather_layout(shape: list[int], dim: int, size: int, ranks: int, form: str) -> GatherLayout:
    """Describe the gather of a shard of `shape` along `dim` (not negative), for the product `form`."""
    whole = split(shape, dim, size, ranks)
    full = [*shape[:dim], size, *shape[dim + 1 :]]
    last = dim == len(shape) - 1
    contracts_last = form in ("left", "right_t")
    if last:
        wait = CONTRACTED_COLS if contracts_last else COLS
        rows, columns, segment = whole.outer, whole.chunk, whole.outer
    else:
        wait = ROWS if contracts_last else CONTRACTED_ROWS
        columns = shape[-1]
        segment = whole.chunk * whole.inner // columns
        rows = whole.outer * segment
    flat = [math.prod(full[:-1]), full[-1]]
    X, K = flat if contracts_last else flat[::-1]
    return GatherLayout(wait, whole, rows, columns, segment, X, K)


def gather_unsupported_reason(
    shard: Tensor, others: list[Tensor], dim: int, size: int, ranks: int, form: str, scale_of: str
) -> str | None:
    """Return why this call is not to be fused, or None. Depends on shapes, dtypes and the group's size alone."""
    if shard.dtype not in (torch.bfloat16, torch.float16, *FLOAT8):
        return f"{shard.dtype} operands; the kernels take bfloat16, float16 and float8"
    if not 2 <= ranks <= MAX_RANKS:
        return f"a group of {ranks} ranks; the kernels take 2 to {MAX_RANKS}"
    dim %= shard.ndim
    if not others or not others[0].numel() or not math.prod([*shard.shape[:dim], size, *shard.shape[dim + 1 :]]):
        return NOTHING
    at = gather_layout(list(shard.shape), dim, size, ranks, form)
    itemsize = shard.dtype.itemsize
    if at.columns * itemsize % 16:
        return f"rows of {at.columns * itemsize} bytes; the copies want a multiple of 16"
    if not at.whole.even and at.wait != ROWS:
        return f"{size} rows over {ranks} ranks are uneven along a contracted dim or columns"
    if at.wait >= CONTRACTED_ROWS and at.whole.chunk % (128 // itemsize):
        return f"chunks of {at.whole.chunk} of the contracted dim; the kernels want a multiple of {128 // itemsize}"
    if at.wait == CONTRACTED_COLS and scale_of == "shard":
        return "a scale for each shard of the contracted dim"
    if shard.dtype in FLOAT8 and form not in ("left", "right_t"):
        return f"float8 in the form {form!r}; Hopper multiplies float8 along rows only"
    if at.K * itemsize % 16:
        return f"{at.K} contracted, {at.K * itemsize} bytes; the kernels want a multiple of 16"
    if ranks * -(-at.rows // UNIT) > COUNTERS - COUNTERS_HEADER:
        return f"{at.rows} rows of a shard; the kernels count up to {(COUNTERS - COUNTERS_HEADER) // ranks * UNIT}"
    M, N = _product(at, others[0], form)
    return SLOWER if tiles("all_gather_matmul", itemsize, ranks, M, N, at.K, fast_accum=True).plain else None


def _product(at: GatherLayout, other: Tensor, form: str) -> tuple[int, int]:
    """Return rows and columns of the first product."""
    if form.startswith("left"):
        return at.X, other.shape[1]
    return math.prod(other.shape[:-1]), at.X


class _Memory(NamedTuple):
    """The tensors of one call, all allocated before the first launch; kernels read biases and scales one by one.

    Attributes:
        whole_scale: of G; `scale` itself where it does not travel.
        slot_rows: rows of a shard from slot to slot, so that one TMA descriptor reaches both.
    """

    shard: Tensor
    gathered: Tensor
    other: Tensor
    out: Tensor
    bias: Tensor | None
    scale: Tensor | None
    whole_scale: Tensor | None
    other_scale: Tensor | None
    slot_rows: int


def launch_all_gather_matmul(plan: "GatherPlan", call: GatherCall) -> list[Tensor]:
    """Run the operator, its first product fused with the gather.

    Args:
        plan: of this call.
        call: the operator's arguments.
    """
    to, at = channel(call.group), plan.at
    shard, scale, left = aligned(call.shard.contiguous()), call.scale, call.form.startswith("left")
    scale = None if scale is None else scale.contiguous()
    memory = _Memory(
        shard,
        gathered := shard.new_empty(plan.gathered),
        plan.other.placed(call.others[0] if left else call.others[0].flatten(0, -2), transposed=left),
        out := shard.new_empty(plan.out, dtype=plan.out_dtype),
        call.biases[0].contiguous() if call.biases else None,
        scale,
        whole_scale := shard.new_empty(plan.matrix[0], dtype=torch.float32) if plan.moves_scale else scale,
        call.other_scales[0].contiguous() if call.other_scales else None,
        -(-to.begin(plan.slot_bytes) // (at.columns * shard.dtype.itemsize)),
    )
    first, second = (_specialised if plan.specialised else _general)(plan, call, to, memory)
    first()
    second()
    if not at.whole.even:
        gathered = gathered[:, : call.size].contiguous().view(plan.full)
    scales: list[Tensor] = []
    if plan.moves_scale and whole_scale is not None:
        rows = whole_scale.view(at.whole.outer, -1)[:, : plan.size].contiguous()
        scales = [rows.view(*gathered.shape[:-1], 1)]
    if len(call.others) == 1:
        return [gathered, out, *scales]
    return [gathered, out, *products(call, gathered, scales[0] if scales else gather_scale(call), 1), *scales]


Launches = tuple[Callable[[], None], Callable[[], None]]


def _specialised(plan: "GatherPlan", call: GatherCall, to: Channel, memory: _Memory) -> Launches:
    """Load the kernels for the common shapes."""
    shard, gathered, o, out, bias, scale, whole_scale, o_scale, slot_rows = memory
    at, pick, o_rows, moves_scale = plan.at, plan.pick, plan.other, plan.moves_scale
    launched = (plan, to.number, to.capacity)  # slots that have grown lie elsewhere
    slot_bytes = slot_rows * at.columns * shard.dtype.itemsize
    copied = (pick.copy_rows, COPY_BYTES // shard.dtype.itemsize)
    N, BM, BN, BK, by = plan.out[-1], pick.m, pick.n, pick.k, consumers(shard.dtype)
    M, box = at.rows * to.ranks, (pick.m, pick.k)
    of_rows = 0 if scale is None else 2 if moves_scale else 1
    of_columns = 0 if o_scale is None else 2 if o_scale.numel() > 1 else 1
    first = ready(
        meet, launched, 1, (scale, whole_scale),
        lambda: (
            *((scale, whole_scale) if moves_scale else (None, None)), to.slots, to.peer_slots, slot_bytes,
            plan.scale_bytes, at.rows, at.segment,
            to.flags, to.peer_flags, to.epoch, to.deadline, to.failure,
            to.rank, to.ranks, plan.lanes, 0 if not moves_scale else 2 if call.scale_of == "row" else 1,
        ),
        num_warps=4 if moves_scale else 1,
    )  # fmt: skip
    second = ready(
        gather_matmul, launched, multiprocessors(to.device), (shard, gathered, o, out, bias, whole_scale, o_scale),
        lambda: (
            blocks(shard, (at.rows, at.K), at.K, box), blocks(gathered, (M, at.K), at.K, box),
            operand_blocks(o, o_rows, BN, BK), blocks(out, (M, N), N, (BM // by, PART.value)),
            bias, whole_scale, o_scale,
            blocks(shard, (at.rows, at.K), at.K, copied), blocks(gathered, (M, at.K), at.K, copied),
            *peer_blocks(to, shard.dtype, at.columns, copied), rest_blocks(o, o_rows, BN, BK),
            to.counters, to.flags, to.peer_flags, to.epoch, to.deadline, to.failure,
            slot_rows, at.rows, at.segment, N, at.K, to.rank,
            to.ranks, min(pick.group, at.rows // BM), bias is not None,
            of_rows, of_columns, call.fast_accum or scale is None, o_rows.k_major,
            BM, BN, BK, stages(pick, shard.dtype.itemsize, 4 * COPY_BYTES * pick.copy_rows), *copied, by,
        ),
        num_warps=8 // by,
    )  # fmt: skip
    return first, second


def _general(plan: "GatherPlan", call: GatherCall, to: Channel, memory: _Memory) -> Launches:
    """Load the kernels for any shape."""
    shard, gathered, o, out, bias, scale, whole_scale, o_scale, slot_rows = memory
    at, pick, o_rows, moves_scale = plan.at, plan.pick, plan.other, plan.moves_scale
    launched, row_bytes = (plan, to.number, to.capacity), at.columns * shard.dtype.itemsize
    left, last, slot_bytes = call.form.startswith("left"), contracts_last(call.form), slot_rows * row_bytes
    g = gathered.view(plan.matrix)
    g_words = g.view(torch.int64)
    words_of_shard = shard.view(-1).view(torch.int64) if plan.length else to.epoch
    state = (to.counters, to.epoch, to.deadline, to.failure)
    BX, BY = (pick.m, pick.n) if left else (pick.n, pick.m)
    Y = o_rows.shape[0 if o_rows.k_major else 1]
    flat_out, words = out.view(-1, out.shape[-1]), row_bytes // 8
    copy_words = min(1024, triton.next_power_of_2(words))
    by_row = moves_scale or call.scale_of == "row"
    first = ready(
        _publish, launched, plan.publishers, (words_of_shard, g_words, scale, whole_scale),
        lambda: (
            words_of_shard, to.slots, g_words, scale, whole_scale, slot_bytes,
            at.whole.outer, plan.length, plan.slot_stride, plan.slot_stride * to.ranks, plan.scale_bytes,
            plan.scales, 0 if call.scale_of == "shard" else 1, plan.own_segment, at.segment, at.segment * to.ranks,
            to.flags, to.peer_flags, *state,
            to.rank, to.ranks, plan.lanes, moves_scale, plan.block,
        ),
        num_warps=min(8, max(1, plan.block // 64)),
    )  # fmt: skip
    second = ready(
        _gather_matmul, launched, multiprocessors(to.device),
        (g, o, flat_out, out, g_words, whole_scale, scale, o_scale, bias),
        lambda: (
            Blocks(g, g.shape, g.stride(0), (BX, pick.k) if last else (pick.k, BX)),
            Blocks(o, o_rows.shape, o_rows.stride, (BY, pick.k) if o_rows.k_major else (pick.k, BY)),
            Blocks(flat_out, flat_out.shape, flat_out.stride(0), (BX, BY) if left else (BY, BX))
            if plan.tma_store else None,
            out, g_words, whole_scale if by_row else None, scale, o_scale, bias,
            to.peer_slots, slot_bytes, plan.scale_bytes, *state,
            at.rows, words, g.shape[1] * shard.dtype.itemsize // 8, at.segment, at.segment * to.ranks, plan.size,
            at.X, Y, at.K, at.whole.chunk,
            to.rank, to.ranks, at.wait, left, last, o_rows.k_major,
            0 if scale is None else 2 if by_row else 1, 0 if o_scale is None else 2 if o_scale.numel() > 1 else 1,
            moves_scale, bias is not None, plan.tma_store,
            BX, BY, pick.k, pick.group, pick.copiers, UNIT, min(UNIT, 8192 // copy_words), copy_words, call.fast_accum,
        ),
        num_warps=pick.warps, num_stages=pick.stages,
    )  # fmt: skip
    return first, second


@dataclass(frozen=True, eq=False)  # compared by identity: the key of a launch is its plan, hashed at every call
class GatherPlan:
    """All that depends on a call's shapes, dtypes and strides, and on the rank.

    Attributes:
        at: where everything lies.
        other: how the other operand is read.
        pick: tiles.
        specialised: whether the kernel of that name takes the call.
        full: shape of G.
        gathered: the same, or [outer, padded dim, inner] where chunks are not all full.
        matrix: the same as [rows, columns].
        out: shape of the product.
        out_dtype: its dtype.
        tma_store: whether all tiles lie within one rank's part and TMA may write them.
        moves_scale: whether scales travel.
        scale_bytes: where they lie in a slot.
        scales: how many this rank has.
        slot_bytes: needed.
        length: words of this rank's shard per outer index.
        slot_stride: words of a full shard per outer index.
        own_segment: rows of this rank's shard that lie together in G.
        size: rows of the whole G per outer index.
        block: words that a thread block of the first kernel copies at once.
        publishers: thread blocks of the first kernel.
        lanes: ranks, rounded up to a power of two.
    """

    at: GatherLayout
    other: Rows
    pick: Tiles
    specialised: bool
    full: list[int]
    gathered: tuple[int, ...]
    matrix: tuple[int, int]
    out: list[int]
    out_dtype: torch.dtype
    tma_store: bool
    moves_scale: bool
    scale_bytes: int
    scales: int
    slot_bytes: int
    length: int
    slot_stride: int
    own_segment: int
    size: int
    block: int
    publishers: int
    lanes: int


def plan_gather(call: GatherCall, ranks: Group, choice: Tiles | None = None) -> GatherPlan:
    """Plan a call for which `gather_unsupported_reason` is None.

    Args:
        call: the operator's arguments.
        ranks: of the group.
        choice: tiles; those of the tuning table if None.
    """
    shard, size, form, fast_accum, other = call.shard, call.size, call.form, call.fast_accum, call.others[0]
    at = gather_layout(list(shard.shape), call.at, size, ranks.size, form)
    left, itemsize = form.startswith("left"), shard.dtype.itemsize
    dtype = out_dtype_of(shard.dtype, call.out_dtype)
    M, N = _product(at, other, form)
    pick = choice or tiles("all_gather_matmul", itemsize, ranks.size, M, N, at.K, fast_accum, dtype.itemsize)
    aligned_rows = N * dtype.itemsize % 16 == 0
    specialised = pick.specialised and form == "left" and at.wait == ROWS and aligned_rows and at.whole.even
    specialised = (
        specialised and dtype.itemsize == 2 and pick.m >= UNIT
    )  # a counter for each m rows; see `gather_unsupported_reason`
    specialised = specialised and at.segment % pick.m == 0
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
    full = call.whole
    columns = at.columns * (ranks.size if by_columns else 1)
    padded = (at.whole.outer, at.whole.chunk * ranks.size, at.whole.inner)
    return GatherPlan(
        at=at,
        other=rows_of([other.t() if left else other.flatten(0, -2)], may_transpose=shard.dtype not in FLOAT8)[0],
        pick=pick,
        specialised=specialised,
        full=full,
        gathered=tuple(full) if at.whole.even else padded,
        matrix=(math.prod(padded) // columns, columns),
        out=out_shapes(full, [other], form)[0],
        out_dtype=dtype,
        tma_store=tma_store,
        moves_scale=call.moves_scale,
        scale_bytes=scale_bytes,
        scales=shard.numel() // at.columns if call.moves_scale else 0,
        slot_bytes=scale_bytes + 4 * at.rows * ranks.size + at.columns * itemsize,
        length=length,
        slot_stride=at.whole.chunk * at.whole.inner * itemsize // 8,
        own_segment=at.rows if by_columns else max(1, own * at.whole.inner // at.columns),
        size=0 if by_columns else at.whole.size * at.whole.inner // at.columns,
        block=block,
        publishers=min(PUBLISHERS, max(1, at.whole.outer * cdiv(length, block))),
        lanes=triton.next_power_of_2(ranks.size),
    )


def contracts_last(form: str) -> bool:
    """Check that G's last dim is the contracted one."""
    return form in ("left", "right_t")
