"""Sharing memory among the ranks of a group, whatever other groups they have shared memory in before.

Torch numbers the exchanges of a rendezvous by process instead of by group, so ranks that have been in different groups
wait for each other under different keys, for ever (pytorch/pytorch#196082; in 2.11 to 2.13). Each group gets a store
here that counts its own exchanges.
"""

from contextlib import suppress
from typing import Any

import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory
from torch import Tensor
from torch._C._distributed_c10d import _SymmetricMemory


class _GroupStore(dist.Store):
    """A store whose keys "prefix/number/…" are numbered anew, in the order in which the numbers come."""

    def __init__(self) -> None:
        super().__init__()
        self.process_group: dist.ProcessGroup | None = None
        self._store: dist.Store = dist.HashStore()
        self._numbers: dict[str, int] = {}

    def serve(self, process_group: dist.ProcessGroup) -> None:
        """Be that group's from now on; names of groups are used again after their end."""
        if process_group is not self.process_group:
            store = dist.distributed_c10d._get_process_group_store(process_group)
            self.process_group, self._numbers = process_group, {}
            self._store = dist.PrefixStore("titanlite-rendezvous", store)

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


_stores: dict[str, _GroupStore] = {}


def rendezvous(memory: Tensor, process_group: dist.ProcessGroup) -> Any:
    """Let all ranks of a group see each other's `memory`; a collective.

    Args:
        memory: from `torch.distributed._symmetric_memory.empty`, of equal size on all ranks.
        process_group: the ranks.

    Returns:
        Torch's handle: `buffer_ptrs`, `get_buffer`.
    """
    name = process_group.group_name
    if name not in _stores:
        _stores[name] = _GroupStore()
        # A group in which torch has shared memory before keeps torch's store, and its numbers.
        with suppress(RuntimeError):
            _SymmetricMemory.set_group_info(name, process_group.rank(), process_group.size(), _stores[name])
            symmetric_memory._group_name_to_store[name] = _stores[name]
    _stores[name].serve(process_group)
    return symmetric_memory.rendezvous(memory, name)
