"""Share memory among the ranks of a group, for their collective matmuls or for one of FSDP's collectives.

Each group has one channel for each use: flags, slots of data, and counters. The slots grow when an operator needs more
room. Growing is a collective, like the operator itself, and impossible while a CUDA graph is captured.

The collective matmuls of a process run in the order in which they are issued, on any group and stream. Otherwise two of
them could fill one GPU in one order and another GPU in the other order, and wait for each other. The calls of each of
FSDP's collectives are ordered, too, since one call would take another's signals for its own. Within a capture, edges of
the graph keep the order. The caller has two duties. If it neglects them, results are wrong, or kernels wait: in a run
until the watchdog ends it, elsewhere until their deadline.

    all ranks issue operators in one order      each rank therefore issues them from one thread at a time
    a graph's replay overlaps no operator       its stream first waits for the stream of the last operator or replay,
    and no other replay                         and the next one's stream waits for it; replays are not ordered here
"""

import ctypes
import os
from dataclasses import dataclass, field
from functools import cache
from itertools import count

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory
from torch import Tensor

from titanlite.kernels.collectives import process_group_of
from titanlite.kernels.device.rendezvous import Rendezvous

CHUNKS = 8
"""Number of chunks of a shard. Each has a ready flag at the peers, set as soon as the chunk is in the rank's slot."""
HEADER = 8 + CHUNKS
"""Number of words at the start of a channel's counters: thread blocks begun, tiles claimed, thread blocks ended, thread
blocks of the first kernel ended, copies claimed, copies of the own shard claimed. The last CHUNKS of these words count
the copies of each chunk that have been written."""
COUNTERS = HEADER + 8192
"""Number of all counters: the header, then one for each block of rows that arrives."""

OPERATORS = (
    "all_gather_matmul",
    "matmul_reduce_scatter",
    "FSDP's all-gather",
    "FSDP's reduce-scatter",
    "exchange with experts",
)
"""Names of operators, by the number that a kernel writes in its report of a failure."""

_DEADLINE_S = 600.0


class PeerError(RuntimeError):
    """A kernel of this rank waited for another rank until the deadline."""


@dataclass
class Channel:
    """The memory that the ranks of a group share for one kind of operator, and the state of their signals."""

    name: str  # of the process group
    process_group: dist.ProcessGroup
    rank: int
    ranks: int  # number of ranks, 2 to 8
    device: torch.device
    operator: int | None = None  # FSDP_GATHER, FSDP_REDUCE or EXPERTS; None for collective matmuls
    n_slots: int = 2  # number of calls whose data `slots` holds at once
    number: int = field(init=False)  # index among all channels of this process
    flags: Tensor = field(init=False)  # [ranks · (1 + CHUNKS)] int32: one word of each rank, then ready flags of chunks
    peer_flags: Tensor = field(init=False)  # [ranks] int64, addresses of all ranks' flags
    counters: Tensor = field(init=False)  # [COUNTERS] int32; zero between operators
    epoch: Tensor = field(init=False)  # [1] int32, number of operators that have ended
    deadline: Tensor = field(init=False)  # [1] int64, longest wait of a kernel in nanoseconds
    failure: Tensor = field(init=False)  # [4] int64 in host memory, report of a kernel that gave up waiting
    slots: Tensor | None = None  # [n_slots · capacity] bytes, symmetric
    peer_slots: Tensor | None = None  # [ranks] int64, addresses of all ranks' slots
    peers: list[Tensor] = field(default_factory=list)  # all ranks' slots, as bytes
    capacity: int = 0  # bytes of a slot
    blocks: dict[object, list] = field(default_factory=dict)  # views of the peers' slots, by shape
    _rendezvous: Rendezvous = field(init=False)
    _kept: list[tuple[object, ...]] = field(default_factory=list)  # outgrown slots that captured graphs may still use

    def __post_init__(self) -> None:
        os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")  # no kernel here uses multicast
        self.number = next(_numbers)
        self.flags = symmetric_memory.empty(self.ranks * (1 + CHUNKS), dtype=torch.int32, device=self.device)
        self._rendezvous = Rendezvous(self.process_group, f"{self.operator}")
        handle = self._rendezvous(self.flags)
        self.flags.zero_()
        self.peer_flags = torch.tensor(handle.buffer_ptrs, dtype=torch.int64, device=self.device)
        self.counters = torch.zeros(COUNTERS, dtype=torch.int32, device=self.device)
        self.epoch = torch.zeros(1, dtype=torch.int32, device=self.device)
        self.deadline = torch.tensor([int(_DEADLINE_S * 1e9)], dtype=torch.int64, device=self.device)
        self.failure = torch.zeros(4, dtype=torch.int64, pin_memory=True)
        torch.cuda.synchronize(self.device)
        dist.barrier(self.process_group)

    def begin(self, n_bytes: int) -> int:
        """Order an operator after the process's last one, make room for its data, and return the bytes of a slot.

        Args:
            n_bytes: per slot, equal on all ranks.
        """
        self.order()
        self.make_room(n_bytes)
        return self.capacity

    def order(self) -> None:
        """Make the current stream wait for the last operator that must not overlap with the next.

        Raises:
            RuntimeError: that operator is being captured, so that nothing outside of the capture can wait for it.
        """
        stream = torch._C._cuda_getCurrentRawStream(self.device.index)
        capture = _capture(stream) if torch.cuda.is_current_stream_capturing() else 0
        key = capture, None if self.operator is None else self.number
        last = _last.get(key)
        if last is not None and last.cuda_stream == stream:
            return
        current = torch.cuda.current_stream(self.device)
        if last is not None:
            if _capture(last.cuda_stream) != capture:
                raise RuntimeError(
                    f"group {self.name}: an operator outside of CUDA-graph capture comes behind one on a stream that "
                    "is being captured\n"
                    "  want: operators outside once the capture has ended, or a capture on a stream of its own\n"
                    "  fix:  with torch.cuda.graph(graph, stream=torch.cuda.Stream())"
                )
            current.wait_stream(last)
        elif capture:  # the first operator of a capture: forget captures that have ended
            for of, on in list(_last.items()):
                if of[0] and _capture(on.cuda_stream) != of[0]:
                    del _last[of]
        _last[key] = current

    def make_room(self, n_bytes: int) -> None:
        """Make slots of at least `n_bytes`, equal on all ranks. While a graph is captured, keep the slots for it, and
        raise RuntimeError if they would have to grow."""
        if torch.cuda.is_current_stream_capturing():
            if n_bytes > self.capacity:
                raise RuntimeError(
                    f"group {self.name}: an operator needs {n_bytes} bytes of communication buffer, there are "
                    f"{self.capacity}, and they cannot grow during CUDA-graph capture; run it once before"
                )
            if not self._kept or self._kept[-1][0] is not self.slots:
                self._kept.append((self.slots, self.peers, self.peer_slots))
        elif n_bytes > self.capacity:
            self.grow(n_bytes)

    def grow(self, n_bytes: int) -> None:
        """Replace the slots by larger ones, after everything that the GPU runs has ended. A collective."""
        torch.cuda.synchronize(self.device)  # no kernel may still write to the old slots
        dist.barrier(self.process_group)
        self.peers, self.peer_slots, self.slots = [], None, None
        self.blocks.clear()
        self.capacity = -(-n_bytes // 2**20) * 2**20
        torch.cuda.empty_cache()  # torch's allocator may hold unused memory, which symmetric memory cannot use
        self.slots = symmetric_memory.empty(self.n_slots * self.capacity, dtype=torch.uint8, device=self.device)
        handle = self._rendezvous(self.slots)
        self.peers = [handle.get_buffer(r, (self.n_slots * self.capacity,), torch.uint8) for r in range(self.ranks)]
        self.peer_slots = torch.tensor(handle.buffer_ptrs, dtype=torch.int64, device=self.device)
        torch.cuda.synchronize(self.device)
        dist.barrier(self.process_group)


_channels: dict[tuple[str, int | None], Channel] = {}
_numbers = count()
_last: dict[tuple[int, int | None], torch.cuda.Stream] = {}
"""The stream of the last operator, by capture (0: none) and number of the channel (None: all collective matmuls)."""


def _capture(stream: int) -> int:
    """Return the id of the CUDA-graph capture that a stream is part of, unique in this process; 0 if there is none."""
    status, number = ctypes.c_int(), ctypes.c_uint64()
    args = ctypes.c_void_p(stream), ctypes.byref(status), ctypes.byref(number), None, None, None
    error = _driver().cuStreamGetCaptureInfo_v2(*args)
    if error:
        raise RuntimeError(f"cuStreamGetCaptureInfo ended with CUDA's error {error}")
    return number.value if status.value else 0


@cache
def _driver() -> ctypes.CDLL:
    """Return CUDA's driver library, which identifies captures. Torch cannot."""
    return ctypes.CDLL("libcuda.so.1")


def channel(group: str, operator: int | None = None, n_slots: int = 2) -> Channel:
    """Return a process group's channel for one kind of operator, as in `Channel`. The first call is a collective."""
    process_group = process_group_of(group)
    found = _channels.get((group, operator))
    if found is None or found.process_group is not process_group:  # a new group may have the name of a destroyed one
        device, ranks = torch.device("cuda", torch.cuda.current_device()), (process_group.rank(), process_group.size())
        found = Channel(group, process_group, *ranks, device, operator, n_slots)
        _channels[group, operator] = found
    return found


def set_deadline(seconds: float) -> None:
    """Set how long the kernels of all channels wait for a peer before they fail."""
    global _DEADLINE_S
    _DEADLINE_S = seconds
    for found in _channels.values():
        found.deadline.fill_(int(seconds * 1e9))


def peer_failure() -> PeerError | None:
    """Return an error that names the rank a kernel waited for in vain, or None. CUDA's own error does not name it."""
    for found in _channels.values():
        number, peer, waited, op = found.failure.tolist()
        if number:
            whom = f"rank {peer}" if peer >= 0 else "its own copies"
            call = number if found.operator is None else (number + 1) // 2  # two barriers in each call
            return PeerError(
                f"{OPERATORS[op]}, call {call} of group {found.name}: rank {found.rank} of {found.ranks} waited "
                f"{waited / 1e9:.1f} s for {whom}, then gave up\n"
                "  want: all ranks of the group there within comm.train_timeout_seconds\n"
                "  fix:  the log of the rank it waited for says why that one stopped or stalled"
            )
    return None


@cache
def multiprocessors(device: torch.device) -> int:
    """Return the number of multiprocessors of a GPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count
