"""Matmul → reduce-scatter for the common shapes: `specialised_matmul` that pushes tiles to the ranks that own them."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from titanlite.kernels.device.specialised_matmul import (
    CONSUMER_REGISTERS,
    WORKER_REGISTERS,
    consume,
    consume_in_steps,
    first_of,
    shared_buffers,
)
from titanlite.kernels.device.specialised_producer import announce, announce_end, load_operands, tile_position
from titanlite.kernels.device.specialised_protocol import HEADER, leave_kernel


@gluon.jit
def _produce_pushed(
    given,
    RANKS: gl.constexpr, GROUP: gl.constexpr, A_K_MAJOR: gl.constexpr, B_K_MAJOR: gl.constexpr,
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    a_desc, b_desc, rest_desc, a_bufs, b_bufs, rest_bufs, tiles, ready, empty, counters = given[:10]
    rank, staged_tiles, per_segment, y_tiles, segment, steps = given[10:]
    x_tiles = staged_tiles * RANKS
    it = 0
    claimed = gl.atomic_add(counters + 1, 1, sem="relaxed", scope="gpu")
    while claimed < x_tiles * y_tiles:
        following = gl.atomic_add(counters + 1, 1, sem="relaxed", scope="gpu")
        x, y = tile_position(claimed, x_tiles, y_tiles, GROUP)
        owner = (x + rank + 1) % RANKS  # all ranks in turn, this rank last
        staged = x // RANKS
        row = (staged // per_segment * RANKS + owner) * segment + staged % per_segment * BM
        announce((owner * staged_tiles + staged) * y_tiles + y, tiles, empty, it, STAGES)
        it = load_operands(
            a_desc, b_desc, rest_desc, a_bufs, b_bufs, rest_bufs, ready, empty, it, steps, row, y * BN,
            A_K_MAJOR, B_K_MAJOR, BK, STAGES,
        )  # fmt: skip
        claimed = following
    announce_end(tiles, ready, empty, it, STAGES)


@gluon.jit(do_not_specialize=["rank"])
def matmul_push(
    a_desc, b_desc, scale, other_scale, d0, d1, d2, d3, d4, d5, d6, d7, rest_desc,
    counters, flags, peer_flags, epoch_word, deadline, failure,
    slot_rows, staged_rows, segment, N, K, rank,
    RANKS: gl.constexpr, GROUP: gl.constexpr, OF_ROWS: gl.constexpr, OF_COLUMNS: gl.constexpr, FAST: gl.constexpr,
    A_K_MAJOR: gl.constexpr, B_K_MAJOR: gl.constexpr,
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr, CONSUMERS: gl.constexpr,
):  # fmt: skip
    """Compute `A @ B`, and push each tile to the rank that owns it. An owner's rows must divide into tiles.

    d0 … d7: descriptors of all ranks' slots. rest_desc: B again, in blocks of the columns beyond 128 of a tile of 192.
    Other arguments are those of `general_push._matmul_push` and `specialised_gather.gather_matmul`.
    """
    epoch = gl.load(epoch_word)
    a_bufs, b_bufs, rest_bufs, c_bufs, tiles, ready, empty = shared_buffers(
        a_desc, b_desc, rest_desc, d0, A_K_MAJOR, B_K_MAJOR, BM, BN, BK, STAGES, CONSUMERS
    )
    staged_tiles = staged_rows // BM
    y_tiles = gl.cdiv(N, BN)
    steps = gl.cdiv(K, BK)
    consumer = (
        first_of(d0, d1, d2, d3, d4, d5, d6, d7, RANKS), None, scale, other_scale,
        a_bufs, b_bufs, rest_bufs, c_bufs, tiles, ready, empty,
        (epoch & 1) * slot_rows + rank * staged_rows, staged_tiles, y_tiles, steps, N, segment, segment // BM,
    )  # fmt: skip
    producer = (
        a_desc, b_desc, rest_desc, a_bufs, b_bufs, rest_bufs, tiles, ready, empty, counters,
        rank, staged_tiles, segment // BM, y_tiles, segment, steps,
    )  # fmt: skip
    if CONSUMERS == 1:
        gl.warp_specialize([
            (consume, (consumer, False, OF_ROWS, OF_COLUMNS, RANKS, A_K_MAJOR, B_K_MAJOR, BM, BN, STAGES, 1, 0)),
            (_produce_pushed, (producer, RANKS, GROUP, A_K_MAJOR, B_K_MAJOR, BM, BN, BK, STAGES)),
        ], [1], [WORKER_REGISTERS])  # fmt: skip
    elif FAST:
        gl.warp_specialize([
            (consume, (consumer, False, OF_ROWS, OF_COLUMNS, RANKS, A_K_MAJOR, B_K_MAJOR, BM, BN, STAGES, 2, 0)),
            (consume, (consumer, False, OF_ROWS, OF_COLUMNS, RANKS, A_K_MAJOR, B_K_MAJOR, BM, BN, STAGES, 2, 1)),
            (_produce_pushed, (producer, RANKS, GROUP, A_K_MAJOR, B_K_MAJOR, BM, BN, BK, STAGES)),
        ], [4, 1], [CONSUMER_REGISTERS, WORKER_REGISTERS])  # fmt: skip
    else:
        gl.warp_specialize([
            (consume_in_steps, (consumer, False, OF_ROWS, OF_COLUMNS, RANKS, BM, BN, STAGES, 0)),
            (consume_in_steps, (consumer, False, OF_ROWS, OF_COLUMNS, RANKS, BM, BN, STAGES, 1)),
            (_produce_pushed, (producer, RANKS, GROUP, A_K_MAJOR, B_K_MAJOR, BM, BN, BK, STAGES)),
        ], [4, 1], [CONSUMER_REGISTERS, WORKER_REGISTERS])  # fmt: skip
    leave_kernel(
        counters, HEADER, epoch_word, epoch, flags, peer_flags, deadline, failure, rank, True, RANKS, CONSUMERS
    )
