"""Ranks that share GPUs where there are fewer GPUs than ranks: eight on one, for what does not depend on speed.

They take turns: the GPU interrupts a kernel that waits for a peer after some milliseconds, so that the peer's can run.
"""

import os
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from titanlite.kernels import collectives
from titanlite.kernels.collectives import Group


class Communication(NamedTuple):
    """What `init_process_group` is to be told.

    Attributes:
        backend: NCCL for tensors on GPUs where each rank has its own, else gloo.
        device_id: this rank's GPU if no other rank has it.
    """

    backend: str
    device_id: torch.device | None


def take_gpu(rank: int, ranks: int) -> Communication:
    """Choose this process's GPU, and how it communicates.

    Ranks that share GPUs gather and scatter what is not fused through host memory: for the rest of the process,
    `collectives.all_gather` and `reduce_scatter` are replaced. gloo's own gather of tensors on a GPU ends torch 2.11.

    Args:
        rank: this process's, on this host.
        ranks: their number.
    """
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # multicast, which nothing here needs
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    gpus = torch.cuda.device_count()
    torch.cuda.set_device(rank % max(1, gpus))  # without one, torch says so
    if ranks <= gpus:
        return Communication("cpu:gloo,cuda:nccl", torch.device("cuda", rank))
    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"  # symmetric memory refuses two ranks of one GPU
    for name in ("all_gather", "reduce_scatter"):
        on_host: Callable[[Tensor, Group], Tensor] = getattr(collectives, name)
        setattr(collectives, name, lambda x, group, on_host=on_host: on_host(x.cpu(), group).to(x.device))
    return Communication("gloo", None)
