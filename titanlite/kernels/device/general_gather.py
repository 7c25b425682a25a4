"""All-gather → matmul for any shape: publish this rank's shard, then pull the peers' shards while multiplying.

`_publish` copies the shard to this rank's slot and to its place in the gathered tensor G. Its last thread block signals
the peers and waits for their signals. `_gather_matmul` is one persistent kernel. The first of its thread blocks to run
pull the peers' shards into G, and count the rows that have arrived. They copy a block of rows from each peer in turn,
so that all links are busy. The other thread blocks compute tiles of the product, of this rank's rows first and then in
the order of arrival. Each tile waits only for the rows that it reads. When nothing is left to copy, all blocks compute.

G is the gathered operand, O the other operand. X and Y are the sizes of G's and O's dims that are not contracted. If
the gathered dim is contracted, a tile sums over it rank by rank, beginning with this rank's chunk.
"""

import triton
import triton.language as tl

from titanlite.kernels.device.channel import HEADER as COUNTERS_HEADER
from titanlite.kernels.device.operands import add_product
from titanlite.kernels.device.protocol import signal_peers, wait_for_count, wait_for_peers

HEADER = tl.constexpr(COUNTERS_HEADER)


@triton.jit(do_not_specialize=["rank"])
def _publish(
    shard, slots, whole, scale, scale_whole, slot_bytes,
    outer, length, slot_stride, whole_stride, scale_bytes,
    n_scales, scale_stride, own_segment, segment, whole_rows,
    flags, peer_flags, counters, epoch_word, deadline, failure,
    rank, RANKS: tl.constexpr, LANES: tl.constexpr,
    SCALED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Copy this rank's shard, [outer, length] words of 8 bytes, and its scales if SCALED, to its slot and into G.
    Then signal all ranks, and wait for their signals."""
    epoch = tl.load(epoch_word)
    slot = slots + (epoch & 1).to(tl.int64) * slot_bytes
    words = slot.to(tl.pointer_type(tl.int64))
    per_row = tl.cdiv(length, BLOCK)
    for i in range(tl.program_id(0), outer * per_row, tl.num_programs(0)):
        row = (i // per_row).to(tl.int64)
        at = (i % per_row) * BLOCK + tl.arange(0, BLOCK)
        inside = at < length
        value = tl.load(shard + row * length + at, mask=inside)
        tl.store(words + row * slot_stride + at, value, mask=inside)
        tl.store(whole + row * whole_stride + rank.to(tl.int64) * slot_stride + at, value, mask=inside)
    if SCALED:
        floats = (slot + scale_bytes).to(tl.pointer_type(tl.float32))
        for i in range(tl.program_id(0), tl.cdiv(n_scales, BLOCK), tl.num_programs(0)):
            at = i * BLOCK + tl.arange(0, BLOCK)
            value = tl.load(scale + at * scale_stride, mask=at < n_scales)
            group, within = at // own_segment, at % own_segment
            tl.store(floats + group * segment + within, value, mask=at < n_scales)
            tl.store(scale_whole + group * whole_rows + rank * segment + within, value, mask=at < n_scales)
    tl.debug_barrier()
    done = tl.atomic_add(counters + 3, 1, sem="acq_rel", scope="gpu")
    if done == tl.num_programs(0) - 1:
        signal_peers(peer_flags, epoch, rank, RANKS, LANES)
        wait_for_peers(flags, epoch, deadline, failure, rank, RANKS, LANES, 0)
        tl.store(counters + 3, 0)
        tl.store(epoch_word, epoch + 1)


@triton.jit(do_not_specialize=["rank"])
def _gather_matmul(
    g_desc, o_desc, c_desc, c, whole, scale_whole, scale, other_scale, bias,
    peer_slots, slot_bytes, scale_bytes,
    counters, epoch_word, deadline, failure,
    rows, words, whole_words, segment, whole_rows, size,
    X, Y, K, chunk,
    rank, RANKS: tl.constexpr, WAIT: tl.constexpr, G_LEFT: tl.constexpr,
    G_K_MAJOR: tl.constexpr, O_K_MAJOR: tl.constexpr,
    G_SCALE: tl.constexpr, O_SCALE: tl.constexpr, MOVE_SCALE: tl.constexpr, BIAS: tl.constexpr, TMA_STORE: tl.constexpr,
    BX: tl.constexpr, BY: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, COPIERS: tl.constexpr,
    UNIT: tl.constexpr, COPY_ROWS: tl.constexpr, COPY_WORDS: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Pull the peers' shards into G, and multiply G by the other operand O.

    WAIT: `GatherLayout.wait`, the kind of the gathered dim. rows: rows of a shard in its slot; words: 8-byte words of a
    row. segment: contiguous rows of a shard in G; whole_rows: rows of G per outer index, with padding; size: the same
    without padding. chunk: elements of a full chunk of the gathered dim, if it is contracted or the columns of G.
    """
    epoch = tl.load(epoch_word) - 1
    ready = counters + HEADER
    units = tl.cdiv(rows, UNIT)
    word_blocks = tl.cdiv(words, COPY_WORDS)
    by_source: tl.constexpr = (WAIT == 1) or (WAIT == 2)
    ticket = tl.atomic_add(counters, 1, sem="relaxed", scope="gpu")
    if ticket < COPIERS:
        row_blocks = tl.cdiv(rows, COPY_ROWS)
        parity = (epoch & 1).to(tl.int64) * slot_bytes
        copies = row_blocks * word_blocks * (RANKS - 1)
        t = tl.atomic_add(counters + 4, 1, sem="relaxed", scope="gpu")
        while t < copies:
            following = tl.atomic_add(
                counters + 4, 1, sem="relaxed", scope="gpu"
            )  # claimed before this copy's bytes have arrived
            source = (rank + 1 + t % (RANKS - 1)) % RANKS
            block = t // (RANKS - 1)
            row = (block // word_blocks) * COPY_ROWS + tl.arange(0, COPY_ROWS)
            word = (block % word_blocks) * COPY_WORDS + tl.arange(0, COPY_WORDS)
            inside = (row < rows)[:, None] & (word < words)[None, :]
            address = tl.load(peer_slots + source) + parity
            slot = tl.multiple_of(address.to(tl.pointer_type(tl.int64)), 16)
            value = tl.load(slot + row[:, None].to(tl.int64) * words + word[None, :], mask=inside)
            if (WAIT == 0) or (WAIT == 2):  # gathered along rows of G, in segments
                target = (row // segment) * whole_rows + source * segment + row % segment
                column = 0
            else:
                target = row
                column = source * words
            tl.store(whole + target[:, None].to(tl.int64) * whole_words + column + word[None, :], value, mask=inside)
            if MOVE_SCALE:  # noqa: SIM102  # MOVE_SCALE is a constant, the inner condition is not
                if block % word_blocks == 0:
                    floats = (address + scale_bytes).to(tl.pointer_type(tl.float32))
                    tl.store(scale_whole + target, tl.load(floats + row, mask=row < rows), mask=row < rows)
            tl.debug_barrier()
            if by_source:
                tl.atomic_add(ready + source, 1, sem="release", scope="gpu")
            else:
                unit = (block // word_blocks) * COPY_ROWS // UNIT
                tl.atomic_add(ready + source * units + unit, 1, sem="release", scope="gpu")
            t = following

    if WAIT == 0:
        per_segment = tl.cdiv(segment, BX)
        x_tiles = (rows // segment) * RANKS * per_segment
    elif WAIT == 1:
        per_segment = tl.cdiv(chunk, BX)
        x_tiles = RANKS * per_segment
    else:
        per_segment = 1
        x_tiles = tl.cdiv(X, BX)
    y_tiles = tl.cdiv(Y, BY)
    tiles = x_tiles * y_tiles
    own = x_tiles // RANKS
    all_of_source = tl.cdiv(rows, COPY_ROWS) * word_blocks

    tile = tl.atomic_add(counters + 1, 1, sem="relaxed", scope="gpu")
    while tile < tiles:
        following = tl.atomic_add(counters + 1, 1, sem="relaxed", scope="gpu")
        width = GROUP * y_tiles
        first = (tile // width) * GROUP
        in_group = min(x_tiles - first, GROUP)
        x = first + (tile % width) % in_group
        y0 = ((tile % width) // in_group) * BY

        if WAIT < 2:
            # This rank's tiles first, then a tile of each peer in turn, in the order in which rows arrive.
            if x < own:
                source = rank
                at = x
            else:
                source = (rank + 1 + (x - own) % (RANKS - 1)) % RANKS
                at = (x - own) // (RANKS - 1)
            outer = at // per_segment
            inner = (at % per_segment) * BX
            if WAIT == 0:
                x0 = outer * whole_rows + source * segment + inner  # first row in G
                cx0 = outer * size + source * segment + inner  # first row in the product
                left = min(segment, size - source * segment) - inner
            else:
                x0 = source * chunk + inner
                cx0 = x0
                left = min(chunk, X - source * chunk) - inner
            if source != rank:
                if WAIT == 0:
                    a = outer * segment + inner
                    b = outer * segment + min(inner + BX, segment) - 1
                    for unit in range(a // UNIT, b // UNIT + 1):
                        n = tl.cdiv(min(rows - unit * UNIT, UNIT), COPY_ROWS) * word_blocks
                        wait_for_count(ready + source * units + unit, n, epoch, deadline, failure)
                else:
                    wait_for_count(ready + source, all_of_source, epoch, deadline, failure)
        else:
            x0 = x * BX
            cx0 = x0
            left = X - x0

        acc = tl.zeros((BX, BY) if G_LEFT else (BY, BX), tl.float32)
        if WAIT < 2:
            for k in range(0, K, BK):
                if G_K_MAJOR:
                    g = g_desc.load([x0, k])
                else:
                    g = g_desc.load([k, x0]).T
                if O_K_MAJOR:
                    o = o_desc.load([y0, k])
                else:
                    o = o_desc.load([k, y0]).T
                if G_LEFT:
                    acc = add_product(acc, g, o.T, BK, FAST)
                else:
                    acc = add_product(acc, o, g.T, BK, FAST)
        else:
            for j in range(RANKS):
                source = (rank + j) % RANKS
                if j > 0:
                    if WAIT == 2:
                        wait_for_count(ready + source, all_of_source, epoch, deadline, failure)
                    else:
                        for unit in range(x0 // UNIT, (min(x0 + BX, X) - 1) // UNIT + 1):
                            n = tl.cdiv(min(rows - unit * UNIT, UNIT), COPY_ROWS) * word_blocks
                            wait_for_count(ready + source * units + unit, n, epoch, deadline, failure)
                for k in range(source * chunk, source * chunk + chunk, BK):
                    if G_K_MAJOR:
                        g = g_desc.load([x0, k])
                    else:
                        g = g_desc.load([k, x0]).T
                    if O_K_MAJOR:
                        o = o_desc.load([y0, k])
                    else:
                        o = o_desc.load([k, y0]).T
                    if G_LEFT:
                        acc = add_product(acc, g, o.T, BK, FAST)
                    else:
                        acc = add_product(acc, o, g.T, BK, FAST)

        xs = tl.arange(0, BX)
        ys = y0 + tl.arange(0, BY)
        if G_SCALE == 1:
            acc = acc * tl.load(scale)
        elif G_SCALE == 2:
            by_row = tl.load(scale_whole + x0 + xs, mask=xs < left)
            acc = acc * (by_row[:, None] if G_LEFT else by_row[None, :])
        if O_SCALE == 1:
            acc = acc * tl.load(other_scale)
        elif O_SCALE == 2:
            by_row = tl.load(other_scale + ys, mask=ys < Y)
            acc = acc * (by_row[None, :] if G_LEFT else by_row[:, None])
        if BIAS:
            if G_LEFT:
                acc = acc + tl.load(bias + ys, mask=ys < Y).to(tl.float32)[None, :]
            else:
                acc = acc + tl.load(bias + cx0 + xs, mask=xs < left).to(tl.float32)[None, :]
        out = acc.to(c.dtype.element_ty)
        if TMA_STORE:
            if G_LEFT:
                c_desc.store([cx0, y0], out)
            else:
                c_desc.store([y0, cx0], out)
        else:
            cx = (cx0 + xs).to(tl.int64)
            if G_LEFT:
                tl.store(c + cx[:, None] * Y + ys[None, :], out, mask=(xs < left)[:, None] & (ys < Y)[None, :])
            else:
                tl.store(
                    c + ys[:, None].to(tl.int64) * X + cx[None, :], out, mask=(ys < Y)[:, None] & (xs < left)[None, :]
                )
        tile = following

    # The last thread block resets the counters for the next operator.
    tl.debug_barrier()
    finished = tl.atomic_add(counters + 2, 1, sem="acq_rel", scope="gpu")
    if finished == tl.num_programs(0) - 1:
        words_used = RANKS if by_source else RANKS * units
        for i in range(tl.cdiv(words_used + HEADER, 1024)):
            at = i * 1024 + tl.arange(0, 1024)
            tl.store(counters + at, tl.zeros([1024], tl.int32), mask=at < words_used + HEADER)
