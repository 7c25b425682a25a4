"""Layouts and their arithmetic. A layout maps the elements of a rearranged tensor to positions in a source tensor.

The source is viewed as flat, in row-major order. Each dim of a rearranged tensor is an ordered product of modes
`(size, stride)`. Strides count elements of the flat source, and the last mode runs fastest (the layouts of CuTe). A
gathered `[ranks·B, S, D]`, split over ranks and joined along dim 1 to `[B, ranks·S, D]`, has the dims

    ((B, S·D),)   ((ranks, B·S·D), (S, D))   ((D, 1),)

that is, ranks are outermost in dim 1, each with S rows. This file needs no torch.
"""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

Mode = tuple[int, int]
Modes = tuple[Mode, ...]


class Layout(NamedTuple):
    """The positions in a flat source from which the elements of a rearranged tensor come."""

    dims: tuple[Modes, ...]  # modes of each dim; a dim of length 1 has none
    offset: int = 0  # of the first element, in the flat source

    @property
    def modes(self) -> Modes:
        """Return the modes of all dims, outermost first."""
        return tuple(mode for dim in self.dims for mode in dim)


def merged(modes: Sequence[Mode]) -> Modes:
    """Return the fewest modes that have the same elements in the same order."""
    out: list[Mode] = []
    for size, stride in modes:
        if size == 1:
            continue
        if out and out[-1][1] == size * stride:
            out[-1] = (out[-1][0] * size, stride)
        else:
            out.append((size, stride))
    return tuple(out)


def length(modes: Sequence[Mode]) -> int:
    """Return the number of elements of modes."""
    return math.prod(size for size, _ in modes)


def identity(shape: Sequence[int]) -> Layout:
    """Return the layout of a source of this shape over itself."""
    strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    return Layout(tuple(merged([mode]) for mode in zip(shape, strides, strict=True)))


def reshaped(layout: Layout, shape: Sequence[int]) -> Layout | None:
    """Return the layout under another shape, or None if a mode would have to be cut unevenly."""
    left, dims = list(reversed(merged(layout.modes))), []
    for size in shape:
        taken: list[Mode] = []
        while size > 1:
            if not left:
                return None
            n, stride = left.pop()
            if n > size and n % size == 0:
                left.append((n // size, stride))
                n, stride = size, stride * (n // size)
            elif size % n:
                return None
            taken.append((n, stride))
            size //= n
        dims.append(merged(taken))
    return Layout(tuple(dims), layout.offset)


def narrowed(layout: Layout, dim: int, start: int, size: int) -> Layout | None:
    """Return the layout of `size` indices from `start` on of one dim, or None if a mode would be cut unevenly."""
    modes, offset, kept = list(layout.dims[dim]), layout.offset, ()
    while modes:
        (_, stride), inner = modes[0], length(modes[1:])
        if start % inner == 0 and size % inner == 0:
            offset += start // inner * stride
            kept = merged([(size // inner, stride), *modes[1:]])
            break
        if start // inner != (start + size - 1) // inner:
            return None
        offset += start // inner * stride
        start %= inner
        modes = modes[1:]
    return Layout((*layout.dims[:dim], kept, *layout.dims[dim + 1 :]), offset)


def joined(layouts: Sequence[Layout], dim: int) -> Layout | None:
    """Join pieces side by side along a dim; None if they are not equal pieces at equal distances."""
    first = layouts[0]
    steps = {b.offset - a.offset for a, b in pairwise(layouts)}
    if len(layouts) == 1:
        return first
    if len(steps) != 1 or min(steps) <= 0 or any(each.dims != first.dims for each in layouts):
        return None
    dims = list(first.dims)
    dims[dim] = merged([(len(layouts), steps.pop()), *dims[dim]])
    return Layout(tuple(dims), first.offset)


def relocated(modes: Modes, places: Sequence[tuple[int, int, int]]) -> Modes | None:
    """Express modes of one flat tensor as modes of a new flat tensor, which has the same elements in another order.

    Args:
        modes: in the old flat tensor.
        places: (size, old stride, new stride) of each mode of the old flat tensor in the new one.

    Returns:
        The modes in the new flat tensor, or None if one is outside of `places`, or would be cut unevenly.
    """
    out: list[Mode] = []
    for size, stride in modes:
        tail: list[Mode] = []
        while size > 1:
            place = next((p for p in places if p[1] <= stride < p[0] * p[1]), None)
            if place is None:
                return None
            n, old, new = place
            if stride % old or n % (stride // old):
                return None
            inside, room = stride // old, n // (stride // old)
            if size > room and size % room:
                return None
            taken = min(size, room)
            tail.append((taken, new * inside))
            size, stride = size // taken, stride * taken
        out.extend(reversed(tail))
    return merged(out)


class Steps(NamedTuple):
    """The steps from a flat source to a layout: reshape to `sizes`, permute by `order`, reshape to `shape`."""

    sizes: list[int]
    order: list[int]
    shape: list[int]


def steps(dims: Sequence[Modes], total: int) -> Steps | None:
    """Return how to build a tensor of these dims from `total` elements of a flat source; None if some are missing."""
    modes = [mode for dim in dims for mode in dim]
    by_stride = sorted(range(len(modes)), key=lambda i: -modes[i][1])
    rest = total
    for i in by_stride:
        size, stride = modes[i]
        if size * stride != rest:
            return None
        rest = stride
    if rest != 1:
        return None
    order = [by_stride.index(i) for i in range(len(modes))]
    return Steps([modes[i][0] for i in by_stride], order, [length(dim) for dim in dims])
