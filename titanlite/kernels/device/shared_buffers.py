"""Buffers in shared memory between a producer warp that loads and two consumer warpgroups that compute 64 rows each.

The producer sends numbers to the consumers in single words, which every thread reads itself. The compiler would treat a
loop whose end comes from a reduction across threads as divergent.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from titanlite.kernels.device.specialised_protocol import barrier

HALF = gl.constexpr(64)
CONSUMER_REGISTERS = gl.constexpr(240)
PRODUCER_REGISTERS = gl.constexpr(24)


@gluon.jit
def _put_word(buffer, value):
    buffer.store(gl.full([1], value, gl.int32, gl.BlockedLayout([1], [32], [1], [0])))


@gluon.jit
def write_words(buffer, at, values):
    """Write `values` to the words of shared memory from index `at` on. One warp calls this."""
    for i in gl.static_range(len(values)):
        _put_word(buffer.index(at + i), values[i])
    barrier()


@gluon.jit
def read_word(buffer, at):
    """Return the word of shared memory at index `at`. Four warps call this together."""
    return gl.max(buffer.index(at).load(gl.BlockedLayout([1], [32], [4], [0])), axis=0)


@gluon.constexpr_function
def stacked(n, desc):
    """Return the shape of n buffers, each for one block of a TMA descriptor."""
    return [n, *desc.block_type.shape]


@gluon.jit
def allocate_words(N: gl.constexpr):
    """Allocate N words of 32 bits in shared memory."""
    return gl.allocate_shared_memory(gl.int32, [N, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def allocate_barriers(N: gl.constexpr, CONSUMERS: gl.constexpr):
    """Allocate two barriers for each of N buffers: `ready` (it is filled) and `empty` (all CONSUMERS have read it)."""
    ready = gl.allocate_shared_memory(gl.int64, [N, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [N, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(N):
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(empty.index(i), count=CONSUMERS)
    return ready, empty


@gluon.jit
def await_ready(ready, it, N: gl.constexpr):
    """Wait until the buffer of step `it`, one of N used in turn, has been filled."""
    mbarrier.wait(ready.index(it % N), (it // N) & 1)


@gluon.jit
def await_empty(empty, it, N: gl.constexpr):
    """Wait until the buffer of step `it`, one of N used in turn, may be filled again."""
    mbarrier.wait(empty.index(it % N), ((it // N) & 1) ^ 1)
