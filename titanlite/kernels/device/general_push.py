"""Matmul → reduce-scatter for any shape: a matmul that pushes tiles to their owner ranks, and the sum that follows.

`_matmul_push` is a persistent matmul. It stores each tile by TMA in a slot of the tile's owner rank while the next tile
is computed. Successive tiles have different owners, so that all links are busy. The last thread block signals the peers
and waits for their signals. `_reduce` adds up the tiles that all ranks have pushed to this rank, also those of
`specialised_push`.
"""

import triton
import triton.language as tl

from titanlite.kernels.device.operands import add_product
from titanlite.kernels.device.protocol import signal_peers, tma_stores_written, wait_for_peers


@triton.jit
def _accumulate(
    acc, a_desc, b_desc, m0, n0, K,
    A_K_MAJOR: tl.constexpr, B_K_MAJOR: tl.constexpr, BK: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Add the tile of `A @ B` at row `m0` and column `n0` to `acc`, and return the sum."""
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
    """Multiply a tile by its operands' scales. L_SCALE, R_SCALE: 0: none, 1: one number, 2: one per row or column."""
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
    """Compute the sum of PAIRS products a · b, tile by tile, and push each tile to the rank that owns it.

    size: of the scattered dim, in rows (columns if BY_COLS); segment: contiguous rows or columns of one owner; outer:
    number of groups of `size` rows. staged_rows, staged_cols: size of the part that one rank pushes to an owner.
    d0 … d7: descriptors of all ranks' slots; slot_rows: rows between two slots.
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
    # Order of tiles: by block of rows, owner (this rank last), column. So all owners get tiles at the same pace.
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
            if RANKS > 2:  # noqa: SIM102  # RANKS is a constant
                if owner == 2:
                    d2.store([at, col], out)
            if RANKS > 3:  # noqa: SIM102  # RANKS is a constant
                if owner == 3:
                    d3.store([at, col], out)
            if RANKS > 4:  # noqa: SIM102  # RANKS is a constant
                if owner == 4:
                    d4.store([at, col], out)
            if RANKS > 5:  # noqa: SIM102  # RANKS is a constant
                if owner == 5:
                    d5.store([at, col], out)
            if RANKS > 6:  # noqa: SIM102  # RANKS is a constant
                if owner == 6:
                    d6.store([at, col], out)
            if RANKS > 7:  # noqa: SIM102  # RANKS is a constant
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
    """Add up the RANKS parts that ranks have pushed, in float32 and in the order of ranks.

    n: elements of the result; staged: elements of a part. PADDED: a part has groups of `segment` elements, of which
    only the first `own_segment` belong to the result. WIDE: all parts together have more elements than 32 bits can
    count. 64-bit offsets cost registers.
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
