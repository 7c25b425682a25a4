"""Follow a shard through a reshape of its tensor.

A reshape is cut into the smallest groups of dims that hold the same elements: [2, 3, 64] → [6, 16, 4] is 2·3 → 6 and
64 → 16·4. Within a group equal contiguous parts stay equal contiguous parts only along the outermost dim, so a shard
moves from the outermost dim that went in to the outermost that comes out. Dims of length 1 hold nothing.
"""

from collections.abc import Sequence
from typing import NamedTuple


class DimGroup(NamedTuple):
    """Dims that are reshaped into each other, outermost first, those of length 1 left out."""

    before: tuple[int, ...]
    after: tuple[int, ...]


def groups(before: Sequence[int], after: Sequence[int]) -> list[DimGroup]:
    """Cut a reshape into its independent parts.

    Args:
        before: the shape that goes in, without zeros.
        after: the shape that comes out, of as many elements.
    """
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
    """Return which dims can be sharded before a reshape, and where the shards are after it.

    Args:
        before: the shape that goes in.
        after: the shape that comes out.
        size: parts; both dims must divide by it.

    Returns:
        Dim before → dim after.
    """
    if 0 in before:
        return {}
    pairs = {group.before[0]: group.after[0] for group in groups(before, after)}
    return {i: o for i, o in pairs.items() if before[i] % size == 0 and after[o] % size == 0}


def lost_shard_reason(before: Sequence[int], after: Sequence[int], dim: int, size: int) -> str:
    """Say why a shard of one dim does not survive a reshape.

    Args:
        before: the shape that goes in.
        after: the shape that comes out.
        dim: the sharded dim.
        size: parts.

    Returns:
        A clause about the dims, to follow "the reshape".
    """
    group = next(g for g in groups(before, after) if dim in g.before)
    if dim != group.before[0]:
        outer = group.before[0]
        return f"merges dim {dim} as an inner dim, under dim {outer}; a shard survives only on the outermost"
    out = group.after[0]
    return f"takes dim {dim} to dim {out} of size {after[out]}, which is not divisible by {size}"
