"""Matmul → reduce-scatter in two launches: one pushes tiles to their owner ranks while multiplying, one adds them up.

Common shapes run `specialised_push`, others `general_push`. Both use the sum of `general_push`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from titanlite.kernels.collectives import Group
from titanlite.kernels.device.channel import Channel, channel, multiprocessors
from titanlite.kernels.device.general_push import _matmul_push, _reduce
from titanlite.kernels.device.launch import Blocks, ready
from titanlite.kernels.device.operands import Rows, rows_of
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
from titanlite.kernels.device.specialised_push import matmul_push
from titanlite.kernels.device.tiles import Tiles, tiles
from titanlite.kernels.products import (
    MAX_PAIRS,
    MAX_RANKS,
    NOTHING,
    SLOWER,
    ScatterCall,
    out_dtype_of,
    product_shape,
    unsupported_operands,
)
from titanlite.kernels.shapes import DimSplit, split

REDUCE_BLOCK = 4096
"""Elements of the result that a thread block computes at a time."""


def scatter_unsupported_reason(call: ScatterCall, ranks: int) -> str | None:
    """Return the reason not to fuse a call, or None. Depends only on shapes, dtypes and the group's size."""
    lefts, left = call.lefts, call.lefts[0]
    if reason := unsupported_operands(left.dtype, ranks):
        return reason
    if len(lefts) > MAX_PAIRS:
        return f"a sum of {len(lefts)} products; the kernels take up to {MAX_PAIRS}"
    shape = product_shape(left.shape, call.rights[0].shape)
    if not math.prod(shape) or not all(a.shape[-1] for a in lefts):
        return NOTHING
    for K in (a.shape[-1] for a in lefts):
        if (n_bytes := K * left.dtype.itemsize) % 16:
            return f"{K} contracted, {n_bytes} bytes; the kernels want a multiple of 16"
    M, N, K = math.prod(shape[:-1]), shape[-1], sum(a.shape[-1] for a in lefts)
    plain = tiles("matmul_reduce_scatter", left.dtype.itemsize, ranks, M, N, K, fast_accum=True).plain
    return SLOWER if plain else None


def _alike(scales: list[Tensor], rows: int) -> list[Tensor]:
    """Return contiguous scales. If one of them has a number for each row, the others get `rows` numbers, too."""
    if len(scales) > 1 and any(scale.numel() > 1 for scale in scales):
        scales = [scale if scale.numel() > 1 else scale.reshape(1).expand(rows) for scale in scales]
    return [scale.contiguous() for scale in scales]


class _ScatterMemory(NamedTuple):
    """The tensors of one call, all allocated before the first launch."""

    lefts: list[Tensor]
    rights: list[Tensor]
    left_scales: list[Tensor]
    right_scales: list[Tensor]
    scale_kinds: tuple[int, int]  # of left and right scales: 0: none, 1: one number, 2: one per row or column
    out: Tensor
    slot_rows: int  # rows from the start of one slot to the next
    slot_bytes: int  # bytes from the start of one slot to the next


def launch_matmul_reduce_scatter(plan: "ScatterPlan", call: ScatterCall) -> Tensor:
    """Multiply and sum over ranks in fused kernels, and return this rank's part of the sum."""
    to, whole = channel(call.group), plan.whole
    left_scales, right_scales = _alike(call.left_scales, plan.M), _alike(call.right_scales, plan.N)
    kinds = tuple(2 if scales[0].numel() > 1 else 1 for scales in (left_scales, right_scales) if scales) or (0, 0)
    bias = None if call.bias is None else call.bias.contiguous()
    a = [rows.placed(x.flatten(0, -2)) for rows, x in zip(plan.lefts, call.lefts, strict=True)]
    b = [rows.placed(x, transposed=True) for rows, x in zip(plan.rights, call.rights, strict=True)]
    out = call.lefts[0].new_empty(plan.out, dtype=plan.out_dtype)
    row_bytes = plan.staged_cols * plan.out_dtype.itemsize
    capacity = to.begin(plan.slot_bytes)
    slot_rows = -(-capacity // row_bytes)
    slot_bytes = slot_rows * row_bytes if plan.tma_store else capacity  # one TMA descriptor spans both slots
    memory = _ScatterMemory(a, b, left_scales, right_scales, kinds, out, slot_rows, slot_bytes)
    push = (_specialised_push if plan.specialised else _general_push)(plan, call, to, memory)
    staged = plan.staged_rows * plan.staged_cols
    reduce = ready(
        _reduce, (plan, to.number, to.capacity), 2 * multiprocessors(to.device), (out, bias),
        lambda: (
            to.slots, slot_bytes, to.epoch, out, bias,
            plan.n, plan.own_segment, plan.padded_segment, staged, plan.out[-1],
            to.ranks, not whole.even, to.ranks * staged >= 2**31, bias is not None, REDUCE_BLOCK,
        ),
        num_warps=8,
    )  # fmt: skip
    push()
    reduce()
    return out


def _specialised_push(
    plan: "ScatterPlan", call: ScatterCall, to: Channel, memory: _ScatterMemory
) -> Callable[[], None]:
    """Load the kernel of `specialised_push`, and return its launch."""
    (a,), (b,), left_scales, right_scales, kinds, _, slot_rows, _ = memory
    pick, (a_rows,), (b_rows,) = plan.pick, plan.lefts, plan.rights
    scale, other_scale = (scales[0] if scales else None for scales in (left_scales, right_scales))
    by, K = consumers(a.dtype), call.lefts[0].shape[-1]
    return ready(
        matmul_push, (plan, to.number, to.capacity), multiprocessors(to.device), (a, b, scale, other_scale),
        lambda: (
            blocks(a, a_rows.shape, a_rows.stride, (pick.m, pick.k) if a_rows.k_major else (pick.k, pick.m)),
            operand_blocks(b, b_rows, pick.n, pick.k), scale, other_scale,
            *peer_blocks(to, plan.out_dtype, plan.staged_cols, (pick.m // by, PART.value)),
            rest_blocks(b, b_rows, pick.n, pick.k),
            to.counters, to.flags, to.peer_flags, to.epoch, to.deadline, to.failure,
            slot_rows, plan.staged_rows, plan.segment, plan.N, K, to.rank,
            to.ranks, pick.group, *kinds, call.fast_accum or not left_scales, a_rows.k_major, b_rows.k_major,
            pick.m, pick.n, pick.k, stages(pick, a.dtype.itemsize), by,
        ),
        num_warps=8 // by,
    )  # fmt: skip


def _general_push(plan: "ScatterPlan", call: ScatterCall, to: Channel, memory: _ScatterMemory) -> Callable[[], None]:
    """Load the kernel of `general_push`, and return its launch."""
    a, b, left_scales, right_scales, kinds, out, slot_rows, slot_bytes = memory
    pick, a_rows, b_rows = plan.pick, plan.lefts, plan.rights
    staging: list[Blocks | None] = [None] * MAX_RANKS
    if plan.tma_store:
        row_bytes = plan.staged_cols * plan.out_dtype.itemsize
        rows = 2 * to.capacity // row_bytes
        for peer, slots in enumerate(to.peers):
            staged = slots[: rows * row_bytes].view(plan.out_dtype)
            staging[peer] = Blocks(staged, (rows, plan.staged_cols), plan.staged_cols, (pick.m, pick.n))
    pairs: list[Blocks] = []
    Ks: list[int] = []
    scales: list[Tensor | None] = []
    for i in range(MAX_PAIRS):
        at = min(i, len(a) - 1)  # the last pair in place of missing ones, which the kernel does not read
        for x, rows, n in ((a[at], a_rows[at], pick.m), (b[at], b_rows[at], pick.n)):
            pairs.append(Blocks(x, rows.shape, rows.stride, (n, pick.k) if rows.k_major else (pick.k, n)))
        Ks.append(call.lefts[at].shape[-1])
        scales += [left_scales[i], right_scales[i]] if i < len(left_scales) else [None, None]
    return ready(
        _matmul_push, (plan, to.number, to.capacity), multiprocessors(to.device),
        (*a, *b, *left_scales, *right_scales, out),
        lambda: (
            *pairs, *staging, *scales, out, to.peer_slots, slot_bytes,
            to.counters, to.flags, to.peer_flags, to.epoch, to.deadline, to.failure,
            plan.M, plan.N, *Ks, plan.segment, plan.size, plan.whole.outer, plan.staged_rows, plan.staged_cols,
            slot_rows, to.rank, to.ranks, triton.next_power_of_2(to.ranks), plan.by_cols, len(a),
            a_rows[0].k_major, b_rows[0].k_major, *kinds, plan.tma_store, pick.m, pick.n, pick.k, call.fast_accum,
        ),
        num_warps=pick.warps, num_stages=pick.stages,
    )  # fmt: skip


@dataclass(frozen=True, eq=False)  # compared by identity: a plan is the key of its launches, hashed at every call
class ScatterPlan:
    """All properties of a call that depend only on its shapes, dtypes and strides, and on the rank."""

    pick: Tiles
    whole: DimSplit  # how the scattered dim is split over ranks
    specialised: bool  # whether `specialised_push` runs the call
    by_cols: bool  # whether the last dim is scattered
    M: int  # rows of the product
    N: int  # columns of the product
    out: list[int]  # shape of this rank's part
    out_dtype: torch.dtype
    n: int  # elements of this rank's part
    tma_store: bool  # whether no tile spans the parts of two owners, so that TMA may store tiles
    segment: int  # contiguous rows (columns if `by_cols`) of one owner
    size: int  # size of the scattered dim, in rows or columns
    staged_rows: int  # rows of the part that one rank pushes to one owner
    staged_cols: int  # columns of that part
    slot_bytes: int
    own_segment: int  # contiguous elements of this rank in the product
    padded_segment: int  # elements from one such segment to the next in a slot
    lefts: list[Rows]  # how kernels read the left operands
    rights: list[Rows]  # how kernels read the right operands


def plan_scatter(call: ScatterCall, ranks: Group, choice: Tiles | None = None) -> ScatterPlan:
    """Plan a call for which `scatter_unsupported_reason` is None. choice: tiles, in place of the tuning table's."""
    lefts, rights, dim, *_, out_dtype, fast_accum = call
    shape = product_shape(lefts[0].shape, rights[0].shape)
    dim %= len(shape)
    M, N, itemsize = math.prod(shape[:-1]), shape[-1], lefts[0].dtype.itemsize
    dtype = out_dtype_of(lefts[0].dtype, out_dtype)
    whole = split(shape, dim, shape[dim], ranks.size)
    by_cols = dim == len(shape) - 1
    K = sum(left.shape[-1] for left in lefts)
    pick = choice or tiles("matmul_reduce_scatter", itemsize, ranks.size, M, N, K, fast_accum, dtype.itemsize)
    segment = whole.chunk if by_cols else whole.chunk * whole.inner // N
    staged_rows, staged_cols = (M, segment) if by_cols else (whole.outer * segment, N)
    row_bytes = staged_cols * dtype.itemsize
    aligned_rows = row_bytes % 16 == 0
    specialised = pick.specialised and not by_cols and len(lefts) == 1 and aligned_rows and whole.even
    specialised = specialised and dtype.itemsize == 2 and segment % pick.m == 0
    specialised = specialised and has_steps_for_parts(pick, K, itemsize, fast_accum)
    pick = pick if specialised else pick.narrow()
    # A tile that reaches beyond its owner's part would overwrite tiles that another rank has pushed.
    whole_tiles = segment % pick.n == 0 and M % pick.m == 0 if by_cols else segment % pick.m == 0
    tma_store = aligned_rows and whole_tiles and whole.even
    own = whole.length(ranks.rank)
    inner = 1 if by_cols else whole.inner
    size = whole.size if by_cols else whole.size * whole.inner // N
    # TMA reads rows from multiples of 16 bytes on, where an owner's part may not begin. Float8 is read along K only.
    parts_begin_aligned = segment * itemsize % 16 == size * itemsize % 16 == 0
    return ScatterPlan(
        pick=pick,
        whole=whole,
        specialised=specialised,
        by_cols=by_cols,
        M=M,
        N=N,
        out=[*shape[:dim], own, *shape[dim + 1 :]],
        out_dtype=dtype,
        n=math.prod(shape) // max(1, shape[dim]) * own,
        tma_store=tma_store,
        segment=segment,
        size=size,
        staged_rows=staged_rows,
        staged_cols=staged_cols,
        slot_bytes=ranks.size * staged_rows * row_bytes + row_bytes,
        own_segment=max(1, own * inner),
        padded_segment=whole.chunk * inner,
        lefts=rows_of([x.flatten(0, -2) for x in lefts], itemsize > 1 and (by_cols or parts_begin_aligned)),
        rights=rows_of([x.t() for x in rights], itemsize > 1 and (not by_cols or parts_begin_aligned)),
    )
