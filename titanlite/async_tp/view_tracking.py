"""Track the exact positions of a tensor's elements through views, transposes, splits and concatenations of a graph.

Compilers write one gather in many ways: a collective along dim 0, then split and cat, or slices, or only views if a dim
is 1, then a reshape to a matrix and perhaps a transpose. None of these operators changes an element. This file follows
them, so that a pass knows the positions of the ranks' rows, and matches no patterns. The arithmetic is in
`layout_modes.py`.
"""

import operator
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch.fx import Node

from titanlite.async_tp.layout_modes import Layout, identity, joined, length, narrowed, reshaped
from titanlite.parallel.calls import arguments_of

aten = torch.ops.aten

RESHAPES = {
    aten.view.default,
    aten.reshape.default,
    aten._unsafe_view.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.unsqueeze.default,
    aten.expand.default,
    aten.select_scatter.default,  # into a dim of length 1, as the gradient of x[0] for a batch of one
}
COPIES = {
    aten.clone.default,
    aten.alias.default,
    aten.detach.default,
    aten.view.dtype,
    torch.ops._c10d_functional.wait_tensor.default,
}
SPLITS = {aten.split.Tensor, aten.split_with_sizes.default}


class Moved(NamedTuple):
    """A tensor described as a rearrangement of another tensor."""

    source: Node  # the node that computed the elements
    layout: Layout  # the elements' positions in the result of `source`


def is_static(node: object) -> bool:
    """Return whether a node is one tensor of a known shape, and not empty."""
    value = node.meta.get("val") if isinstance(node, Node) else None
    return isinstance(value, torch.Tensor) and all(type(n) is int and n > 0 for n in value.shape)


class ViewTracker:
    """Traces nodes back to the nodes that computed their elements, each node once."""

    def __init__(self) -> None:
        self._known: dict[Node, Moved] = {}

    def trace(self, node: Node) -> Moved:
        """Return the node that computed a static node's elements, itself unless it only moves them, and a layout."""
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
        """Compose a node's rearrangement with those of its inputs; None unless the result is a layout of one source."""
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
        elif target is operator.getitem:  # one result of a split
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
    """Return the inputs whose elements a node only moves; an empty list if it also computes."""
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
    elif target in RESHAPES or target in COPIES or target in _REORDERED:
        inputs = [args[0]]
    if not all(is_static(n) for n in [node, *inputs]):
        return []
    may_grow = target in (aten.expand.default, aten.select_scatter.default)
    if may_grow and node.meta["val"].numel() != inputs[0].meta["val"].numel():
        return []
    if inputs and node.meta["val"].dtype.itemsize != inputs[0].meta["val"].dtype.itemsize:
        return []
    return inputs


_REORDERED = {aten.slice.Tensor, aten.select.int, aten.permute.default, aten.t.default, aten.transpose.int}


def path(node: Node, source: Node) -> Iterator[Node]:
    """Yield the nodes that move elements from `source` to `node`, backwards: `node` and splits, but not `source`."""
    seen, left = {source}, [node]
    while left:
        last = left.pop()
        if last in seen:
            continue
        seen.add(last)
        yield last
        left.extend(last.all_input_nodes if last.target in {operator.getitem, *SPLITS} else sources(last))
