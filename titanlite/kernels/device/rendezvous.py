"""Share memory among the ranks of a group, even if the ranks have shared memory in other groups before.

In a rendezvous ranks exchange handles of memory through a store. Torch numbers these exchanges per process instead of
per group. Ranks that have been in different groups therefore wait for each other under different keys, forever
(pytorch/pytorch#196082; in 2.11 to 2.14). Here a second group of the same ranks is registered, whose store numbers only
its own exchanges. Whether torch takes the store from the group or by the group's name, it finds this store.
"""

from itertools import count
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _register_process_group, _SymmetricMemory


class _GroupStore(dist.Store):
    """A view of a store that replaces the numbers in keys "prefix/number/…" by 0, 1, 2, … in order of first use."""

    def __init__(self, store: dist.Store) -> None:
        super().__init__()
        self._store = store
        self._numbers: dict[str, int] = {}

    def _key(self, key: str) -> str:
        prefix, number, *rest = key.split("/")
        return "/".join((prefix, str(self._numbers.setdefault(number, len(self._numbers))), *rest))

    def set(self, key: str, value: Any) -> None:
        self._store.set(self._key(key), value)

    def get(self, key: str) -> bytes:
        return self._store.get(self._key(key))

    def add(self, key: str, amount: int) -> int:
        return self._store.add(self._key(key), amount)

    def wait(self, keys: list[str], *timeout: Any) -> None:
        self._store.wait([self._key(key) for key in keys], *timeout)


class Rendezvous:
    """Give the ranks of a process group access to each other's memory.

    Args:
        process_group: the ranks that share memory.
        use: a name that distinguishes this rendezvous from others of the same group.
    """

    _numbers = count()

    def __init__(self, process_group: dist.ProcessGroup, use: str) -> None:
        store = dist.distributed_c10d._get_process_group_store(process_group)
        self._store = _GroupStore(dist.PrefixStore(f"titanlite-rendezvous-{use}", store))
        rank, ranks = process_group.rank(), process_group.size()
        self._name = f"titanlite-rendezvous-{next(self._numbers)}"
        self._group = dist.ProcessGroup(self._store, rank, ranks)
        _register_process_group(self._name, self._group)
        _SymmetricMemory.set_group_info(self._name, rank, ranks, self._store)

    def __call__(self, memory: Tensor) -> Any:
        """Give all ranks access to each other's `memory`. A collective.

        Args:
            memory: from `torch.distributed._symmetric_memory.empty`, of equal size on all ranks.

        Returns:
            Torch's handle, with `buffer_ptrs` and `get_buffer` for the memory of each rank.
        """
        return _SymmetricMemory.rendezvous(memory, self._name)
