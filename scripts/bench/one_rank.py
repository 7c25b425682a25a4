"""One rank's step of a layout with more ranks than there are GPUs: python scripts/bench/one_rank.py 8 --config …

train.py as rank 0 of 8, the others only thought: collectives are copies of its own data, in its own memory. Memory is
that of the layout, the communication library's own aside, and so are all kernels but those of the collectives: the step
is the layout's if communication took no time. The loss says nothing: a rank that takes its own part for the sum trains
another model. What needs peers' memory on a GPU is refused (`async_tensor_parallel`) or left out (copy engines).

`throughput.py` and `save_lists.py` run it with `--alone`.
"""

import os
import sys
from typing import Any

import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # the backend

from titanlite.exit_code import exit_code, leave
from titanlite.kernels import lowering
from titanlite.train import main

_init_process_group = dist.init_process_group


def init_process_group(_backend: str, **_options: object) -> None:
    """Start a fake process group in the place of torch's."""
    _init_process_group("fake", store=dist.HashStore(), rank=0, world_size=int(os.environ["WORLD_SIZE"]))


# The backend of torch 2.11 gathers copies, but leaves what it has scattered as it was.
def reduce_scatter_tensor(output: torch.Tensor, input: torch.Tensor, *_: object, **_options: object) -> None:
    """Return the first rank's part of this rank's summand, in the place of torch's."""
    output.copy_(input.view(-1)[: output.numel()].view_as(output))


def _functional(x: torch.Tensor, _op: str, ranks: int, _group: str) -> torch.Tensor:
    return x[: len(x) // ranks].clone()


if __name__ == "__main__":
    world = sys.argv.pop(1)
    launched: dict[str, Any] = {"RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    os.environ |= launched | {"WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    dist.init_process_group, dist.reduce_scatter_tensor = init_process_group, reduce_scatter_tensor
    lowering._ask_peers = lambda group: "the peers are only thought"
    operators = torch.library.Library("_c10d_functional", "IMPL")
    for device in ("CPU", "CUDA"):
        operators.impl("reduce_scatter_tensor", _functional, device, allow_override=True)
    leave(exit_code(main))
