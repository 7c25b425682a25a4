"""How much memory a rank uses: of its GPU as the caching allocator sees it, or of the process on a CPU."""

import gc
import os
import resource
import sys

import torch

_GIB = 2**30


def memory_gib(device: torch.device) -> tuple[float, float]:
    """Give the memory of this rank, `memory_gib` and `memory_allocated_gib` of a metrics row.

    Args:
        device: where the model is.

    Returns:
        On a GPU the peak reserved and the peak allocated since the start, in GiB: what the device must have, and what
        tensors took of it. On a CPU the process's peak and present resident size, in GiB.
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
    """Let `memory_gib` count from now on: what was computed before the run leaves it neither cache nor peak.

    Args:
        device: where the model is; on a CPU nothing is done, whose peak cannot be set back.
    """
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
