"""Measure the memory that a rank uses: on a GPU by the caching allocator, on a CPU by the size of the process."""

import gc
import os
import resource
import sys

import torch

_GIB = 2**30


def is_allocators(device: torch.device) -> bool:
    """Return whether `memory_gib` counts what a forecast does, memory for tensors, and not a whole process."""
    return device.type == "cuda"


def memory_gib(device: torch.device) -> tuple[float, float]:
    """Return the values of `memory_gib` and `memory_allocated_gib` in a metrics row, in GiB.

    On a GPU these are two peaks since the start of the process or `restart_peak`: of the memory that the caching
    allocator reserved, and of that allocated to tensors. On a CPU: the process's peak and present resident size.
    """
    if is_allocators(device):
        return torch.cuda.max_memory_reserved(device) / _GIB, torch.cuda.max_memory_allocated(device) / _GIB
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    present = peak
    if os.path.exists("/proc/self/statm"):
        with open("/proc/self/statm") as file:
            present = int(file.read().split()[1]) * resource.getpagesize()
    return max(peak, present) / _GIB, present / _GIB


def restart_peak(device: torch.device) -> None:
    """Empty the GPU's caching allocator and restart the peaks that `memory_gib` returns. Does nothing on a CPU."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
