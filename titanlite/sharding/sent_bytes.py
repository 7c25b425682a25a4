"""The bytes that each rank sends in a collective."""

import math


def sent_bytes(kind: str, whole_bytes: int, ranks: int) -> int:
    """Return the bytes that each rank sends in a collective around a ring; `whole_bytes`: of the unsharded tensor."""
    share = {
        "all_gather": (ranks - 1) / ranks,
        "reduce_scatter": (ranks - 1) / ranks,
        "all_reduce": 2 * (ranks - 1) / ranks,
        "all_to_all": (ranks - 1) / ranks**2,
    }
    return math.ceil(share[kind] * whole_bytes)
