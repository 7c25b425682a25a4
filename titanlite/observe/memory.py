"""How much memory a rank uses: of its GPU as the caching allocator sees it, or of the process on a CPU."""

import gc
import os
import resource
import sys

import torch

_GIB = 2**30


def memory_gib(device: torch.device) -> tuple[float, float]:
    """Return `memory_gib` and `memory_allocated_gib` of a metrics row.

    On a GPU these are the peaks reserved and allocated since the start: what the device must have, and what tensors
    took of it. On a CPU they are the process's peak and present resident size.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device) / _GIB, torch.cuda.max_memory_allocated(device) / _GIB
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    present = peak
    if os.path.exists("/proc/self/statm"):
        with open("/proc/self/statm") as file:
            present = int(file.read().split()[1]) * resource.getpagesize()
    return max(peak, present) / _GIB, present / _GIB


def restart_peak(device: torch.device) -> None:
    """Let `memory_gib` count from now on, without the cache and peak of earlier work; a CPU's peak is kept."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
