"""All-gather → matmul for the common shapes: `specialised_matmul` with a third role, a warp that copies.

The copying warp (`specialised_copy`) copies this rank's shard to its slot, and all shards into the gathered tensor G.
The producer waits only for the rows of the tile that it loads.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from titanlite.kernels.device.specialised_copy import copy_shards
from titanlite.kernels.device.specialised_matmul import (
    CONSUMER_REGISTERS,
    WORKER_REGISTERS,
    consume,
    consume_in_steps,
    first_of,
    shared_buffers,
)
from titanlite.kernels.device.specialised_producer import announce, announce_end, load_operands, tile_position
from titanlite.kernels.device.specialised_protocol import HEADER, leave_kernel, wait_for_copies


@gluon.jit
def _produce_gathered(
    given,
    RANKS: gl.constexpr, GROUP: gl.constexpr, B_K_MAJOR: gl.constexpr,
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    s_desc, g_desc, o_desc, rest_desc, a_bufs, b_bufs, rest_bufs, tiles, ready, empty = given[:10]
    counters, epoch, deadline, failure, rank, segments, per_segment, y_tiles, segment, steps, count = given[10:]
    units = segments * per_segment
    x_tiles = units * RANKS
    it = 0
    claimed = gl.atomic_add(counters + 1, 1, sem="relaxed", scope="gpu")
    while claimed < x_tiles * y_tiles:
        following = gl.atomic_add(counters + 1, 1, sem="relaxed", scope="gpu")
        x, y = tile_position(claimed, x_tiles, y_tiles, GROUP)
        # This rank's tiles first, then a tile of each peer in turn, in the order in which rows arrive.
        theirs = x - units
        source = rank
        unit = x
        if theirs >= 0:
            source = (rank + 1 + theirs % (RANKS - 1)) % RANKS
            unit = theirs // (RANKS - 1)
        row = (unit // per_segment * RANKS + source) * segment + unit % per_segment * BM
        if theirs >= 0:
            wait_for_copies(counters + HEADER + source * units + unit, count, epoch, deadline, failure)
        announce(row // BM * y_tiles + y, tiles, empty, it, STAGES)
        if theirs >= 0:
            it = load_operands(
                g_desc, o_desc, rest_desc, a_bufs, b_bufs, rest_bufs, ready, empty, it, steps, row, y * BN,
                True, B_K_MAJOR, BK, STAGES,
            )  # fmt: skip
        else:
            it = load_operands(
                s_desc, o_desc, rest_desc, a_bufs, b_bufs, rest_bufs, ready, empty, it, steps, unit * BM, y * BN,
                True, B_K_MAJOR, BK, STAGES,
            )  # fmt: skip
        claimed = following
    announce_end(tiles, ready, empty, it, STAGES)


@gluon.jit(do_not_specialize=["rank"])
def gather_matmul(
    s_desc, g_desc, o_desc, c_desc, bias, scale, other_scale,
    shard_desc, w_desc, p0, p1, p2, p3, p4, p5, p6, p7, rest_desc,
    counters, flags, peer_flags, epoch_word, deadline, failure,
    slot_rows, rows, segment, N, K, rank,
    RANKS: gl.constexpr, GROUP: gl.constexpr, BIAS: gl.constexpr, OF_ROWS: gl.constexpr, OF_COLUMNS: gl.constexpr,
    FAST: gl.constexpr, B_K_MAJOR: gl.constexpr,
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr,
    CM: gl.constexpr, CN: gl.constexpr, CONSUMERS: gl.constexpr,
):  # fmt: skip
    """Gather G along its rows and compute `G @ O`. A shard's rows must divide into tiles.

    s_desc, g_desc, o_desc, c_desc: the shard, G, O and the product, in blocks of the matmul. shard_desc, w_desc,
    p0 … p7: the shard, G and all ranks' slots, in blocks of copies. rest_desc: O again, in blocks of the columns beyond
    128 of a tile of 192. OF_ROWS, OF_COLUMNS: scales of G's rows and O's columns: 0: none, 1: one number, 2: one for
    each. FAST: add all products in the tensor cores.
    """
    epoch = gl.load(epoch_word)
    a_bufs, b_bufs, rest_bufs, c_bufs, tiles, ready, empty = shared_buffers(
        g_desc, o_desc, rest_desc, c_desc, True, B_K_MAJOR, BM, BN, BK, STAGES, CONSUMERS
    )
    ring = gl.allocate_shared_memory(w_desc.dtype, [4, CM, CN], w_desc.layout)
    bars = gl.allocate_shared_memory(gl.int64, [4, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(4):
        mbarrier.init(bars.index(i), count=1)
    col_blocks = gl.cdiv(K, CN)
    segments = rows // segment
    per_segment = segment // BM
    y_tiles = gl.cdiv(N, BN)
    steps = gl.cdiv(K, BK)
    consumer = (
        (c_desc,), bias, scale, other_scale, a_bufs, b_bufs, rest_bufs, c_bufs, tiles, ready, empty,
        0, RANKS * (rows // BM), y_tiles, steps, N, segment, per_segment,
    )  # fmt: skip
    producer = (
        s_desc, g_desc, o_desc, rest_desc, a_bufs, b_bufs, rest_bufs, tiles, ready, empty,
        counters, epoch, deadline, failure,
        rank, segments, per_segment, y_tiles, segment, steps, (BM // CM) * col_blocks,
    )  # fmt: skip
    copier = (
        shard_desc, first_of(p0, p1, p2, p3, p4, p5, p6, p7, RANKS), w_desc, ring, bars,
        counters, flags, peer_flags, epoch, deadline, failure,
        (epoch & 1) * slot_rows, rank, rows, segment, col_blocks,
    )  # fmt: skip
    if CONSUMERS == 1:
        gl.warp_specialize([
            (consume, (consumer, BIAS, OF_ROWS, OF_COLUMNS, 1, True, B_K_MAJOR, BM, BN, STAGES, 1, 0)),
            (_produce_gathered, (producer, RANKS, GROUP, B_K_MAJOR, BM, BN, BK, STAGES)),
            (copy_shards, (copier, RANKS, BM, CM, CN)),
        ], [1, 1], [WORKER_REGISTERS, WORKER_REGISTERS])  # fmt: skip
    elif FAST:
        gl.warp_specialize([
            (consume, (consumer, BIAS, OF_ROWS, OF_COLUMNS, 1, True, B_K_MAJOR, BM, BN, STAGES, 2, 0)),
            (consume, (consumer, BIAS, OF_ROWS, OF_COLUMNS, 1, True, B_K_MAJOR, BM, BN, STAGES, 2, 1)),
            (_produce_gathered, (producer, RANKS, GROUP, B_K_MAJOR, BM, BN, BK, STAGES)),
            (copy_shards, (copier, RANKS, BM, CM, CN)),
        ], [4, 1, 1], [CONSUMER_REGISTERS, WORKER_REGISTERS, WORKER_REGISTERS])  # fmt: skip
    else:
        gl.warp_specialize([
            (consume_in_steps, (consumer, BIAS, OF_ROWS, OF_COLUMNS, 1, BM, BN, STAGES, 0)),
            (consume_in_steps, (consumer, BIAS, OF_ROWS, OF_COLUMNS, 1, BM, BN, STAGES, 1)),
            (_produce_gathered, (producer, RANKS, GROUP, B_K_MAJOR, BM, BN, BK, STAGES)),
            (copy_shards, (copier, RANKS, BM, CM, CN)),
        ], [4, 1, 1], [CONSUMER_REGISTERS, WORKER_REGISTERS, WORKER_REGISTERS])  # fmt: skip
    used = HEADER + RANKS * (rows // BM)
    leave_kernel(counters, used, epoch_word, epoch, flags, peer_flags, deadline, failure, rank, False, RANKS, CONSUMERS)
