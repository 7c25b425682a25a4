"""The bytes of a collective that each rank sends."""

import math


def sent_bytes(kind: str, whole_bytes: int, ranks: int) -> int:
    """Return how many bytes of the whole tensor's each rank sends in the fewest steps that a ring takes."""
    share = {
        "all_gather": (ranks - 1) / ranks,
        "reduce_scatter": (ranks - 1) / ranks,
        "all_reduce": 2 * (ranks - 1) / ranks,
        "all_to_all": (ranks - 1) / ranks**2,
    }
    return math.ceil(share[kind] * whole_bytes)
