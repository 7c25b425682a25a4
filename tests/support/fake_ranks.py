"""A process group whose other ranks do not exist: collectives return at once, with the shapes that they should have."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from titanlite.kernels.collectives import Group


@contextmanager
def ranks_that_move_nothing(size: int) -> Iterator[Group]:
    """A process group of torch's own, of which this process is rank 0 and the only one."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    try:
        yield Group(dist.group.WORLD.group_name, size, 0)  # type: ignore[union-attr]
    finally:
        dist.destroy_process_group()
