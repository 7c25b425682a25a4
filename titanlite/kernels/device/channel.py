"""Share memory among the ranks of a group, for their collective matmuls or for one of FSDP's collectives.

Each group and use has one channel: flags, slots of data, counters. The slots grow when an operator needs more, which is
a collective, like the operator itself, and impossible while a CUDA graph is captured.

The collective matmuls of a process run in the order in which they are issued, on any group and stream: two that fill
one GPU in one order, and another GPU in the other, would wait for each other. The calls of each of FSDP's collectives
are ordered, too, since they would take each other's signals for their own. Within a capture, edges of the graph keep
the order. The caller has two duties. Otherwise results are wrong, or kernels wait until the watchdog ends the run, or
outside of a run until their deadline:

    all ranks issue operators in one order      therefore from one thread at a time
    a replay, which this file does not see,     its stream waits for the last operator's or replay's, and the next one's
    overlaps neither operators nor replays      stream waits for it
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
"""Number of chunks of a shard, each with a ready flag at the peers, set as soon as the chunk is there."""
HEADER = 8 + CHUNKS
"""First words of a channel's local counters: blocks that have begun, tiles claimed, blocks that have ended, blocks of
the first kernel that have ended, copies claimed, copies of the own shard claimed; in the last CHUNKS, copies written by
chunk."""
COUNTERS = HEADER + 8192
"""All counters: after the header, one for each block of rows that arrives."""

OPERATORS = (
    "all_gather_matmul",
    "matmul_reduce_scatter",
    "FSDP's all-gather",
    "FSDP's reduce-scatter",
    "exchange with experts",
)
"""Names by the number in a kernel's report of a failure."""

_DEADLINE_S = 600.0


class PeerError(RuntimeError):
    """A rank waited for another in a kernel until the deadline."""


@dataclass
class Channel:
    """The memory that the kernels of one group share, and its ranks."""

    name: str  # of the process group
    process_group: dist.ProcessGroup
    rank: int
    ranks: int  # 2 to 8
    device: torch.device
    operator: int | None = None  # FSDP_GATHER, FSDP_REDUCE or EXPERTS; None: collective matmuls
    n_slots: int = 2  # calls whose data `slots` has room for
    number: int = field(init=False)  # among all channels of this process
    flags: Tensor = field(init=False)  # [ranks · (1 + CHUNKS)] int32, by peers: one each, then ready flags of chunks
    peer_flags: Tensor = field(init=False)  # [ranks] int64, addresses of all ranks' flags
    counters: Tensor = field(init=False)  # [COUNTERS] int32; zero between operators
    epoch: Tensor = field(init=False)  # [1] int32, number of operators so far
    deadline: Tensor = field(init=False)  # [1] int64, nanoseconds
    failure: Tensor = field(init=False)  # [4] int64 in host memory, for a kernel that gives up
    slots: Tensor | None = None  # [n_slots · capacity] bytes, symmetric
    peer_slots: Tensor | None = None  # [ranks] int64, addresses of all ranks' slots
    peers: list[Tensor] = field(default_factory=list)  # all ranks' slots, as bytes
    capacity: int = 0
    blocks: dict[object, list] = field(default_factory=dict)  # of the peers' slots, by shape
    _rendezvous: Rendezvous = field(init=False)
    _kept: list[tuple[object, ...]] = field(default_factory=list)  # captured graphs may still use outgrown slots

    def __post_init__(self) -> None:
        os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")  # nothing here uses it
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
        """Order the operator behind the process's last one, make room for its data, and return a slot's bytes.

        Args:
            n_bytes: per slot, equal on all ranks.
        """
        self.order()
        self.make_room(n_bytes)
        return self.capacity

    def order(self) -> None:
        """Make the current stream wait for the last operator that must not overlap with the next.

        Raises:
            RuntimeError: its stream is now being captured, so that nothing outside of the capture can wait for it.
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
        elif capture:  # a new one: forget ended captures
            for of, on in list(_last.items()):
                if of[0] and _capture(on.cuda_stream) != of[0]:
                    del _last[of]
        _last[key] = current

    def make_room(self, n_bytes: int) -> None:
        """Make room for `n_bytes` per slot, equal on all ranks; a graph under capture keeps the slots."""
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
        """Replace the slots by larger ones, when everything that the GPU runs has ended; a collective."""
        torch.cuda.synchronize(self.device)  # nobody may still write into the old slots
        dist.barrier(self.process_group)
        self.peers, self.peer_slots, self.slots = [], None, None
        self.blocks.clear()
        self.capacity = -(-n_bytes // 2**20) * 2**20
        torch.cuda.empty_cache()  # symmetric memory does not come from the allocator, which may hold unused memory
        self.slots = symmetric_memory.empty(self.n_slots * self.capacity, dtype=torch.uint8, device=self.device)
        handle = self._rendezvous(self.slots)
        self.peers = [handle.get_buffer(r, (self.n_slots * self.capacity,), torch.uint8) for r in range(self.ranks)]
        self.peer_slots = torch.tensor(handle.buffer_ptrs, dtype=torch.int64, device=self.device)
        torch.cuda.synchronize(self.device)
        dist.barrier(self.process_group)


_channels: dict[tuple[str, int | None], Channel] = {}
_numbers = count()
_last: dict[tuple[int, int | None], torch.cuda.Stream] = {}
"""The last operators' streams, by capture (0: none) and channel (None: all collective matmuls)."""


def _capture(stream: int) -> int:
    """Return the number of the CUDA-graph capture that a stream is part of, unique in this process; 0: none."""
    status, number = ctypes.c_int(), ctypes.c_uint64()
    args = ctypes.c_void_p(stream), ctypes.byref(status), ctypes.byref(number), None, None, None
    error = _driver().cuStreamGetCaptureInfo_v2(*args)
    if error:
        raise RuntimeError(f"cuStreamGetCaptureInfo ended with CUDA's error {error}")
    return number.value if status.value else 0


@cache
def _driver() -> ctypes.CDLL:
    """Return CUDA's driver: torch cannot tell captures apart."""
    return ctypes.CDLL("libcuda.so.1")


def channel(group: str, operator: int | None = None, n_slots: int = 2) -> Channel:
    """Return the channel of a process group and a use; the first call is a collective. Arguments as in `Channel`."""
    process_group = process_group_of(group)
    found = _channels.get((group, operator))
    if found is None or found.process_group is not process_group:  # names are used again after a group's end
        device, ranks = torch.device("cuda", torch.cuda.current_device()), (process_group.rank(), process_group.size())
        found = Channel(group, process_group, *ranks, device, operator, n_slots)
        _channels[group, operator] = found
    return found


def set_deadline(seconds: float) -> None:
    """Set how long kernels wait for a peer before they fail, in all channels."""
    global _DEADLINE_S
    _DEADLINE_S = seconds
    for found in _channels.values():
        found.deadline.fill_(int(seconds * 1e9))


def peer_failure() -> PeerError | None:
    """Return the error for a peer that a kernel waited for in vain, if any; CUDA's own error does not name it."""
    for found in _channels.values():
        number, peer, waited, op = found.failure.tolist()
        if number:
            whom = f"rank {peer}" if peer >= 0 else "its own copies"
            call = number if found.operator is None else (number + 1) // 2  # ranks meet twice a call
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
