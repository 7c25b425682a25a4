"""The producer warp of the specialised kernels, in Gluon: it announces tiles to the consumers and loads operands."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from titanlite.kernels.device.specialised_protocol import barrier


@gluon.jit
def _write_word(buffer, value):
    """Write a word of shared memory. One warp calls this."""
    buffer.store(gl.full([1], value, gl.int32, gl.BlockedLayout([1], [32], [1], [0])))
    barrier()


@gluon.jit
def announce(tile, tiles, empty, it, STAGES: gl.constexpr):
    """Send the consumers the number of the tile whose operands are loaded next, from step `it` on."""
    mbarrier.wait(empty.index(it % STAGES), ((it // STAGES) & 1) ^ 1)
    _write_word(tiles.index(it % STAGES), tile)


@gluon.jit
def load_operands(
    a_desc, b_desc, rest_desc, a_bufs, b_bufs, rest_bufs, ready, empty, it, steps, m0, n0,
    A_K_MAJOR: gl.constexpr, B_K_MAJOR: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Load the operands of the tile at row m0, column n0, step by step as buffers become free. Return the next step."""
    n_bytes: gl.constexpr = a_desc.block_type.nbytes + b_desc.block_type.nbytes
    for k in range(steps):
        slot = it % STAGES
        mbarrier.wait(empty.index(slot), ((it // STAGES) & 1) ^ 1)
        if rest_desc is None:
            mbarrier.expect(ready.index(slot), n_bytes)
        else:
            mbarrier.expect(ready.index(slot), n_bytes + rest_desc.block_type.nbytes)
            tma.async_copy_global_to_shared(
                rest_desc, [n0 + b_desc.block_type.shape[0], k * BK], ready.index(slot), rest_bufs.index(slot)
            )
        if A_K_MAJOR:
            tma.async_copy_global_to_shared(a_desc, [m0, k * BK], ready.index(slot), a_bufs.index(slot))
        else:
            tma.async_copy_global_to_shared(a_desc, [k * BK, m0], ready.index(slot), a_bufs.index(slot))
        if B_K_MAJOR:
            tma.async_copy_global_to_shared(b_desc, [n0, k * BK], ready.index(slot), b_bufs.index(slot))
        else:
            tma.async_copy_global_to_shared(b_desc, [k * BK, n0], ready.index(slot), b_bufs.index(slot))
        it += 1
    return it


@gluon.jit
def tile_position(number, x_tiles, y_tiles, GROUP: gl.constexpr):
    """Return the block of rows and the block of columns of tile `number`.

    Tiles of GROUP blocks of rows are numbered column by column, so that concurrent tiles read few operands.
    """
    width = GROUP * y_tiles
    first = (number // width) * GROUP
    in_group = min(x_tiles - first, GROUP)
    return first + (number % width) % in_group, (number % width) // in_group


@gluon.jit
def announce_end(tiles, ready, empty, it, STAGES: gl.constexpr):
    """Announce to the consumers that no tile is left."""
    announce(-1, tiles, empty, it, STAGES)
    mbarrier.arrive(ready.index(it % STAGES), count=1)
