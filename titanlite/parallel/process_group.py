"""Start the process group the same way under torchrun, on several hosts, and in a single plain process."""

import os
from datetime import timedelta

import torch
import torch.distributed as dist

from titanlite.config.schema import Comm
from titanlite.errors import ConfigError, Problem, describe
from titanlite.kernels.device.channel import set_deadline

_NO_LIMIT = timedelta(days=365)  # a timeout that every backend supports


def choose_device() -> torch.device:
    """Return this process's device, its own GPU if the host has any, and make it torch's current device.

    Raises:
        ConfigError: this host has GPUs, but fewer than processes.
    """
    device = torch.device("cpu")
    if torch.cuda.is_available():
        if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys():
            # Segments that grow instead of fixed ones: FSDP's buffers of many sizes would leave gaps of gigabytes.
            torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        if device.index >= torch.cuda.device_count():
            gpus, asked = torch.cuda.device_count(), os.environ.get("LOCAL_WORLD_SIZE", str(device.index + 1))
            want = f"at most {gpus}, the GPUs that this host shows (CUDA_VISIBLE_DEVICES hides others)"
            problem = Problem("--nproc-per-node", asked, want, f"--nproc-per-node {gpus}")
            raise ConfigError(describe("torchrun", [problem]))
        torch.cuda.set_device(device)
    return device


def start_process_group(config: Comm) -> torch.device:
    """Join the job's process group and return this process's device.

    Its backend is NCCL if processes have GPUs, else gloo. CPU tensors and objects always use gloo.

    Raises:
        ConfigError: see `choose_device`.
    """
    timeout, device = timedelta(seconds=config.init_timeout_seconds), choose_device()
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    if "WORLD_SIZE" in os.environ:  # torchrun
        dist.init_process_group(backend, timeout=timeout)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
    return device


def ranks_of_a_host() -> int | None:
    """Return the number of the job's processes per host; None if all are on one host."""
    world = dist.get_world_size()
    of_host = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    return of_host if of_host < world else None


def leave_limits_to_watchdog() -> None:
    """Remove the timeouts of all groups, which would also count the time in which a job is suspended."""
    set_timeout = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout  # before torch 2.14
    for group in dist.distributed_c10d._world.pg_map:
        set_timeout(_NO_LIMIT, group)
    set_deadline(_NO_LIMIT.total_seconds())
