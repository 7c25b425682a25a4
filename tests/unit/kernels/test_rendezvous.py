"""Ranks that have shared memory a different number of times find each other."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import torch.distributed as dist

from titanlite.kernels.device.rendezvous import _GroupStore


def exchanges(store: dist.Store, rank: int, first: int) -> list[list[bytes]]:
    """What torch does in a rendezvous: numbered exchanges, the first of which a process counts as `first`."""
    seen = []
    for number in (first, first + 1):
        keys = [f"CUDASymmetricMemory/{number}/{r}" for r in range(2)]
        store.set(keys[rank], f"{rank}, {number - first}")
        seen.append(dist.Store.multi_get(store, keys))  # from C++, through the overridden `get`
    return seen


def test_numbers_of_a_group_are_its_own():
    under = dist.HashStore()
    under.set_timeout(timedelta(seconds=200))
    stores = [_GroupStore(under), _GroupStore(under)]
    with ThreadPoolExecutor(2) as pool:
        ranks = [pool.submit(exchanges, stores[0], 0, 3), pool.submit(exchanges, stores[1], 1, 12)]
        seen = [rank.result(timeout=300) for rank in ranks]
    assert seen[0] == seen[1] == [[b"0, 0", b"1, 0"], [b"0, 1", b"1, 1"]]
