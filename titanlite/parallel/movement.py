"""Where the elements of a tensor lie after views, transposes, splits and concatenations: an exact, static account.

Compilers spell one gather in many ways: a collective along dim 0, then split and cat, or slices, or views alone where a
dim is 1, then a reshape to a matrix and perhaps a transpose. None of these computes anything. This file follows them,
so that a pass asks where the ranks' rows are instead of matching each spelling.

The source is taken as flat, in row-major order. Each dim of a moved tensor is an ordered product of atoms
`(size, stride)`, strides counted in the flat source, the last atom running fastest (the layouts of CuTe). A gathered
`[ranks·B, S, D]`, split over ranks and joined along dim 1 for `[B, ranks·S, D]`, has the dims

    ((B, S·D),)   ((ranks, B·S·D), (S, D))   ((D, 1),)

which says all: ranks are outermost in dim 1, each brings S rows, and B lies around them.
"""

import math
import operator
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch.fx import Node

from titanlite.parallel.calls import arguments_of

aten = torch.ops.aten

Atom = tuple[int, int]
Atoms = tuple[Atom, ...]

RESHAPES = {
    aten.view.default,
    aten.reshape.default,
    aten._unsafe_view.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.unsqueeze.default,
    aten.expand.default,
    aten.select_scatter.default,  # into the only place of its dim, as the gradient of x[0] for a batch of one
}
COPIES = {
    aten.clone.default,
    aten.alias.default,
    aten.detach.default,
    aten.view.dtype,
    torch.ops._c10d_functional.wait_tensor.default,
}
SPLITS = {aten.split.Tensor, aten.split_with_sizes.default}


class Layout(NamedTuple):
    """Where the elements of a moved tensor come from.

    Attributes:
        dims: atoms of each dim; of a dim of length 1, none.
        offset: of the first element, in the flat source.
    """

    dims: tuple[Atoms, ...]
    offset: int = 0

    @property
    def atoms(self) -> Atoms:
        """All atoms, outermost first."""
        return tuple(atom for dim in self.dims for atom in dim)


class Moved(NamedTuple):
    """A tensor as a rearrangement of another one.

    Attributes:
        source: the node that computed the elements.
        layout: where they lie.
    """

    source: Node
    layout: Layout


def merged(atoms: Sequence[Atom]) -> Atoms:
    """The same elements in as few atoms as possible."""
    out: list[Atom] = []
    for size, stride in atoms:
        if size == 1:
            continue
        if out and out[-1][1] == size * stride:
            out[-1] = (out[-1][0] * size, stride)
        else:
            out.append((size, stride))
    return tuple(out)


def length(atoms: Sequence[Atom]) -> int:
    """How many elements."""
    return math.prod(size for size, _ in atoms)


def identity(shape: Sequence[int]) -> Layout:
    """The layout of the source itself."""
    strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    return Layout(tuple(merged([atom]) for atom in zip(shape, strides, strict=True)))


def reshaped(layout: Layout, shape: Sequence[int]) -> Layout | None:
    """The layout under another shape, or None if an atom would have to be cut unevenly."""
    left, dims = list(reversed(merged(layout.atoms))), []
    for size in shape:
        taken: list[Atom] = []
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
    """A range of one dim, or None if it is not an aligned one."""
    atoms, offset, kept = list(layout.dims[dim]), layout.offset, ()
    while atoms:
        (_, stride), inner = atoms[0], length(atoms[1:])
        if start % inner == 0 and size % inner == 0:
            offset += start // inner * stride
            kept = merged([(size // inner, stride), *atoms[1:]])
            break
        if start // inner != (start + size - 1) // inner:
            return None
        offset += start // inner * stride
        start %= inner
        atoms = atoms[1:]
    return Layout((*layout.dims[:dim], kept, *layout.dims[dim + 1 :]), offset)


def joined(layouts: Sequence[Layout], dim: int) -> Layout | None:
    """Pieces side by side along a dim, or None if they are not equal pieces at equal distances."""
    first = layouts[0]
    steps = {b.offset - a.offset for a, b in pairwise(layouts)}
    if len(layouts) == 1:
        return first
    if len(steps) != 1 or min(steps) <= 0 or any(each.dims != first.dims for each in layouts):
        return None
    dims = list(first.dims)
    dims[dim] = merged([(len(layouts), steps.pop()), *dims[dim]])
    return Layout(tuple(dims), first.offset)


def relocated(atoms: Atoms, places: Sequence[tuple[int, int, int]]) -> Atoms | None:
    """The atoms in another flat tensor.

    Args:
        atoms: in the old flat tensor.
        places: how the old flat tensor lies in the new one: (size, old stride, new stride) each.

    Returns:
        The atoms in the new flat tensor, or None if one of them is in no place, or cut unevenly.
    """
    out: list[Atom] = []
    for size, stride in atoms:
        tail: list[Atom] = []
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
    """How to build a layout from its source: reshape, permute, reshape."""

    sizes: list[int]
    order: list[int]
    shape: list[int]


def steps(dims: Sequence[Atoms], total: int) -> Steps | None:
    """How to build a tensor of these dims from all elements of the flat source, or None if they are not all there.

    Args:
        dims: atoms of each dim.
        total: elements of the source.
    """
    atoms = [atom for dim in dims for atom in dim]
    by_stride = sorted(range(len(atoms)), key=lambda i: -atoms[i][1])
    rest = total
    for i in by_stride:
        size, stride = atoms[i]
        if size * stride != rest:
            return None
        rest = stride
    if rest != 1:
        return None
    order = [by_stride.index(i) for i in range(len(atoms))]
    return Steps([atoms[i][0] for i in by_stride], order, [length(dim) for dim in dims])


def is_static(node: object) -> bool:
    """Whether a node is one tensor of known shape, with elements."""
    value = node.meta.get("val") if isinstance(node, Node) else None
    return isinstance(value, torch.Tensor) and all(type(n) is int and n > 0 for n in value.shape)


class Movements:
    """Traces nodes to what computed them, each once."""

    def __init__(self) -> None:
        self._known: dict[Node, Moved] = {}

    def trace(self, node: Node) -> Moved:
        """Follow a node back through movements.

        Args:
            node: a tensor of static shape.

        Returns:
            What computed its elements, itself if not a movement, and where they lie.
        """
        chain = [node]  # iterative: a chain of movements may be long
        while chain:
            last = chain[-1]
            pending = [n for n in sources(last) if n not in self._known]
            if pending:
                chain.extend(pending)
            else:
                self._known.setdefault(last, self._moved(last) or Moved(last, identity(last.meta["val"].shape)))
                chain.pop()
        return self._known[node]

    def _moved(self, node: Node) -> Moved | None:
        """One movement on top of those of its inputs, None if it cannot be expressed."""
        before = [self._known[n] for n in sources(node)]
        if not before or any(b.source is not before[0].source for b in before):
            return None
        source, layout = before[0]
        target, shape = node.target, list(node.meta["val"].shape)
        given = arguments_of(node.args[0] if target is operator.getitem else node)  # type: ignore[arg-type]
        dim = given["dim"] % len(layout.dims) if isinstance(given.get("dim"), int) and layout.dims else 0
        out: Layout | None = None
        if target in COPIES:
            out = layout
        elif target in RESHAPES:
            out = reshaped(layout, shape)
        elif target is aten.cat.default:
            out = joined([b.layout for b in before], dim)
        elif target is aten.slice.Tensor:
            start, whole = given["start"] or 0, length(layout.dims[dim])
            out = narrowed(layout, dim, min(start + whole if start < 0 else start, whole), shape[dim])
        elif target is aten.select.int:
            one = narrowed(layout, dim, given["index"] % length(layout.dims[dim]), 1)
            out = one and Layout((*one.dims[:dim], *one.dims[dim + 1 :]), one.offset)
        elif target is operator.getitem:  # of a split
            split, index = node.args
            lengths = [v.shape[dim] for v in split.meta["val"]]  # type: ignore[union-attr]
            out = narrowed(layout, dim, sum(lengths[:index]), lengths[index])  # type: ignore[index]
        elif target is aten.permute.default:
            out = Layout(tuple(layout.dims[d] for d in given["dims"]), layout.offset)
        elif shape:  # a transpose
            i, j = (given["dim0"], given["dim1"]) if target is aten.transpose.int else (0, -1)
            dims = list(layout.dims)
            dims[i], dims[j] = dims[j], dims[i]
            out = Layout(tuple(dims), layout.offset)
        return out and Moved(source, out)


def sources(node: Node) -> list[Node]:
    """The tensors that a node moves; none if it is not a movement."""
    target = node.target
    args: Any = node.args
    inputs: list[Any] = []
    if target is operator.getitem:
        inputs = [args[0].args[0]] if isinstance(args[0], Node) and args[0].target in SPLITS else []
    elif target is aten.cat.default:
        inputs = list(args[0])
    elif target is aten.slice.Tensor and arguments_of(node)["step"] != 1:
        inputs = []
    elif target is aten.select_scatter.default:
        inputs = [args[1]]
    elif target in RESHAPES or target in COPIES or target in _TURNS:
        inputs = [args[0]]
    if not all(is_static(n) for n in [node, *inputs]):
        return []
    may_grow = target in (aten.expand.default, aten.select_scatter.default)
    if may_grow and node.meta["val"].numel() != inputs[0].meta["val"].numel():
        return []
    if inputs and node.meta["val"].dtype.itemsize != inputs[0].meta["val"].dtype.itemsize:
        return []
    return inputs


_TURNS = {aten.slice.Tensor, aten.select.int, aten.permute.default, aten.t.default, aten.transpose.int}


def path(node: Node, source: Node) -> Iterator[Node]:
    """The movements from a node back to its source: the node first, without the source, splits included."""
    seen, left = {source}, [node]
    while left:
        last = left.pop()
        if last in seen:
            continue
        seen.add(last)
        yield last
        left.extend(last.all_input_nodes if last.target in {operator.getitem, *SPLITS} else sources(last))
