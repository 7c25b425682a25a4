"""A fake world: this process acts as one rank of any number of ranks, and its tensors have no memory.

Collectives of torch's fake process group return at once, and fake tensors have only shapes. torch computes a rank's
coordinates in a mesh with tensors; these tensors are real. Gathering an object from all ranks returns copies of this
rank's object. The process group that a process had before is restored afterwards.

torch has caches with meshes as keys, whose entries name groups of the fake world. So a mesh of one world must not equal
a mesh of another. Since torch's comparison includes a mesh's thread number, each world sets its own number.
"""

from collections import Counter
from collections.abc import Callable, Generator
from contextlib import contextmanager
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FakeWork
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from titanlite.device import host_tensors
from titanlite.kernels import flash_attention_4
from titanlite.kernels.context_attention import exchanged
from titanlite.kernels.lowering import lowered

_numbers = count(-1, -1)  # thread numbers that no thread has


@torch.library.register_fake("c10d::allgather_into_tensor_coalesced_")  # torch has one for a single tensor
def _gather_several(*given: Any, **options: Any) -> torch.ScriptObject:
    return FakeWork().boxed()


@contextmanager
def fake_world(rank: int, world: int) -> Generator[None]:
    """Make this process act as rank `rank` of a world of `world` processes, within a context."""
    places = [(DeviceMesh, "__init__"), (DeviceMesh, "get_coordinate"), (dist, "all_gather_object")]
    before = [(of, name, getattr(of, name)) for of, name in places]
    served, threads = flash_attention_4.served(), torch.get_num_threads()
    counted = [(counter, Counter[Any](counter)) for counter in (lowered, exchanged)]
    for counter, _ in counted:
        counter.clear()
    try:
        torch.set_num_threads(1)
        number = next(_numbers)
        for of, name, function in before[:2]:
            setattr(of, name, _on_host(function, number))
        dist.all_gather_object = _as_this_one
        with _process_group(rank, world):
            yield
    finally:
        for of, name, function in before:
            setattr(of, name, function)
        flash_attention_4.serve(served)
        torch.set_num_threads(threads)
        for counter, was in counted:
            counter.clear()
            counter.update(was)


@contextmanager
def _process_group(rank: int, world: int) -> Generator[None]:
    """Make a fake process group the default one within a context. Afterwards restore the previous one."""
    torchs = dist.distributed_c10d
    real, known, made = torchs.GroupMember.WORLD, {*torchs._world.pg_names}, torchs._world.group_count
    torchs._update_default_pg(None)
    try:
        dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
        yield
    finally:
        torchs._update_default_pg(real)
        for group in {*torchs._world.pg_names} - known:
            dist.destroy_process_group(group)
        torchs._world.group_count = made


def _on_host(function: Callable[..., Any], number: int) -> Callable[..., Any]:
    def call(mesh: DeviceMesh, *args: Any, **kwargs: Any) -> Any:
        with host_tensors():
            found = function(mesh, *args, **kwargs)
        mesh._thread_id = number
        return found

    return call


def _as_this_one(found: list[Any], own: Any, group: dist.ProcessGroup | None = None) -> None:
    found[:] = [own] * len(found)
