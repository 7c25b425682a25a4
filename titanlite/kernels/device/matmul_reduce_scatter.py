"""Matmul → reduce-scatter in two launches: push tiles to their owners while multiplying, then add.

`_matmul_push` is a persistent matmul whose tiles go to the staging slot of the rank that owns them, through TMA stores
that drain while the next tile is computed; owners take turns, so that all links are busy. Its last block signals the
peers and waits for theirs. `_reduce` adds what all ranks have pushed here.
"""

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from titanlite.kernels.collectives import Group
from titanlite.kernels.device.channel import channel, multiprocessors
from titanlite.kernels.device.launch import Blocks, ready
from titanlite.kernels.device.operands import Rows, add_product, rows_of
from titanlite.kernels.device.protocol import signal_peers, tma_stores_written, wait_for_peers
from titanlite.kernels.device.specialised import (
    PART,
    blocks,
    has_steps_for_parts,
    matmul_push,
    operand_blocks,
    peer_blocks,
    rest_blocks,
    stages,
    teams,
)
from titanlite.kernels.device.tiles import Tiles, tiles
from titanlite.kernels.products import FLOAT8, MAX_PAIRS, MAX_RANKS, NOTHING, SLOWER, out_dtype_of, product_shape
from titanlite.kernels.shapes import Split, split

REDUCE_BLOCK = 4096
"""Elements that a thread block adds."""


@triton.jit
def _accumulate(
    acc, a_desc, b_desc, m0, n0, K,
    A_K_MAJOR: tl.constexpr, B_K_MAJOR: tl.constexpr, BK: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Add one tile of `A @ B`."""
    for k in range(0, K, BK):
        if A_K_MAJOR:
            a = a_desc.load([m0, k])
        else:
            a = a_desc.load([k, m0]).T
        if B_K_MAJOR:
            b = b_desc.load([n0, k])
        else:
            b = b_desc.load([k, n0]).T
        acc = add_product(acc, a, b.T, BK, FAST)
    return acc


@triton.jit
def _scaled(
    acc, left, right, m0, n0, M, N, L_SCALE: tl.constexpr, R_SCALE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr
):
    """Multiply a tile by its operands' scales: 0 none, 1 one number, 2 one for each row or column."""
    if L_SCALE == 1:
        acc = acc * tl.load(left)
    elif L_SCALE == 2:
        m = m0 + tl.arange(0, BM)
        acc = acc * tl.load(left + m, mask=m < M)[:, None]
    if R_SCALE == 1:
        acc = acc * tl.load(right)
    elif R_SCALE == 2:
        n = n0 + tl.arange(0, BN)
        acc = acc * tl.load(right + n, mask=n < N)[None, :]
    return acc


@triton.jit(do_not_specialize=["rank"])
def _matmul_push(
    a0, b0, a1, b1, a2, b2, d0, d1, d2, d3, d4, d5, d6, d7,
    ls0, rs0, ls1, rs1, ls2, rs2, like,
    peer_slots, slot_bytes, counters, flags, peer_flags, epoch_word, deadline, failure,
    M, N, K0, K1, K2, segment, size, outer, staged_rows, staged_cols, slot_rows,
    rank, RANKS: tl.constexpr, LANES: tl.constexpr, BY_COLS: tl.constexpr, PAIRS: tl.constexpr,
    A_K_MAJOR: tl.constexpr, B_K_MAJOR: tl.constexpr, L_SCALE: tl.constexpr, R_SCALE: tl.constexpr,
    TMA_STORE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Multiply and push.

    segment: rows (columns if BY_COLS) that one owner has together; size: of the scattered dim, in rows or columns;
    outer: how many such groups. staged_rows, staged_cols: of one rank's part in a slot; slot_rows: rows from slot to
    slot of the tensors behind d0 … d7.
    """
    epoch = tl.load(epoch_word)
    parity = epoch & 1
    if BY_COLS:
        per_owner = tl.cdiv(segment, BN)
        groups = tl.cdiv(M, BM)
        inner = per_owner
    else:
        per_owner = tl.cdiv(segment, BM)
        groups = outer * per_owner
        inner = tl.cdiv(N, BN)
    # Row blocks outermost, then owners, this rank last, then columns: each owner gets its tiles at the same pace.
    for tile in tl.range(tl.program_id(0), groups * RANKS * inner, tl.num_programs(0)):
        owner = (tile // inner + rank + 1) % RANKS
        group = tile // (inner * RANKS)
        if BY_COLS:
            m0 = group * BM
            within = (tile % inner) * BN
            n0 = owner * segment + within
            row = m0
            col = within
            rows_left = M - m0
            cols_left = min(segment, size - owner * segment) - within
        else:
            within = (group % per_owner) * BM
            m0 = (group // per_owner) * size + owner * segment + within
            n0 = (tile % inner) * BN
            row = (group // per_owner) * segment + within
            col = n0
            rows_left = min(segment, size - owner * segment) - within
            cols_left = N - n0
        acc = tl.zeros((BM, BN), tl.float32)
        acc = _accumulate(acc, a0, b0, m0, n0, K0, A_K_MAJOR, B_K_MAJOR, BK, FAST)
        if L_SCALE == 0:
            if PAIRS > 1:
                acc = _accumulate(acc, a1, b1, m0, n0, K1, A_K_MAJOR, B_K_MAJOR, BK, FAST)
            if PAIRS > 2:
                acc = _accumulate(acc, a2, b2, m0, n0, K2, A_K_MAJOR, B_K_MAJOR, BK, FAST)
        else:
            acc = _scaled(acc, ls0, rs0, m0, n0, M, N, L_SCALE, R_SCALE, BM, BN)
            if PAIRS > 1:
                more = tl.zeros((BM, BN), tl.float32)
                more = _accumulate(more, a1, b1, m0, n0, K1, A_K_MAJOR, B_K_MAJOR, BK, FAST)
                acc += _scaled(more, ls1, rs1, m0, n0, M, N, L_SCALE, R_SCALE, BM, BN)
            if PAIRS > 2:
                more = tl.zeros((BM, BN), tl.float32)
                more = _accumulate(more, a2, b2, m0, n0, K2, A_K_MAJOR, B_K_MAJOR, BK, FAST)
                acc += _scaled(more, ls2, rs2, m0, n0, M, N, L_SCALE, R_SCALE, BM, BN)
        out = acc.to(like.dtype.element_ty)
        if TMA_STORE:
            at = parity * slot_rows + rank * staged_rows + row
            if owner == 0:
                d0.store([at, col], out)
            if owner == 1:
                d1.store([at, col], out)
            if RANKS > 2:  # noqa: SIM102  # known when compiling
                if owner == 2:
                    d2.store([at, col], out)
            if RANKS > 3:  # noqa: SIM102  # known when compiling
                if owner == 3:
                    d3.store([at, col], out)
            if RANKS > 4:  # noqa: SIM102  # known when compiling
                if owner == 4:
                    d4.store([at, col], out)
            if RANKS > 5:  # noqa: SIM102  # known when compiling
                if owner == 5:
                    d5.store([at, col], out)
            if RANKS > 6:  # noqa: SIM102  # known when compiling
                if owner == 6:
                    d6.store([at, col], out)
            if RANKS > 7:  # noqa: SIM102  # known when compiling
                if owner == 7:
                    d7.store([at, col], out)
        else:
            address = tl.load(peer_slots + owner) + parity.to(tl.int64) * slot_bytes
            staged = tl.multiple_of(address.to(tl.pointer_type(like.dtype.element_ty)), 16)
            rows, cols = tl.arange(0, BM), tl.arange(0, BN)
            to = (rank * staged_rows + row + rows)[:, None].to(tl.int64) * staged_cols + (col + cols)[None, :]
            tl.store(staged + to, out, mask=(rows < rows_left)[:, None] & (cols < cols_left)[None, :])

    tma_stores_written()
    tl.debug_barrier()
    finished = tl.atomic_add(counters + 2, 1, sem="acq_rel", scope="gpu")
    if finished == tl.num_programs(0) - 1:
        signal_peers(peer_flags, epoch, rank, RANKS, LANES)
        wait_for_peers(flags, epoch, deadline, failure, rank, RANKS, LANES, 1)
        tl.store(counters + 2, 0)
        tl.store(epoch_word, epoch + 1)


@triton.jit
def _reduce(
    slots, slot_bytes, epoch_word, out, bias, n, own_segment, segment, staged, bias_cols,
    RANKS: tl.constexpr, PADDED: tl.constexpr, WIDE: tl.constexpr, BIAS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add what all ranks have pushed, in float32 and in rank order.

    n: elements of the result, one from each of RANKS parts of `staged` elements. PADDED: an owner's rows come in
    groups of `segment` elements of which `own_segment` count. WIDE: all parts together have more elements than 32 bits
    count; otherwise 64 would cost registers.
    """
    parity = (tl.load(epoch_word) - 1) & 1
    parts = (slots + parity.to(tl.int64) * slot_bytes).to(tl.pointer_type(out.dtype.element_ty))
    part = tl.cast(staged, tl.int64) if WIDE else staged
    for start in range(tl.program_id(0), tl.cdiv(n, BLOCK), tl.num_programs(0)):
        at = start.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = at < n
        source = at
        if PADDED:
            source = (at // own_segment) * segment + at % own_segment
        total = tl.zeros([BLOCK], tl.float32)
        for r in tl.static_range(RANKS):
            total += tl.load(parts + r * part + source, mask=inside, eviction_policy="evict_first").to(tl.float32)
        if BIAS:
            total += tl.load(bias + at % bias_cols, mask=inside).to(tl.float32)
        tl.store(out + at, total.to(out.dtype.element_ty), mask=inside)


def obstacle(lefts: list[Tensor], rights: list[Tensor], ranks: int) -> str | None:
    """Why this call is not to be fused, in words, or None. Depends on shapes, dtypes and the group's size alone."""
    left = lefts[0]
    if left.dtype not in (torch.bfloat16, torch.float16, *FLOAT8):
        return f"{left.dtype} operands; the kernels take bfloat16, float16 and float8"
    if not 2 <= ranks <= MAX_RANKS:
        return f"a group of {ranks} ranks; the kernels take 2 to {MAX_RANKS}"
    if len(lefts) > MAX_PAIRS:
        return f"a sum of {len(lefts)} products; the kernels take up to {MAX_PAIRS}"
    shape = product_shape(left.shape, rights[0].shape)
    if not math.prod(shape) or not all(a.shape[-1] for a in lefts):
        return NOTHING
    for a in lefts:
        if a.shape[-1] * a.dtype.itemsize % 16:
            return (
                f"{a.shape[-1]} contracted, {a.shape[-1] * a.dtype.itemsize} bytes; the kernels want a multiple of 16"
            )
    M, N, K = math.prod(shape[:-1]), shape[-1], sum(a.shape[-1] for a in lefts)
    plain = tiles("matmul_reduce_scatter", left.dtype.itemsize, ranks, M, N, K, fast_accum=True).plain
    return SLOWER if plain else None


def _alike(scales: list[Tensor], rows: int) -> list[Tensor]:
    """Scales as the kernel reads them: one after the other, and all by row if one is."""
    if len(scales) > 1 and any(scale.numel() > 1 for scale in scales):
        scales = [scale if scale.numel() > 1 else scale.reshape(1).expand(rows) for scale in scales]
    return [scale.contiguous() for scale in scales]


def matmul_reduce_scatter(
    plan: "Plan",
    lefts: list[Tensor],
    rights: list[Tensor],
    dim: int,
    group: str,
    bias: Tensor | None,
    left_scales: list[Tensor],
    right_scales: list[Tensor],
    out_dtype: torch.dtype | None,
    fast_accum: bool,
) -> Tensor:
    """The operator's arguments and result.

    Args:
        plan: of these arguments.
    """
    to = channel(group)
    kinds = 0, 0
    if left_scales:
        left_scales = _alike(left_scales, plan.M)
        right_scales = _alike(right_scales, plan.N)
        kinds = tuple(2 if scales[0].numel() > 1 else 1 for scales in (left_scales, right_scales))
    if bias is not None:
        bias = bias.contiguous()
    pick, whole, a_rows, b_rows = plan.pick, plan.whole, plan.lefts, plan.rights
    a_k_major, b_k_major = a_rows[0].k_major, b_rows[0].k_major

    # Everything is allocated before the first launch.
    a = [rows.placed(_flat(x)) for rows, x in zip(a_rows, lefts, strict=True)]
    b = [rows.placed(x, turned=True) for rows, x in zip(b_rows, rights, strict=True)]
    out = lefts[0].new_empty(plan.out, dtype=plan.out_dtype)
    row_bytes = plan.staged_cols * plan.out_dtype.itemsize
    capacity = to.begin(plan.slot_bytes)
    slot_rows = -(-capacity // row_bytes)
    slot_bytes = slot_rows * row_bytes if plan.tma_store else capacity  # one TMA descriptor reaches both slots

    launched = (plan, to.number, to.capacity)  # slots that have grown lie elsewhere
    M, N, K, box = plan.M, plan.N, lefts[0].shape[-1], (pick.m, pick.n)
    if plan.specialised:
        scale, other_scale = (scales[0] if scales else None for scales in (left_scales, right_scales))
        by = teams(a[0].dtype)
        push = ready(
            matmul_push, launched, multiprocessors(to.device), (a[0], b[0], scale, other_scale),
            lambda: (
                blocks(a[0], a_rows[0].shape, a_rows[0].stride, (pick.m, pick.k) if a_k_major else (pick.k, pick.m)),
                operand_blocks(b[0], b_rows[0], pick.n, pick.k), scale, other_scale,
                *peer_blocks(to, plan.out_dtype, plan.staged_cols, (pick.m // by, PART.value)),
                rest_blocks(b[0], b_rows[0], pick.n, pick.k),
                to.counters, to.flags, to.peer_flags, to.epoch, to.deadline, to.failure,
                slot_rows, plan.staged_rows, plan.segment, N, K, to.rank,
                to.ranks, pick.group, *kinds, fast_accum or not left_scales, a_k_major, b_k_major,
                pick.m, pick.n, pick.k, stages(pick, a[0].dtype.itemsize), by,
            ),
            num_warps=8 // by,
        )  # fmt: skip
    else:
        staging: list[Blocks | None] = [None] * MAX_RANKS
        if plan.tma_store:
            rows = 2 * to.capacity // row_bytes
            for peer, slots in enumerate(to.peers):
                memory = slots[: rows * row_bytes].view(plan.out_dtype)
                staging[peer] = Blocks(memory, (rows, plan.staged_cols), plan.staged_cols, box)
        pairs: list[Blocks] = []
        Ks: list[int] = []
        scales: list[Tensor | None] = []
        for i in range(MAX_PAIRS):
            at = min(i, len(lefts) - 1)  # what is not there is not read
            for x, rows, n in ((a[at], a_rows[at], pick.m), (b[at], b_rows[at], pick.n)):
                pairs.append(Blocks(x, rows.shape, rows.stride, (n, pick.k) if rows.k_major else (pick.k, n)))
            Ks.append(lefts[at].shape[-1])
            scales += [left_scales[i], right_scales[i]] if i < len(left_scales) else [None, None]
        push = ready(
            _matmul_push, launched, multiprocessors(to.device), (*a, *b, *left_scales, *right_scales, out),
            lambda: (
                *pairs, *staging, *scales, out, to.peer_slots, slot_bytes,
                to.counters, to.flags, to.peer_flags, to.epoch, to.deadline, to.failure,
                M, N, *Ks, plan.segment, plan.size, whole.outer, plan.staged_rows, plan.staged_cols, slot_rows,
                to.rank, to.ranks, plan.lanes, plan.by_cols, len(lefts), a_k_major, b_k_major,
                *kinds, plan.tma_store, pick.m, pick.n, pick.k, fast_accum,
            ),
            num_warps=pick.warps, num_stages=pick.stages,
        )  # fmt: skip
    reduce = ready(
        _reduce, launched, 2 * multiprocessors(to.device), (out, bias),
        lambda: (
            to.slots, slot_bytes, to.epoch, out, bias,
            plan.n, plan.own_segment, plan.padded_segment, plan.staged, plan.out[-1],
            to.ranks, not whole.even, to.ranks * plan.staged >= 2**31, bias is not None, REDUCE_BLOCK,
        ),
        num_warps=8,
    )  # fmt: skip
    push()
    reduce()
    return out


@dataclass(frozen=True, eq=False)  # compared by identity: the key of a launch is its plan, hashed at every call
class Plan:
    """What depends on a call's shapes, dtypes and strides, and on the rank.

    Attributes:
        pick: tiles.
        whole: the scattered dim.
        specialised: whether the kernel of that name takes the call.
        by_cols: whether the last dim is scattered.
        M, N: of the product.
        out: shape of this rank's part.
        out_dtype: its dtype.
        n: its elements.
        tma_store: whether all tiles lie within one owner's part and TMA may write them.
        segment: rows (columns if `by_cols`) that one owner has together.
        size: of the scattered dim, in rows or columns.
        staged_rows, staged_cols: what one rank pushes to one owner.
        staged: its elements.
        slot_bytes: needed.
        own_segment, padded_segment: elements that this rank has together, and how far apart they are staged.
        lanes: ranks, rounded up to a power of two.
        lefts, rights: how the operands are read.
    """

    pick: Tiles
    whole: Split
    specialised: bool
    by_cols: bool
    M: int
    N: int
    out: list[int]
    out_dtype: torch.dtype
    n: int
    tma_store: bool
    segment: int
    size: int
    staged_rows: int
    staged_cols: int
    staged: int
    slot_bytes: int
    own_segment: int
    padded_segment: int
    lanes: int
    lefts: list[Rows]
    rights: list[Rows]


def plan(
    lefts: list[Tensor],
    rights: list[Tensor],
    dim: int,
    ranks: Group,
    out_dtype: torch.dtype | None,
    fast_accum: bool,
    choice: Tiles | None = None,
) -> Plan:
    """How a call is done in which `obstacle` has found none; arguments are the operator's.

    Args:
        ranks: of the group.
        choice: tiles; those of the tuning table if None.
    """
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
    # A tile that reaches beyond its owner's part would write into what another rank has pushed.
    whole_tiles = segment % pick.n == 0 and M % pick.m == 0 if by_cols else segment % pick.m == 0
    tma_store = aligned_rows and whole_tiles and whole.even
    own = whole.length(ranks.rank)
    inner = 1 if by_cols else whole.inner
    size = whole.size if by_cols else whole.size * whole.inner // N
    # Float8 rows run along K alone; and TMA begins at a whole 16 bytes of a row, which an owner's part does not always.
    parts_begin_aligned = segment * itemsize % 16 == size * itemsize % 16 == 0
    return Plan(
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
        staged=staged_rows * staged_cols,
        slot_bytes=ranks.size * staged_rows * row_bytes + row_bytes,
        own_segment=max(1, own * inner),
        padded_segment=whole.chunk * inner,
        lanes=triton.next_power_of_2(ranks.size),
        lefts=rows_of([_flat(x) for x in lefts], itemsize > 1 and (by_cols or parts_begin_aligned)),
        rights=rows_of([x.t() for x in rights], itemsize > 1 and (not by_cols or parts_begin_aligned)),
    )


def _flat(left: Tensor) -> Tensor:
    """[M, K]."""
    return left if left.ndim == 2 else left.flatten(0, -2)
