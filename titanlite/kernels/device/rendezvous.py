"""Share memory among the ranks of a group, also if they have shared memory in other groups before.

Torch numbers the exchanges of a rendezvous by process instead of by group, so ranks that have been in different groups
wait for each other under different keys, forever (pytorch/pytorch#196082; in 2.11 to 2.14). Here a further group of the
same ranks is registered, with a store that counts this group's exchanges. Depending on its version, torch takes the
store from the group or by its name: both lead to that store.
"""

from itertools import count
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _register_process_group, _SymmetricMemory


class _GroupStore(dist.Store):
    """A store that renumbers keys "prefix/number/…" in the order of their first use."""

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
    """Let the ranks of a process group see each other's memory.

    Args:
        process_group: the ranks.
        use: a name for this rendezvous among the group's.
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
        """Let all ranks see each other's `memory`; a collective.

        Args:
            memory: from `torch.distributed._symmetric_memory.empty`, of equal size on all ranks.

        Returns:
            Torch's handle: `buffer_ptrs`, `get_buffer`.
        """
        return _SymmetricMemory.rendezvous(memory, self._name)
