"""Assign each matrix to a rank, which orthogonalises it, and to a bucket, which is exchanged at once, by shapes alone.

The largest matrices come first, each to the rank with the least work so far. Buckets are filled in this order, so that
a bucket has matrices of about one size for every rank. Both the update and the forecast call `share_matrices`.
"""

import heapq
import math
from collections.abc import Sequence
from typing import NamedTuple

from titanlite.kernels.orthogonalise import orthogonalise_flops

BUCKET = 1 << 27
"""Elements that a rank collects in one bucket."""


class Shared(NamedTuple):
    """The owner, a rank, and the bucket of one matrix."""

    matrix: int  # index in `shapes`
    bucket: int
    owner: int


def part_of(shape: tuple[int, int], share: float | None) -> tuple[int, int]:
    """Return the shape of what is orthogonalised of a matrix: all, or a share of its shorter side (`dion2.py`)."""
    if share is None:
        return shape
    rows, columns = shape
    return (math.ceil(share * rows), columns) if rows <= columns else (rows, math.ceil(share * columns))


def share_matrices(
    shapes: Sequence[tuple[int, int]], ranks: int, steps: int, most: int = BUCKET, share: float | None = None
) -> list[Shared]:
    """Give each matrix an owner and a bucket. Return the matrices in the order of the buckets, largest first.

    Args:
        shapes: numbers of rows and columns of each matrix.
        ranks: number of ranks that may own matrices.
        steps: polynomials of an orthogonalisation.
        most: most elements that a rank collects in a bucket, unless a single matrix is larger.
        share: as in `part_of`.
    """
    flops = [orthogonalise_flops(*part_of(shape, share), steps) for shape in shapes]
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
