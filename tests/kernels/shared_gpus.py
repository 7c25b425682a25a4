"""Ranks on GPUs, of which there may be fewer: ranks of one GPU take turns on it, as eight of them do on one.

A kernel that waits for a peer is interrupted for it after some milliseconds, so that operators take long, and compute
the same. NVLink and NCCL are not tried out that way.
"""

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from titanlite.kernels import collectives
from titanlite.kernels.collectives import Group


def take_gpu(rank: int, ranks: int) -> dict[str, Any]:
    """Make a GPU this process's.

    Args:
        rank: this process's, on this host.
        ranks: their number.

    Returns:
        `backend` and `device_id` for `init_process_group`: NCCL where each rank has a GPU of its own.
    """
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # multicast, which nothing here needs
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    gpus = torch.cuda.device_count()
    torch.cuda.set_device(rank % gpus)
    if ranks <= gpus:
        return {"backend": "cpu:gloo,cuda:nccl", "device_id": torch.device("cuda", rank)}
    # Torch wants a GPU for each rank, but lets it be; NCCL does not, and gloo takes no tensor on a GPU.
    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    for name in ("all_gather", "reduce_scatter"):
        on_host: Callable[[Tensor, Group], Tensor] = getattr(collectives, name)
        setattr(collectives, name, lambda x, group, on_host=on_host: on_host(x.cpu(), group).to(x.device))
    return {"backend": "gloo"}
