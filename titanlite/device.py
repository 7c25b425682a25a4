"""The device that a run is built for: this process's own, or one that is only named, as for a forecast.

What decides a lowering, an attention kernel, copy engines or symmetric memory asks it, and not the tensors: those of a
device that is only named are fake ones of a CPU, with shapes and no memory.
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
    """A device that a run is built for.

    Attributes:
        of_tensors: where this process's tensors are.
        name: as torch has it, "NVIDIA H100 80GB HBM3"; of a CPU the machine's architecture.
        capability: compute capability of a GPU; None: it is a CPU.
        fake: makes the tensors of a device that is only named; None: it is this process's own.
        host: GPUs of one host, where peers cannot be asked.
    """

    of_tensors: torch.device
    name: str
    capability: tuple[int, int] | None = None
    fake: FakeTensorMode | None = None
    host: int = 8

    @property
    def is_gpu(self) -> bool:
        """Return whether it is a GPU, be it only a named one."""
        return self.capability is not None

    @property
    def is_named(self) -> bool:
        """Return whether it is only named: nothing is computed, and no peer can be asked."""
        return self.fake is not None

    def tensors(self) -> AbstractContextManager[object]:
        """Make new tensors here, within a context."""
        return self.fake or nullcontext()

    def obstacle_between(self, ranks: list[int]) -> str | None:
        """Return why GPUs that are only named cannot read each other's memory, or None.

        Args:
            ranks: of the group, by their numbers in the job, of which each host has `host` in succession.
        """
        if self.capability != (9, 0):
            return f"compute capability {'.'.join(map(str, self.capability or (0, 0)))}, not 9.0, on rank 0"
        return "ranks on several hosts" if len({rank // self.host for rank in ranks}) > 1 else None


@cache
def device_of(process: torch.device) -> Device:
    """Return a process's own device.

    Args:
        process: where its tensors are.
    """
    if process.type != "cuda":
        return Device(process, platform.machine())
    return Device(process, torch.cuda.get_device_name(process), torch.cuda.get_device_capability(process))


def named_device(gpu: str | None = None, host: int = 8) -> Device:
    """Return a device to build for that need not be there; its tensors have no memory.

    Args:
        gpu: as in "h100"; None: a CPU.
        host: GPUs of one host.
    """
    of_tensors, fake = torch.device("cpu"), FakeTensorMode(allow_non_fake_inputs=True)
    if gpu is None:
        return Device(of_tensors, "CPU", fake=fake, host=host)
    return Device(of_tensors, f"NVIDIA {gpu.upper()}", (9, 0), fake, host)


CPU = device_of(torch.device("cpu"))
"""A process without a GPU, on this machine."""

host_tensors = unset_fake_temporarily
"""Within this context tensors are of the host and have numbers, as tables must that the host reads."""


def has_memory(x: Tensor) -> bool:
    """Return whether a tensor has numbers: those of a device that is only named have none."""
    return not isinstance(x, FakeTensor)
