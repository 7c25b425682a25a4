"""Follow a shard through a reshape of its tensor.

A reshape is split into the smallest groups of dims with the same number of elements before and after: [2, 3, 64] →
[6, 16, 4] is 2·3 → 6 and 64 → 16·4. Only a shard of a group's outermost dim survives, as a shard of the group's
outermost dim after the reshape. Dims of length 1 are in no group.
"""

from collections.abc import Sequence
from typing import NamedTuple


class DimGroup(NamedTuple):
    """Dims that are reshaped into each other, outermost first."""

    before: tuple[int, ...]
    after: tuple[int, ...]


def groups(before: Sequence[int], after: Sequence[int]) -> list[DimGroup]:
    """Split a reshape into its smallest groups of dims; no dim may have length 0."""
    left = [d for d, size in enumerate(before) if size != 1]
    right = [d for d, size in enumerate(after) if size != 1]
    found: list[DimGroup] = []
    while left:
        ins, outs = [left.pop(0)], [right.pop(0)]
        n_in, n_out = before[ins[0]], after[outs[0]]
        while n_in != n_out:
            if n_in < n_out:
                ins.append(left.pop(0))
                n_in *= before[ins[-1]]
            else:
                outs.append(right.pop(0))
                n_out *= after[outs[-1]]
        found.append(DimGroup(tuple(ins), tuple(outs)))
    return found


def moved_shards(before: Sequence[int], after: Sequence[int], size: int) -> dict[int, int]:
    """Return {dim before: dim after} for the shards in `size` parts that survive a reshape."""
    if 0 in before:
        return {}
    pairs = {group.before[0]: group.after[0] for group in groups(before, after)}
    return {i: o for i, o in pairs.items() if before[i] % size == 0 and after[o] % size == 0}


def lost_shard_reason(before: Sequence[int], after: Sequence[int], dim: int, size: int) -> str:
    """Return why a shard of one dim, in `size` parts, does not survive, as a clause to follow "the reshape"."""
    group = next(g for g in groups(before, after) if dim in g.before)
    if dim != group.before[0]:
        outer = group.before[0]
        return f"merges dim {dim} as an inner dim, under dim {outer}; a shard survives only on the outermost"
    out = group.after[0]
    return f"takes dim {dim} to dim {out} of size {after[out]}, which is not divisible by {size}"
