"""The signals of `protocol` as the specialised kernels send them, in Gluon, and the end of these kernels.

The gather has further flags, one for each chunk of each shard: a rank sets a chunk's ready flag as soon as the chunk is
in the rank's slot.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from titanlite.kernels.device import protocol
from titanlite.kernels.device.channel import CHUNKS
from titanlite.kernels.device.channel import HEADER as COUNTERS_HEADER

barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier  # the second name is Triton's before 3.7
HEADER = gl.constexpr(COUNTERS_HEADER)
N_CHUNKS = gl.constexpr(CHUNKS)


# The instructions of `protocol`, compiled as Gluon.
_load_acquire = gluon.jit(protocol.load_acquire_gpu.fn)
_load_acquire_sys = gluon.jit(protocol.load_acquire_sys.fn)
_store_relaxed_sys = gluon.jit(protocol.store_relaxed_sys.fn)
_nanoseconds = gluon.jit(protocol.nanoseconds.fn)
_fence_sys = gluon.jit(protocol.fence_sys.fn)
_fence_async_proxy = gluon.jit(protocol.fence_async_proxy.fn)
_fail = gluon.jit(protocol.fail.fn)


@gluon.jit
def execute(asm: gl.constexpr):
    """Run a PTX instruction without operands."""
    gl.inline_asm_elementwise(asm, "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def wait_for_copies(counter, count, epoch, deadline, failure):
    """Wait until `counter` has reached `count` copies of this launch. TMA may then load the data that they stored."""
    seen = _load_acquire(counter)
    if seen < count:
        limit = gl.load(deadline)
        start = _nanoseconds()
        while seen < count:
            waited = _nanoseconds() - start
            if waited > limit:
                _fail(failure, epoch, seen * 0 - 1, waited, 0)
            seen = _load_acquire(counter)
    _fence_async_proxy()


@gluon.jit
def ready_chunks(flags, epoch, RANKS: gl.constexpr):
    """Return a mask of the chunks that are ready: bit number `source · N_CHUNKS + chunk`.

    A flag equals `epoch + 1` if its chunk is ready. Otherwise it is lower by any amount, since operators whose shards
    have fewer chunks leave it. It is never higher, since a peer begins the next operator only after a barrier.
    """
    lane = gl.arange(0, 32, layout=gl.BlockedLayout([1], [32], [1], [0]))
    known = gl.to_tensor(0).to(gl.int64)
    for first in gl.static_range(0, RANKS * N_CHUNKS, 32):
        inside = first + lane < RANKS * N_CHUNKS
        seen = _load_acquire_sys(flags + RANKS + first + gl.where(inside, lane, 0))
        there = inside & (seen == epoch + 1)
        bits = gl.sum(gl.where(there, gl.full([32], 1, gl.int32, lane.type.layout) << lane, 0), axis=0)
        known |= (bits.to(gl.int64) & 0xFFFFFFFF) << first
    return known


@gluon.jit
def wait_for_chunk(word, flags, epoch, deadline, failure, RANKS: gl.constexpr):
    """Wait until the chunk with bit number `word` is ready, and return `ready_chunks`, all of which TMA may load."""
    known = ready_chunks(flags, epoch, RANKS)
    if (known >> word) & 1 == 0:
        limit = gl.load(deadline)
        start = _nanoseconds()
        while (known >> word) & 1 == 0:
            waited = _nanoseconds() - start
            if waited > limit:
                _fail(failure, epoch, word // N_CHUNKS, waited, 0)
            known = ready_chunks(flags, epoch, RANKS)
    _fence_async_proxy()
    return known


@gluon.jit
def signal(peer_flags, word, epoch, RANKS: gl.constexpr):
    """Store `epoch + 1` in word number `word` of every rank's flags, after all writes that this block has observed."""
    _fence_sys()
    for r in gl.static_range(RANKS):
        _store_relaxed_sys(gl.load(peer_flags + r) + word * 4, epoch + 1)


@gluon.jit
def _wait_for_peers(flags, epoch, deadline, failure, rank, RANKS: gl.constexpr, CONSUMERS: gl.constexpr):
    """Wait until every rank has signalled operator number `epoch`. The warps of the first consumer call this."""
    lane = gl.arange(0, 32, layout=gl.BlockedLayout([1], [32], [8 // CONSUMERS], [0]))
    peer = gl.where(lane < RANKS, lane, rank)
    limit = gl.load(deadline)
    start = _nanoseconds()
    behind = _load_acquire_sys(flags + peer) - (epoch + 1)
    while gl.min(behind, axis=0) < 0:  # a difference, so that the count may wrap around
        waited = _nanoseconds() - start
        if waited > limit:
            _fail(failure, epoch, gl.max(gl.where(behind < 0, peer, 0), axis=0), waited, 1)
        behind = _load_acquire_sys(flags + peer) - (epoch + 1)
    barrier()


@gluon.jit
def leave_kernel(
    counters, used, epoch_word, epoch, flags, peer_flags, deadline, failure, rank,
    MEET: gl.constexpr, RANKS: gl.constexpr, CONSUMERS: gl.constexpr,
):  # fmt: skip
    """End a kernel: its last block resets `used` counters for the next operator. MEET: after a barrier of ranks."""
    barrier()
    finished = gl.atomic_add(counters + 2, 1, sem="acq_rel", scope="gpu")
    if finished == gl.num_programs(0) - 1:
        if MEET:
            signal(peer_flags, rank, epoch, RANKS)
            _wait_for_peers(flags, epoch, deadline, failure, rank, RANKS, CONSUMERS)
        layout: gl.constexpr = gl.BlockedLayout([1], [32], [8 // CONSUMERS], [0])
        for start in range(0, used, 256):
            at = start + gl.arange(0, 256, layout=layout)
            gl.store(counters + at, gl.zeros([256], gl.int32, layout), mask=at < used)
        gl.store(epoch_word, epoch + 1)
