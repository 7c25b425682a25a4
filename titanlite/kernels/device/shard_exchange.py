"""FSDP's collectives without multiprocessors: copy engines push what a rank has into its peers' memory.

NCCL's kernels take multiprocessors from a concurrent matmul and slow it down; copies slow it down less
(benchmarks/results/runs.jsonl). Both collectives are two meetings of the ranks, a thread block each, with copies
between them:

    all-gather       meet: all buffers may be written; push the own shard to each rank; meet: all have arrived
    reduce-scatter   meet; push to each rank its part of the own gradient; meet; add the parts, rank 0's first

A gradient is sent in autograd's dtype and added up in float32: the same sum as of float32 gradients, for half the bytes
if it is bfloat16. Two runs give the same bits.

A rank reaches a meeting when the stream of the call does:

    a peer's buffer is free        after the first meeting: its stream waits for the buffer's last reader. FSDP makes it
                                   wait for the copy out of the gather before the last, hence two slots
                                   (`tests/ranks/parallel/test_copy_engines.py`); the sum is on the stream itself
    what peers pushed is there     after the second meeting, which is behind their copies

Two slots are enough as long as at most one gather is ahead of the one that is yet to be copied out, as in FSDP. Experts
that `parallel/fsdp.py` gathers ahead of their block have memory of their own.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import triton
import triton.language as tl
from torch import Tensor

from titanlite.kernels.device.channel import Channel, channel
from titanlite.kernels.device.launch import cdiv, ready
from titanlite.kernels.device.protocol import signal_peers, wait_for_peers
from titanlite.kernels.products import FSDP_GATHER, FSDP_REDUCE, MAX_RANKS

BLOCK = 1024
"""Elements of a thread block of the sum."""


@triton.jit(do_not_specialize=["rank"])
def _meet(
    flags, peer_flags, epoch_word, deadline, failure, rank,
    RANKS: tl.constexpr, LANES: tl.constexpr, OP: tl.constexpr,
):  # fmt: skip
    """Wait until every rank has come here: one thread block."""
    epoch = tl.load(epoch_word)
    signal_peers(peer_flags, epoch, rank, RANKS, LANES)
    wait_for_peers(flags, epoch, deadline, failure, rank, RANKS, LANES, OP)
    tl.store(epoch_word, epoch + 1)


@triton.jit
def _add_shards(arrived, own, out, size, RANK: tl.constexpr, RANKS: tl.constexpr, BLOCK: tl.constexpr):
    """Add the ranks' parts in their order. `arrived`: [RANKS, size], except this rank's part, which is `own`."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.load((own if RANK == 0 else arrived) + at, mask=at < size, other=0.0).to(tl.float32)
    for r in tl.static_range(1, RANKS):
        source = own if r == RANK else arrived + r * tl.cast(size, tl.int64)
        total += tl.load(source + at, mask=at < size, other=0.0).to(tl.float32)
    tl.store(out + at, total, mask=at < size)


class Exchange:
    """Memory that the ranks of a group push into: the channel's slots, taken in turn."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.turn = 0

    def buffer(self, size: int, dtype: torch.dtype) -> Tensor:
        """Return memory of the next slot, valid until the slot's next turn.

        Args:
            size: elements, equal on all ranks. A new maximum makes it a collective that waits for the GPU.
            dtype: of the elements.
        """
        to, n_bytes = self.channel, size * dtype.itemsize
        to.make_room(n_bytes)
        self.turn = (self.turn + 1) % to.n_slots
        assert to.slots is not None  # noqa: S101
        first = self.turn * to.capacity
        return to.slots[first : first + n_bytes].view(dtype)

    def push(self, parts: tuple[Tensor, ...]) -> None:
        """Push each other rank's part into its buffer; parts have equal sizes."""
        to = self.channel
        n_bytes = parts[0].nbytes
        first = self.turn * to.capacity + to.rank * n_bytes
        with self.between_meetings():
            for peer in self.peers():
                to.peers[peer][first : first + n_bytes].copy_(parts[peer].view(torch.uint8))

    def peers(self) -> list[int]:
        """Return all other ranks; every rank begins with a different one."""
        to = self.channel
        return [(to.rank + i) % to.ranks for i in range(1, to.ranks)]

    @contextmanager
    def between_meetings(self) -> Iterator[None]:
        """Let ranks meet before any writes to a peer's memory, and again when all have written."""
        to = self.channel
        met = to.rank, to.ranks, MAX_RANKS, to.operator
        meet = ready(
            _meet, to.number, 1, (),
            lambda: (to.flags, to.peer_flags, to.epoch, to.deadline, to.failure, *met), num_warps=1,
        )  # fmt: skip  # one warp: a second that gave up first would take down what the first has to say
        to.order()
        meet()
        yield
        meet()


class AllGather(Exchange):
    """FSDP's all-gather.

    Args:
        group: name of the group that shares parameters, 2 to `MAX_RANKS` ranks of one host. Construction is a
            collective.
    """

    def __init__(self, group: str) -> None:
        super().__init__(channel(group, FSDP_GATHER, n_slots=2))

    def __call__(self, shard: Tensor) -> None:
        """Push a shard, this rank's [size / ranks] of the last `buffer`, to every rank."""
        self.push((shard,) * self.channel.ranks)


class ReduceScatter(Exchange):
    """FSDP's reduce-scatter, with sums in float32. Arguments as of `AllGather`."""

    def __init__(self, group: str) -> None:
        super().__init__(channel(group, FSDP_REDUCE, n_slots=1))

    def prepare(self, size: int, dtype: torch.dtype) -> None:
        """Make room for `x` of a size and dtype, and load kernels, before activations fill the memory; a collective."""
        x = torch.zeros(size, dtype=dtype, device=self.channel.device)
        self(x, torch.empty(size // self.channel.ranks, device=x.device))

    def __call__(self, x: Tensor, out: Tensor) -> None:
        """Sum over the ranks, and keep this rank's part.

        Args:
            x: [ranks · part], floating.
            out: [part], float32, contiguous.
        """
        to, size = self.channel, out.numel()
        arrived, parts = self.buffer(x.numel(), x.dtype), x.chunk(to.ranks)
        own = parts[to.rank]
        add = ready(
            _add_shards, (size, x.dtype, to.rank, to.ranks), cdiv(size, BLOCK), (arrived, own, out),
            lambda: (arrived, own, out, size, to.rank, to.ranks, BLOCK),
        )  # fmt: skip
        self.push(parts)
        add()
