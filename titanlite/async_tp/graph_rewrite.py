"""Read and replace matmuls and collectives of a graph after autograd."""

import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch._guards import detect_fake_mode
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from titanlite.async_tp.layout_modes import Modes, length, steps
from titanlite.async_tp.view_tracking import SPLITS, is_static, sources
from titanlite.kernels.products import MAX_RANKS
from titanlite.parallel.calls import arguments_of

aten = torch.ops.aten

MATMULS = {
    aten.mm.default,
    aten.mm.dtype,
    aten.addmm.default,
    aten.addmm.dtype,
    aten._scaled_mm.default,
}


_NO_ARITHMETIC = {
    aten._to_copy.default,
    torch.ops.prims.convert_element_type.default,
    aten.constant_pad_nd.default,
    aten.index.Tensor,
    aten.as_strided.default,
    aten.slice_scatter.default,
    aten.select_scatter.default,
}
_FACTORS = {aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar}


class MissedError(Exception):
    """A collective is not fused; the message is the reason."""


class UnpairedError(MissedError):
    """A collective is rightly not fused: no matmul is next to it, or the matmul is fused with another collective."""


class Matmul(NamedTuple):
    """A matmul of a graph, `left [M, K] @ right [K, N] + bias`; both operands may have a leading batch of 1."""

    node: Node
    left: Node
    right: Node
    bias: Node | None
    left_scale: Node | None
    right_scale: Node | None
    fast_accum: bool

    @property
    def is_scaled(self) -> bool:
        """Return whether the operands are float8 with scales."""
        return self.left_scale is not None


class CollectiveNode(NamedTuple):
    """An all-gather or reduce-scatter over dim 0."""

    node: Node
    input: Node
    ranks: int
    group: str


def is_matmul(node: Node) -> bool:
    """Return whether a node multiplies matrices, or a batch of one matrix, as torch does for `x [1, S, D] @ w`."""
    if node.target == aten.bmm.default:
        return is_static(node) and node.meta["val"].shape[0] == 1
    return node.target in MATMULS


def could_be_passed(node: Node) -> bool:
    """Return whether a node between collective and matmul could be moved elsewhere: a cast, view, slice or factor."""
    if node.target in _FACTORS:
        return not isinstance(node.args[1], Node)
    return node.target in _NO_ARITHMETIC or node.target in SPLITS or bool(sources(node))


def matmul_of(node: Node) -> Matmul:
    """Return the operands of a matmul node; raise MissedError if the fused operators cannot compute it."""
    given = arguments_of(node)
    if not all(type(n) is int for n in node.meta["val"].shape):
        raise MissedError(f"{node.name} has a size that is symbolic")
    names = ("mat1", "mat2") if "mat1" in given else ("self", "mat2")
    left, right = (given[name] for name in names)
    if any(given.get(name, 1) != 1 for name in ("alpha", "beta")):
        raise MissedError(f"{node.name} scales its terms (alpha, beta)")
    if given.get("scale_result") is not None:
        raise MissedError(f"{node.name} scales its result")
    bias = given["self"] if "mat1" in given else given.get("bias")
    out = node.meta["val"]
    if bias is not None and list(bias.meta["val"].shape) != [out.shape[-1]]:
        raise MissedError(f"{node.name} adds a tensor of shape {list(bias.meta['val'].shape)}, no bias")
    if not (left.meta["val"].is_floating_point() and out.dtype.itemsize > 1):
        raise MissedError(f"{node.name} multiplies {left.meta['val'].dtype} into {out.dtype}")
    scales = given.get("scale_a"), given.get("scale_b")
    for scale, rows in zip(scales, out.shape[-2:], strict=True):
        if scale is not None:
            value = scale.meta["val"]
            if value.dtype != torch.float32 or value.numel() not in (1, rows):
                raise MissedError(f"{node.name} has scales of shape {list(value.shape)}, {value.dtype}")
    return Matmul(node, left, right, bias, *scales, bool(given.get("use_fast_accum")))


def collective_of(node: Node) -> CollectiveNode:
    """Return the arguments of an all-gather or reduce-scatter; raise MissedError if its shape or group is unknown."""
    source, given = node.args[0], arguments_of(node)
    group = given["group_name"]
    name = group if isinstance(group, str) else getattr(group, "group_name", None)
    if not isinstance(name, str):
        raise MissedError("its group has no name")
    if not is_static(node) or not is_static(source):
        raise MissedError("a size that is symbolic or zero")
    return CollectiveNode(node, source, given["group_size"], name)  # type: ignore[arg-type]


def check_ranks(collective: CollectiveNode) -> None:
    """Raise MissedError for a group of a size that the fused operators do not support."""
    if collective.ranks == 1:
        raise UnpairedError("a group of 1 rank, which waits for nobody")
    if collective.ranks > MAX_RANKS:
        raise MissedError(f"a group of {collective.ranks} ranks; want 2 to {MAX_RANKS}")


class GraphRewrite:
    """Inserts, replaces and erases nodes of a graph."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self._fake_mode = detect_fake_mode([node.meta.get("val") for node in graph.nodes])
        self._place = {node: i for i, node in enumerate(graph.nodes)}
        self._mutations = [i for node, i in self._place.items() if _mutates(node)]
        self.erased: set[Node] = set()
        self._new: list[Node] = []

    def check_undisturbed(self, nodes: Iterable[Node]) -> None:
        """Raise MissedError if a node between the first and the last of `nodes` changes tensors in place."""
        places = [self._place[node] for node in nodes]
        if any(min(places) < i < max(places) for i in self._mutations):
            raise MissedError("tensors are changed in place between the two")

    def call(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        """Insert a call, with the fake tensor of its result."""
        node = self.graph.call_function(target, args, kwargs)
        self._new.append(node)
        if self._fake_mode is None:
            raise MissedError("a graph without fake tensors, whose shapes are not known")
        try:
            with self._fake_mode:
                node.meta["val"] = target(*map_arg(args, lambda n: n.meta["val"]), **kwargs)
        except ValueError as problem:  # an operator's own check
            raise MissedError(str(problem)) from problem
        return node

    def item(self, node: Node, index: int) -> Node:
        """Insert the selection of the result `index` of a node."""
        return self.call(operator.getitem, node, index)

    def reshape(self, node: Node, shape: Sequence[int]) -> Node:
        """Insert a reshape, unless the node has this shape."""
        if list(node.meta["val"].shape) == list(shape):
            return node
        return self.call(aten.reshape.default, node, list(shape))

    def arrange(self, node: Node, dims: Sequence[Modes]) -> Node:
        """Insert a rearrangement of a node's elements, by a view if possible; `dims`: modes over the flat node.

        Raises:
            MissedError: `dims` does not hold each element of the source once.
        """
        total = math.prod(node.meta["val"].shape)
        if not total:  # this rank's part of a weight is empty, but the rank still takes part in the collective
            return self.reshape(node, [length(modes) for modes in dims])
        how = steps(dims, total)
        if how is None:
            raise MissedError("rows that neither lie apart nor follow each other")
        if how.order != sorted(how.order):
            node = self.call(aten.permute.default, self.reshape(node, how.sizes), how.order)
        return self.reshape(node, how.shape)

    def typed(self, node: Node, dtype: torch.dtype) -> Node:
        """Insert a view of the same bytes in another dtype, unless the node has this dtype."""
        return node if node.meta["val"].dtype == dtype else self.call(aten.view.dtype, node, dtype)

    def contiguous(self, node: Node) -> Node:
        """Insert a contiguous copy, unless the node is contiguous."""
        if node.meta["val"].is_contiguous():
            return node
        return self.call(aten.clone.default, node, memory_format=torch.contiguous_format)

    def scale(self, node: Node, by_row: Sequence[int]) -> Node:
        """Insert a reshape of a scale: to [] if it is one number, else to the shape `by_row`."""
        return self.reshape(node, [] if node.meta["val"].numel() == 1 else by_row)

    def full(self, shape: Sequence[int], value: float, like: torch.Tensor) -> Node:
        """Insert a tensor filled with `value`, in the dtype and on the device of `like`."""
        return self.call(aten.full.default, list(shape), value, dtype=like.dtype, device=like.device)

    def replace(self, instead: Mapping[Node, Node], nodes: Iterable[Node]) -> None:
        """Replace the keys of `instead` by its values; erase the keys and `nodes`, except nodes that are still read."""
        for old, new in instead.items():
            old.replace_all_uses_with(new)
        self.erase([*instead, *nodes])

    def erase(self, nodes: Iterable[Node]) -> None:
        """Erase the nodes that nothing reads any more."""
        left = {n for n in nodes if n not in self.erased}
        while dead := [n for n in left if not n.users]:
            for node in dead:
                self.graph.erase_node(node)
                self.erased.add(node)
                left.remove(node)

    def undo(self) -> None:
        """Erase the nodes inserted for a rewrite that turned out to be impossible."""
        self.erase(self._new)


def first_matmul(start: Node, passes: Callable[[Node], bool], onwards: Callable[[Node], Iterable[Node]]) -> Node | None:
    """Search for a matmul from `start` on, through nodes that satisfy `passes`; `onwards` returns the next nodes."""
    found, left = {start}, [start]
    while left:
        last = left.pop()
        if is_matmul(last):
            return last
        if passes(last):
            fresh = [n for n in onwards(last) if n not in found]
            found.update(fresh)
            left += fresh
    return None


def batches_error(nodes: Iterable[Node]) -> UnpairedError | None:
    """Return the error for the first node that multiplies batches of matrices, if one does."""
    why = "multiplies batches of matrices (bmm), for which there is no operator"
    batched = (aten.bmm.default, aten.baddbmm.default)
    return next((UnpairedError(f"{node.name} {why}") for node in nodes if node.target in batched), None)


def descendants(node: Node) -> set[Node]:
    """Return a node and all nodes that depend on it."""
    found, left = {node}, [node]
    while left:
        for user in left.pop().users:
            if user not in found:
                found.add(user)
                left.append(user)
    return found


def name_of(node: Node) -> str:
    """Return the short name of a node's operator, such as "mm"."""
    if node.op == "output":
        return "the graph's result"
    packet = getattr(node.target, "overloadpacket", None)
    return packet.__name__ if packet is not None else str(getattr(node.target, "__name__", node.target))


def _mutates(node: Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return node.op == "call_function" and schema is not None and schema.is_mutable
