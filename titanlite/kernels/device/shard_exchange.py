"""FSDP's collectives without multiprocessors: copy engines push a rank's data into its peers' memory.

NCCL's kernels take multiprocessors from a concurrent matmul and slow it down; copies slow it down less
(benchmarks/results/runs.jsonl). Each collective has two barriers of the ranks, with copies in between. A barrier is a
kernel of one thread block that waits until all ranks have reached it:

    all-gather       barrier: all places may be written; push the shards to each rank; barrier: all have arrived
    reduce-scatter   barrier; push each rank's part of the gradient to it; barrier; add the parts, rank 0's first

A gradient is sent in autograd's dtype and added up in float32. The sum is the same as if it was sent in float32, and
bfloat16 takes half the bytes. Two runs give the same bits.

A rank reaches a barrier when the stream of the call does. Therefore

    a peer's memory is free        after the first barrier: the peer's stream waits for the memory's last reader. In an
                                   all-gather that is compute, which reads weights where they arrive
                                   (`parallel/placed_units.py`); the sum of a reduce-scatter runs on the stream itself
    peers' data has arrived        after the second barrier, which peers reach after their copies
"""

from collections.abc import Callable, Iterator
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
"""Elements of the sum that one thread block computes."""


@triton.jit(do_not_specialize=["rank"])
def _meet(
    flags, peer_flags, epoch_word, deadline, failure, rank,
    RANKS: tl.constexpr, LANES: tl.constexpr, OP: tl.constexpr,
):  # fmt: skip
    """Wait until every rank has reached this barrier. Runs as one thread block."""
    epoch = tl.load(epoch_word)
    signal_peers(peer_flags, epoch, rank, RANKS, LANES)
    wait_for_peers(flags, epoch, deadline, failure, rank, RANKS, LANES, OP)
    tl.store(epoch_word, epoch + 1)


@triton.jit
def _add_shards(arrived, own, out, size, width, RANK: tl.constexpr, RANKS: tl.constexpr, BLOCK: tl.constexpr):
    """Add up the ranks' parts in the order of ranks. arrived: [RANKS, size], rows `width` apart; this rank's part is
    read from `own`."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.load((own if RANK == 0 else arrived) + at, mask=at < size, other=0.0).to(tl.float32)
    for r in tl.static_range(1, RANKS):
        source = own if r == RANK else arrived + r * tl.cast(width, tl.int64)
        total += tl.load(source + at, mask=at < size, other=0.0).to(tl.float32)
    tl.store(out + at, total, mask=at < size)


class Exchange:
    """Memory that the ranks of a group push data into: the only slot of a channel."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel

    def buffer(self, size: int, dtype: torch.dtype) -> Tensor:
        """Return the memory, for `size` elements, equal on all ranks. It is valid until the next call.

        If the size is a new maximum, the call is a collective that waits for the GPU.
        """
        to, n_bytes = self.channel, size * dtype.itemsize
        to.make_room(n_bytes)
        assert to.slots is not None  # noqa: S101
        return to.slots[:n_bytes].view(dtype)

    def peers(self) -> list[int]:
        """Return all other ranks, in an order that begins with a different rank on every rank."""
        to = self.channel
        return [(to.rank + i) % to.ranks for i in range(1, to.ranks)]

    @contextmanager
    def between_meetings(self) -> Iterator[None]:
        """Run a barrier of all ranks before and after the `with` block, which writes to peers' memory."""
        to = self.channel
        met = to.rank, to.ranks, MAX_RANKS, to.operator
        meet = ready(
            _meet, to.number, 1, (),
            lambda: (to.flags, to.peer_flags, to.epoch, to.deadline, to.failure, *met), num_warps=1,
        )  # fmt: skip  # one warp: a second one could stop the GPU before the first has written its report
        to.order()
        meet()
        yield
        meet()


class AllGather(Exchange):
    """FSDP's all-gather, of weights in memory that stays.

    Args:
        group: name of the process group that shares parameters: 2 to `MAX_RANKS` ranks of one host, which construct
            this together.
    """

    def __init__(self, group: str) -> None:
        super().__init__(channel(group, FSDP_GATHER, n_slots=1))

    def memory(self, n_bytes: int) -> Tensor:
        """Return memory of this rank that peers write to, `n_bytes`, equal on all ranks. Call once; a collective."""
        return self.buffer(n_bytes, torch.uint8)

    def at_peers(self, own: Tensor) -> list[Tensor]:
        """Return what `own`, bytes of `memory`, is in each peer's memory."""
        to = self.channel
        assert to.slots is not None  # noqa: S101
        first = own.data_ptr() - to.slots.data_ptr()
        return [to.peers[peer][first : first + own.numel()] for peer in self.peers()]

    def __call__(self, copies: list[tuple[Tensor, list[Tensor]]]) -> None:
        """Copy memory of this rank to the same places `at_peers`."""
        with self.between_meetings():
            for n in range(self.channel.ranks - 1):
                for own, peers in copies:
                    peers[n].copy_(own)


class ReduceScatter(Exchange):
    """FSDP's reduce-scatter, with sums in float32. group: as for `AllGather`."""

    def __init__(self, group: str) -> None:
        super().__init__(channel(group, FSDP_REDUCE, n_slots=1))

    def __call__(self, pieces: list[Tensor], out: Tensor) -> None:
        """Sum `pieces` over the ranks, and store this rank's parts of the sums in `out`, one after the other.

        Args:
            pieces: [ranks, part] each, contiguous, of one floating dtype, of equal shapes on all ranks.
            out: [sum of parts], float32, contiguous.
        """
        to, sizes, dtype = self.channel, [x.shape[1] for x in pieces], pieces[0].dtype
        parts, width = [x.unbind() for x in pieces], sum(sizes)
        arrived = self.buffer(to.ranks * width, dtype)[:width].split(sizes)  # of rank 0
        own = [of_ranks[to.rank] for of_ranks in parts]
        adds = [self._adding(*tensors, width) for tensors in zip(arrived, own, out.split(sizes), strict=True)]
        places = self._at_peers(sizes, dtype)
        with self.between_meetings():
            for peer, there in zip(self.peers(), places, strict=True):
                for place, of_ranks in zip(there, parts, strict=True):
                    place.copy_(of_ranks[peer])
        for add in adds:
            add()

    def _adding(self, arrived: Tensor, own: Tensor, out: Tensor, width: int) -> Callable[[], None]:
        """Return what adds up the ranks' parts of a piece; those of rank 0 are `arrived`."""
        to, size = self.channel, len(out)
        return ready(
            _add_shards, (size, width, own.dtype, to.rank, to.ranks), cdiv(size, BLOCK), (arrived, own, out),
            lambda: (arrived, own, out, size, width, to.rank, to.ranks, BLOCK),
        )  # fmt: skip

    def _at_peers(self, sizes: list[int], dtype: torch.dtype) -> list[list[Tensor]]:
        """Return, of each peer, where this rank's part of each piece arrives. Made once for all sizes that occur."""
        to, key = self.channel, (dtype, *sizes)
        if key not in to.blocks:  # which forgets them when the memory grows
            first, n_bytes = to.rank * sum(sizes) * dtype.itemsize, sum(sizes) * dtype.itemsize
            rows = [to.peers[peer][first : first + n_bytes].view(dtype) for peer in self.peers()]
            to.blocks[key] = [list(row.split(sizes)) for row in rows]
        return to.blocks[key]
