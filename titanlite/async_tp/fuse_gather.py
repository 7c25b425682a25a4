"""Replace an all-gather and the matmuls that read it by one `all_gather_matmul`.

All products of an operator have the same form, shard and scale (`gathered_values.py`). If the matmuls need different
ones, the largest group of matmuls with equal ones is fused. Other matmuls read the operator's gathered tensor.
"""

import math
from collections import defaultdict

import torch
from torch.fx import Node

from titanlite.async_tp.gathered_values import ALL_GATHER, Gathered, Product, product_of, shard_size
from titanlite.async_tp.graph_rewrite import (
    CollectiveNode,
    GraphRewrite,
    MissedError,
    UnpairedError,
    batches_error,
    check_ranks,
    collective_of,
    could_be_passed,
    descendants,
    first_matmul,
    is_matmul,
    matmul_of,
    name_of,
)
from titanlite.async_tp.layout_modes import Layout, Modes, identity, length, relocated, steps
from titanlite.async_tp.view_tracking import SPLITS, ViewTracker, path, sources
from titanlite.kernels.all_gather_matmul import FORMS  # this also registers the operator
from titanlite.kernels.products import out_dtype_of

aten = torch.ops.aten


def fuse_gather(rewrite: GraphRewrite, node: Node) -> tuple[tuple[str, ...], list[str], Node | None]:
    """Fuse an all-gather with the matmuls that read it.

    Returns:
        Names of the fused matmuls; why others are not fused; the all-gather of scales that is fused, too, or None.

    Raises:
        MissedError: nothing can be fused; the graph keeps the nodes inserted so far.
    """
    collective = collective_of(node)
    moved, uses = _readers(node)
    matmuls = dict.fromkeys(user for _, user in uses if is_matmul(user))
    if not matmuls:
        raise _no_reader_error(uses)
    check_ranks(collective)
    dependent = descendants(node)
    groups: dict[Gathered, list[Product]] = defaultdict(list)
    left: list[str] = []
    for matmul in matmuls:
        try:
            product = product_of(collective, matmul_of(matmul), moved, dependent)
            groups[product.gathered].append(product)
        except MissedError as missed:
            left.append(str(missed))
    if not groups:
        raise MissedError("; ".join(left))
    gathered = max(groups, key=lambda g: (len(groups[g]), -FORMS.index(g.form)))
    products = groups.pop(gathered)
    left += [f"{p.matmul.node.name} reads it in another form, {g.form}" for g, group in groups.items() for p in group]
    fused = [p.matmul.node for p in products]
    rewrite.check_undisturbed([node, *fused])
    _put_gather(rewrite, collective, gathered, products, moved, [n for n, user in uses if user not in fused])
    scales = gathered.scale if gathered.scale_dims is not None else None
    return tuple(n.name for n in fused), left, scales


def _readers(node: Node) -> tuple[dict[Node, Layout | None], list[tuple[Node, Node]]]:
    """Follow a node's elements. Return the nodes that only move them, with layouts, and pairs (moved node, reader).

    The layout of a split, which has several results, is None.
    """
    tracker = ViewTracker()
    moved: dict[Node, Layout | None] = {node: identity(node.meta["val"].shape)}
    uses, left = [], [node]
    while left:
        last = left.pop(0)
        for user in last.users:
            if user in moved:
                continue
            if user.target in SPLITS:
                moved[user] = None
                left.append(user)
                continue
            trace = tracker.trace(user) if sources(user) else None
            if trace is not None and trace.source is node:
                moved[user] = trace.layout
                left.append(user)
            else:
                uses.append((last, user))
    return moved, uses


def _put_gather(
    rewrite: GraphRewrite,
    collective: CollectiveNode,
    gathered: Gathered,
    products: list[Product],
    moved: dict[Node, Layout | None],
    escapes: list[Node],
) -> None:
    """Replace the collective and the matmuls by the operator; `escapes`: moved tensors that other nodes read."""
    rank, form = (collective.ranks, shard_size(collective)), gathered.form
    restored = _restored(escapes, moved, gathered)
    with rewrite.graph.inserting_before(products[0].matmul.node):
        shard = rewrite.typed(collective.input, gathered.dtype)
        shard = rewrite.arrange(shard, [tuple(mode for mode in modes if mode != rank) for modes in gathered.dims])
        others, biases, other_scales = [], [], []
        for p in products:
            other = rewrite.reshape(p.other, p.other.meta["val"].shape[-2:])
            others.append(rewrite.arrange(other, p.other_dims) if p.other_dims else other)
            if any(q.matmul.bias for q in products):
                like = p.matmul.node.meta["val"]
                biases.append(p.matmul.bias or rewrite.full(like.shape[-1:], 0, like))
            if p.other_scale is not None:
                by_row = [1, -1] if form.startswith("left") else [-1, 1]
                other_scales.append(rewrite.scale(p.other_scale, by_row))
        scale = gathered.scale
        if scale is not None and gathered.scale_dims is not None:
            scale = rewrite.arrange(scale.args[0], gathered.scale_dims)  # type: ignore[arg-type]
        elif scale is not None:
            scale = rewrite.scale(scale, [-1, 1])
        out_dtype = None if gathered.out_dtype == out_dtype_of(gathered.dtype, None) else gathered.out_dtype
        fused = rewrite.call(
            torch.ops.titanlite.all_gather_matmul.default,
            shard, others, gathered.dim, length(gathered.dims[gathered.dim]), collective.group,
            form, biases, scale, gathered.scale_of, other_scales, out_dtype, all(p.matmul.fast_accum for p in products),
        )  # fmt: skip
        whole = rewrite.item(fused, 0)
        instead = {}
        for i, p in enumerate(products, 1):
            instead[p.matmul.node] = rewrite.reshape(rewrite.item(fused, i), p.matmul.node.meta["val"].shape)
        for node, dims in restored.items():
            value = rewrite.contiguous(rewrite.arrange(whole, dims))
            instead[node] = rewrite.typed(value, node.meta["val"].dtype)
    of_scales: list[Node] = []
    if gathered.scale is not None and gathered.scale_dims is not None:
        used = (p.matmul.left_scale if form.startswith("left") else p.matmul.right_scale for p in products)
        of_scales = [n for each in used if each for n in path(each, gathered.scale)] + [gathered.scale]
    rewrite.replace(instead, [whole, *moved, *of_scales])


def _restored(escapes: list[Node], moved: dict[Node, Layout | None], gathered: Gathered) -> dict[Node, list[Modes]]:
    """Express moved tensors that other nodes read as modes of the operator's first result, the gathered tensor.

    A tensor that is not contiguous, such as a transpose, remains a view of a contiguous one, and keeps its strides.
    """
    places, total = [], 1
    for n, old in reversed([mode for modes in gathered.dims for mode in modes]):
        places.append((n, old, total))
        total *= n
    found: dict[Node, list[Modes]] = {}
    left = list(dict.fromkeys(escapes))
    while left:
        node = left.pop()
        layout = moved[node]
        if layout is not None and _is_row_major(node.meta["val"]):
            dims = [modes for dim in layout.dims if (modes := relocated(dim, places)) is not None]
            if len(dims) == len(layout.dims) and steps(dims, total) is not None:
                found[node] = dims
                continue
        if node.target == ALL_GATHER:
            raise MissedError("the gathered tensor is also read, and cannot be had from the operator's")
        left += [n for n in node.all_input_nodes if n in moved]
    return found


def _is_row_major(value: torch.Tensor) -> bool:
    """Return whether strides are row-major, also those of dims of length 1, which `is_contiguous` ignores."""
    return value.stride() == tuple(math.prod(value.shape[i + 1 :]) for i in range(value.ndim))


def _no_reader_error(uses: list[tuple[Node, Node]]) -> MissedError:
    """Return the error for a gather that no matmul reads: an UnpairedError unless a matmul is near."""
    users = [user for _, user in uses]
    for node, user in uses:
        if user in _elements_to(node) and (near := first_matmul(user, could_be_passed, _elements_to)):
            return MissedError(f"{name_of(user)} stands between it and {near.name}")
    if batches := batches_error(users):
        return batches
    for user in users:
        if (far := first_matmul(user, _moves_or_is_pointwise, _elements_to)) is not None:
            return UnpairedError(f"{name_of(user)} stands between it and {far.name}")
    names = ", ".join(dict.fromkeys(map(name_of, users)))
    return UnpairedError(f"no matmul reads it, but {names}" if names else "nothing reads it")


def _moves_or_is_pointwise(node: Node) -> bool:
    return torch.Tag.pointwise in getattr(node.target, "tags", ()) or bool(sources(node))


def _elements_to(node: Node) -> list[Node]:
    """Return the nodes that read a node's elements, except those that read them as indices."""
    return [user for user in node.users if user.target != aten.index.Tensor or user.args[0] is node]
