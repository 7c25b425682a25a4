"""A world of processes that are not there: this one takes any rank of any number, and its tensors have no memory.

torch's fake process group returns at once from a collective; fake tensors have shapes alone. What torch asks of ranks
with tensors, their coordinates in a mesh, is asked of real ones; and what all ranks are to say, they say as this one.
"""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from titanlite.device import Device, host_tensors
from titanlite.forecast.device_specs import measured_rates
from titanlite.kernels import flash_attention_4
from titanlite.kernels.lowering import lowered


@contextmanager
def fake_world(device: str | None, rank: int, world: int) -> Generator[Device]:
    """Be one rank of a world, within a context.

    Args:
        device: of `forecast.device_specs.DEVICES`, to build for; None: a CPU.
        rank: this one.
        world: number of processes.
    """
    of_tensors, fake = torch.device("cpu"), FakeTensorMode(allow_non_fake_inputs=True)
    named = Device(of_tensors, "CPU", fake=fake)
    if device is not None:
        named = Device(of_tensors, f"NVIDIA {device.upper()}", (9, 0), fake, measured_rates(device).host)
    places = [(DeviceMesh, "__init__"), (DeviceMesh, "get_coordinate"), (dist, "all_gather_object")]
    before = [(of, name, getattr(of, name)) for of, name in places]
    served, threads = flash_attention_4.serve(()), torch.get_num_threads()
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    lowered.clear()
    try:
        torch.set_num_threads(1)
        for of, name, function in before[:2]:
            setattr(of, name, _on_host(function))
        dist.all_gather_object = _as_this_one
        yield named
    finally:
        for of, name, function in before:
            setattr(of, name, function)
        flash_attention_4.serve(served)
        torch.set_num_threads(threads)
        lowered.clear()
        dist.destroy_process_group()


def _on_host(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        with host_tensors():
            return function(*args, **kwargs)

    return call


def _as_this_one(found: list[Any], own: Any, group: dist.ProcessGroup | None = None) -> None:
    found[:] = [own] * len(found)
