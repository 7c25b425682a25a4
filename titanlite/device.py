"""The device that a run is built for: the device of this process or, as in a forecast, a named device.

A named device need not exist here: its tensors are fake CPU tensors, which have shapes and no memory. Lowerings,
attention kernels, copy engines and symmetric memory are chosen by a `Device`, and not by the device of tensors.
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
    """The device that a run is built for, either real or only named. On a named device nothing is computed."""

    of_tensors: torch.device  # device of tensors in this process
    name: str  # e.g. "NVIDIA H100 80GB HBM3"; for a CPU, its architecture
    capability: tuple[int, int] | None = None  # compute capability of a GPU
    fake: FakeTensorMode | None = None  # makes the tensors of a named device
    host: int = 8  # GPUs per host, if this device is named

    @property
    def is_gpu(self) -> bool:
        """Return whether the device is a GPU, real or named."""
        return self.capability is not None

    @property
    def is_named(self) -> bool:
        """Return whether the device is only named: nothing is computed, and there are no other processes."""
        return self.fake is not None

    def tensors(self) -> AbstractContextManager[object]:
        """Return a context in which new tensors are fake if the device is named."""
        return self.fake or nullcontext()

    def obstacle_between(self, ranks: list[int]) -> str | None:
        """Return why the named GPUs of `ranks` cannot share memory, or None. Consecutive ranks are on one host."""
        if self.capability != (9, 0):
            return f"compute capability {'.'.join(map(str, self.capability or (0, 0)))}, not 9.0, on rank 0"
        return "ranks on several hosts" if len({rank // self.host for rank in ranks}) > 1 else None


@cache
def device_of(process: torch.device) -> Device:
    """Return the real device of this process, which makes its tensors on `process`."""
    if process.type != "cuda":
        return Device(process, platform.machine())
    return Device(process, torch.cuda.get_device_name(process), torch.cuda.get_device_capability(process))


def named_device(gpu: str | None = None, host: int = 8) -> Device:
    """Return a named device: a GPU such as "h100" with `host` GPUs on each host, or a CPU if `gpu` is None."""
    of_tensors, fake = torch.device("cpu"), FakeTensorMode(allow_non_fake_inputs=True)
    if gpu is None:
        return Device(of_tensors, "CPU", fake=fake, host=host)
    return Device(of_tensors, f"NVIDIA {gpu.upper()}", (9, 0), fake, host)


CPU = device_of(torch.device("cpu"))
"""The CPU of this machine, for a process without a GPU."""

host_tensors = unset_fake_temporarily
"""A context in which new tensors are real, even for a named device; for tables that the host reads."""


def has_memory(x: Tensor) -> bool:
    """Return whether a tensor has values, unlike the fake tensors of a named device."""
    return not isinstance(x, FakeTensor)
