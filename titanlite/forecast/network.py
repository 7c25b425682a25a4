"""Predict the time of NCCL's collectives over several hosts, each GPU of which has a NIC (`networks.toml`).

Within one host a collective takes the bytes that a rank sends over a measured rate (`devices/*.toml`). Over several
hosts it is timed by the model by which NCCL itself chooses an algorithm (`src/graph/tuning.cc` of 2.30): the latency
of all steps, and the bytes over the bandwidth of the slowest link. k are the group's ranks on a host, N all of them.

    all-gather, reduce-scatter    a ring: N - 1 steps, of which N / k - 1 are between hosts. There are k rings at once,
                                  each of which enters and leaves a host by another NIC, so the bandwidth is that of k
                                  NICs, but not more than the rate within a host
    all-reduce                    such a ring around twice, or a tree: 2·(k - 1) steps within a host and 2·log2(N / k)
                                  between hosts
    all-to-all                    each rank sends by its own NIC what leaves the host, and no ring adds NICs up
                                  (NVIDIA/nccl-tests#267)

NCCL's logarithmic algorithm for gathers and scatters, PAT, takes groups with a single rank on each host only. There it
needs a third more time for the bytes, so NCCL prefers the ring for weights. Hence rings alone are modelled.
"""

import math
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import tomli

_G, _US = 1e9, 1e-6


class _Protocol(NamedTuple):
    """A protocol of NCCL: its share of the bandwidth, and µs to start, of a step within and of one between hosts."""

    share: float
    start: float
    within: float
    between: float


_RINGS = _Protocol(1.0, 8.4, 3.4, 14.0), _Protocol(0.92, 14.0, 1.9, 4.0)  # Simple; LL128
_TREE = _Protocol(0.92, 8.4, 4.0, 14.0)  # Simple


class Ranks(NamedTuple):
    """A group of ranks: their number, and how many of them are on each host."""

    size: int
    on_host: int

    @property
    def hosts(self) -> int:
        """Return the number of hosts."""
        return self.size // self.on_host


def placed(size: int, stride: int, world: int, host: int) -> Ranks:
    """Return the group of every `stride`-th rank, `size` in all, of a job whose hosts have `host` consecutive ranks."""
    return Ranks(size, size if world <= host else max(1, math.gcd(host, size * stride) // stride))


@dataclass(frozen=True)
class Network:
    """A network between hosts. `nic`: GB/s of a GPU's NIC in one direction."""

    key: str
    name: str
    nic: float

    def seconds(self, kind: str, sent: float, ranks: Ranks, rate: float) -> float:
        """Predict the seconds of a collective in which each rank sends `sent` bytes.

        Args:
            kind: "all_gather", "reduce_scatter", "all_reduce" or "all_to_all".
            ranks: the group.
            rate: GB/s of a rank within a host.
        """
        N, k, hosts = ranks.size, ranks.on_host, ranks.hosts
        if hosts == 1:
            return sent / rate / _G
        if kind == "all_to_all":
            to_peers, leaves = (sent * n / (N - 1) for n in (k - 1, N - k))
            return max(to_peers / rate, leaves / self.nic) / _G + (_RINGS[0].start + _RINGS[0].between) * _US
        bandwidth, rounds = min(rate, k * self.nic) * _G, 2 if kind == "all_reduce" else 1

        def by(protocol: _Protocol, within: float, between: float) -> float:
            steps = protocol.start + within * protocol.within + between * protocol.between
            return steps * _US + sent / protocol.share / bandwidth

        found = [by(ring, rounds * (N - hosts), rounds * (hosts - 1)) for ring in _RINGS]
        if kind == "all_reduce":
            found.append(by(_TREE, 2 * (k - 1), 2 * math.log2(hosts)))
        return min(found)


_FILE = Path(__file__).with_name("networks.toml")
DEFAULT_NETWORK = "ib400"
GPUS_OF_A_HOST = 8
"""GPUs of a host unless given: the number on the hosts where the rates were measured."""


@cache
def networks() -> dict[str, Network]:
    """Read the networks that `--network` takes, by key."""
    read: dict[str, Any] = tomli.loads(_FILE.read_text(encoding="utf-8"))
    return {key: Network(key, **of) for key, of in read.items()}
