"""The device that a run is built for: this process's own, or one that is only named, as for a forecast.

Lowerings, attention kernels, copy engines and symmetric memory are chosen by it, and not by tensors: a named device has
fake ones of a CPU, with shapes and no memory.
"""

import platform
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily


@dataclass(frozen=True, eq=False)
class Device:
    """A device that a run is built for."""

    of_tensors: torch.device  # of this process
    name: str  # torch's, as "NVIDIA H100 80GB HBM3"; of a CPU the machine's architecture
    capability: tuple[int, int] | None = None  # of a GPU
    fake: FakeTensorMode | None = None  # makes the tensors of a device that is only named
    host: int = 8  # GPUs of one host, of a device that is only named

    @property
    def is_gpu(self) -> bool:
        """Return whether it is a GPU, named or not."""
        return self.capability is not None

    @property
    def is_named(self) -> bool:
        """Return whether it is only named: nothing is computed, and there are no peers."""
        return self.fake is not None

    def tensors(self) -> AbstractContextManager[object]:
        """Make new tensors here, within a context."""
        return self.fake or nullcontext()

    def obstacle_between(self, ranks: list[int]) -> str | None:
        """Return why named GPUs of these ranks cannot share memory, or None; a host has successive ranks."""
        if self.capability != (9, 0):
            return f"compute capability {'.'.join(map(str, self.capability or (0, 0)))}, not 9.0, on rank 0"
        return "ranks on several hosts" if len({rank // self.host for rank in ranks}) > 1 else None


@cache
def device_of(process: torch.device) -> Device:
    """Return the device of a process whose tensors are there."""
    if process.type != "cuda":
        return Device(process, platform.machine())
    return Device(process, torch.cuda.get_device_name(process), torch.cuda.get_device_capability(process))


def named_device(gpu: str | None = None, host: int = 8) -> Device:
    """Return a named device: a GPU, as "h100", with so many of them on a host, or a CPU."""
    of_tensors, fake = torch.device("cpu"), FakeTensorMode(allow_non_fake_inputs=True)
    if gpu is None:
        return Device(of_tensors, "CPU", fake=fake, host=host)
    return Device(of_tensors, f"NVIDIA {gpu.upper()}", (9, 0), fake, host)


CPU = device_of(torch.device("cpu"))
"""A process without a GPU, on this machine."""

host_tensors = unset_fake_temporarily
"""A context in which tensors have numbers on the host, as for tables that the host reads."""


def has_memory(x: Tensor) -> bool:
    """Return whether a tensor has numbers, unlike a named device's."""
    return not isinstance(x, FakeTensor)
