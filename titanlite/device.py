"""The device that a run is built for: this process's own, or one that is only named, as for a forecast.

What decides a lowering, an attention kernel, copy engines or symmetric memory asks it, and not the tensors: those of a
run that is only recorded are fake ones of a CPU.
"""

import platform
from dataclasses import dataclass
from functools import cache

import torch


@dataclass(frozen=True)
class Device:
    """A device that a run is built for.

    Attributes:
        of_tensors: where this process's tensors are.
        name: as torch has it, "NVIDIA H100 80GB HBM3"; of a CPU the machine's architecture.
        capability: compute capability of a GPU; None: it is a CPU.
        host: GPUs of one host, if the run is only recorded; None: it is this process's own device.
    """

    of_tensors: torch.device
    name: str
    capability: tuple[int, int] | None = None
    host: int | None = None

    @property
    def is_gpu(self) -> bool:
        """Return whether it is a GPU, be it only a named one."""
        return self.capability is not None

    @property
    def is_named(self) -> bool:
        """Return whether nothing is computed: no peer can be asked, and none has memory."""
        return self.host is not None

    def obstacle_between(self, ranks: list[int]) -> str | None:
        """Return why GPUs that are only named cannot read each other's memory, or None.

        Args:
            ranks: of the group, by their numbers in the job, each host with `host` in succession.
        """
        assert self.host is not None  # noqa: S101
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


CPU = device_of(torch.device("cpu"))
"""Of this machine."""
