"""Counts the collectives of whatever runs under it, functional ones and those of `torch.distributed`."""

from collections import Counter

from torch.utils._python_dispatch import TorchDispatchMode


class CountCollectives(TorchDispatchMode):
    """`counts` holds calls by op, "all_gather_into_tensor" or "allreduce_"."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counter[str]()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace in ("c10d", "_c10d_functional") and func.overloadpacket.__name__ != "wait_tensor":
            self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))
