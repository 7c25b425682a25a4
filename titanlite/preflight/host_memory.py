"""Check that a host without a GPU has memory for weights, gradients and moments, the least that a run needs."""

import os
from pathlib import Path

from titanlite.byte_size import byte_size
from titanlite.config.build import show
from titanlite.config.schema import Config
from titanlite.errors import ErrorReport, Problem, describe

_LIMITS = ("memory.max", "memory.limit_in_bytes")  # files of control groups, versions 2 and 1
_GROUPS, _TREE = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
_DEVICES = ("nvidia[0-9]*", "dxg", "kfd")  # files in /dev: of NVIDIA, of WSL, of AMD


def lack_of_memory(config: Config, whole: int, world: int = 1, on_host: int | None = None) -> ErrorReport | None:
    """Return an error message if weights, gradients and moments do not fit in this host's memory, on a CPU; else None.

    One replica of them takes `whole` bytes. `on_host` of the `world` processes are on this host; None: all.
    """
    replicas = config.parallelism.data_parallel_replicate_degree
    on_host = on_host or world
    need, there = whole * replicas * on_host // world, memory_of_host()
    if need <= there:
        return None
    want = f"weights, gradients and moments that fit in {byte_size(there, need)}, which it has; in float32"
    if config.optimizer.state_dtype == "bfloat16":
        want += ", moments in bfloat16"
    if config.optimizer.ema_decay:
        want += ", with an average of the weights"
    want += f", they take {byte_size(need)}" + (f" with {on_host} of {world} processes" if on_host != world else "")
    fix = "train on GPUs, or choose a smaller model (`titanlite recipes model` lists them)"
    problem = Problem("model.flavor", show(config.model.flavor), want, fix)
    return describe("this host shows no GPU, and has too little memory for the run", [problem])


def shows_gpus() -> bool:
    """Return whether this host seems to have GPUs that the process may use. torch is not needed."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return False
    return any(any(Path("/dev").glob(device)) for device in _DEVICES)


def memory_of_host() -> int:
    """Return the bytes of memory of the machine, or the lower limit of a control group of this process."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for line in _GROUPS.read_text().splitlines() if _GROUPS.exists() else ():
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):  # "" is version 2, with one tree for all controllers
            continue
        own = _TREE / controllers / path.lstrip("/")
        for file in (folder / name for folder in (own, *own.parents) for name in _LIMITS):
            if file.exists() and (limit := file.read_text().strip()).isdecimal():  # else "max"
                limits.append(int(limit))
    return min(limits)
