"""Decide which rank orthogonalises which matrix, and which matrices travel together: by their shapes alone.

The largest are given away first, each to the rank that has least to compute so far. They travel in buckets, in that
order, so that every bucket has matrices of about one size for every rank. The forecast asks here as the update does.
"""

import heapq
from collections.abc import Sequence
from typing import NamedTuple

from titanlite.kernels.orthogonalise import orthogonalise_flops

BUCKET = 1 << 27
"""Elements that a rank collects at a time."""


class Shared(NamedTuple):
    """One matrix.

    Attributes:
        matrix: its place among those that are shared out.
        bucket: that it travels in.
        owner: the rank that orthogonalises it.
    """

    matrix: int
    bucket: int
    owner: int


def share_matrices(shapes: Sequence[tuple[int, int]], ranks: int, steps: int, most: int = BUCKET) -> list[Shared]:
    """Give each matrix an owner and a bucket.

    Args:
        shapes: R and C of each.
        ranks: that may own some.
        steps: polynomials.
        most: elements that a rank collects at a time; or one matrix, if it is larger.

    Returns:
        All of them, in the order in which they are given away.
    """
    flops = [orthogonalise_flops(*shape, steps) for shape in shapes]
    order = sorted(range(len(shapes)), key=lambda i: (-flops[i], shapes[i]))
    work, bucket, found = [(0, rank) for rank in range(ranks)], -1, list[Shared]()  # a heap already
    collected = [0] * ranks
    for i in order:
        done, owner = work[0]
        heapq.heapreplace(work, (done + flops[i], owner))
        n = shapes[i][0] * shapes[i][1]
        if bucket < 0 or (collected[owner] and collected[owner] + n > most):
            bucket, collected = bucket + 1, [0] * ranks
        collected[owner] += n
        found.append(Shared(i, bucket, owner))
    return found
