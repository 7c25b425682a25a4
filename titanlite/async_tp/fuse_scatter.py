"""Replace a matmul, or a sum of matmuls, and the reduce-scatter that reads it by one `matmul_reduce_scatter`.

A reduce-scatter gives rank r the r-th part of dim 0. Splits and concatenations that moved another dim to dim 0 are
followed back to the matmul's result `[M, N]`. The stride of the ranks in this result shows which rows or columns each
rank keeps, whatever the shapes in between.

A bias that each rank adds before the reduction becomes a product of a column of ones and the bias: the sum over the
ranks then includes the ranks' biases, in the same accumulator.
"""

from typing import NamedTuple

import torch
from torch.fx import Node

import titanlite.kernels.matmul_reduce_scatter  # noqa: F401  # registers the operator
from titanlite.async_tp.graph_rewrite import (
    CollectiveNode,
    GraphRewrite,
    Matmul,
    MissedError,
    UnpairedError,
    batches_error,
    check_ranks,
    collective_of,
    could_be_passed,
    first_matmul,
    is_matmul,
    matmul_of,
    name_of,
)
from titanlite.async_tp.layout_modes import Layout, merged, relocated, reshaped, steps
from titanlite.async_tp.view_tracking import ViewTracker, is_static, path
from titanlite.kernels.products import MAX_PAIRS, dtype_of_sum, out_dtype_of

aten = torch.ops.aten
REDUCE_SCATTER = torch.ops._c10d_functional.reduce_scatter_tensor.default


class Sum(NamedTuple):
    """The reduced tensor, as a sum of matmuls and biases."""

    matmuls: list[Matmul]  # terms of the sum
    biases: list[Node]  # [N] each, added to all rows
    nodes: list[Node]  # from the products to the reduce-scatter


def fuse_scatter(rewrite: GraphRewrite, node: Node) -> tuple[str, ...]:
    """Fuse a reduce-scatter with the matmuls that it reads, and return the names of the matmuls.

    Raises:
        MissedError: the reduce-scatter cannot be fused; the graph keeps the nodes inserted so far.
    """
    collective, reduce_op = collective_of(node), str(node.args[1])
    if reduce_op not in ("sum", "avg"):
        raise UnpairedError(f"reduces by {reduce_op!r}; the operator by 'sum' and 'avg'")
    tracker = ViewTracker()
    source, layout = tracker.trace(collective.input)
    total = Sum([], [], [*path(collective.input, source)])
    _collect_terms(source, tracker, total)
    check_ranks(collective)
    if source.meta["val"].dtype != collective.input.meta["val"].dtype:
        raise MissedError("the product's bytes are reduced as another dtype")
    if steps(layout.dims, source.meta["val"].numel()) is None:
        raise MissedError(f"it reduces a part of {source.name}")
    _check_sum(total, node)
    rewrite.check_undisturbed([*(m.node for m in total.matmuls), node])
    _put_scatter(rewrite, collective, layout, total, reduce_op)
    return tuple(m.node.name for m in total.matmuls)


def _collect_terms(source: Node, tracker: ViewTracker, total: Sum) -> None:
    """Add to `total` the matmuls and biases whose sum is `source`, or raise MissedError."""
    total.nodes.append(source)
    if is_matmul(source):
        matmul = matmul_of(source)
        total.matmuls.append(matmul)
        if matmul.bias is not None:
            total.biases.append(matmul.bias)
        return
    if source.target != aten.add.Tensor or source.kwargs.get("alpha", 1) != 1:
        raise _no_product_error(source)
    shape = source.meta["val"].shape
    for term in source.args[:2]:
        if not isinstance(term, Node) or not is_static(term):
            raise MissedError(f"{source.name} adds a number")
        if term.meta["val"].shape == shape[-1:] and len(shape) > 1:
            total.biases.append(term)
            continue
        inner, layout = tracker.trace(term)
        whole = merged([(inner.meta["val"].numel(), 1)])
        if term.meta["val"].shape != shape or merged(layout.modes) != whole:
            raise MissedError(f"{source.name} adds tensors that do not lie alike")
        total.nodes.extend(path(term, inner))
        _collect_terms(inner, tracker, total)


def _no_product_error(source: Node) -> MissedError:
    """Return the error for a reduced tensor that is no product: an UnpairedError unless a matmul is near."""
    reads = source.args[0] if source.args else None
    if isinstance(reads, Node) and reads.target == torch.ops.titanlite.all_gather_matmul.default:
        return UnpairedError("its matmul is fused with an all-gather")
    if batches := batches_error([source]):
        return batches
    if source.op == "placeholder":
        return UnpairedError(f"it reduces an input of the graph, {source.name}")
    near = first_matmul(source, could_be_passed, lambda n: n.all_input_nodes)
    if near is not None:
        padding = (n for n in source.all_input_nodes if n.target == aten.constant_pad_nd.default)
        return MissedError(f"{name_of(next(padding, source))} stands between it and {near.name}")
    return UnpairedError(f"{name_of(source)} stands between it and a matmul, or there is none")


def _check_sum(total: Sum, node: Node) -> None:
    """Raise MissedError if the operator cannot compute the sum."""
    inside = {*total.nodes, node}
    for each in total.nodes:
        for user in each.users:
            if user not in inside:
                raise MissedError(f"{each.name} is read by {user.name} as well")
    if total.matmuls[0].is_scaled and len(total.matmuls) > MAX_PAIRS:
        raise MissedError(f"a sum of {len(total.matmuls)} scaled products; the operator takes {MAX_PAIRS}")
    first = total.matmuls[0]
    shape, dtype = first.node.meta["val"].shape, first.left.meta["val"].dtype
    for m in total.matmuls:
        if m.node.meta["val"].shape != shape:
            raise MissedError("a sum of products of several shapes")
        operands_differ = m.is_scaled != first.is_scaled or (not m.is_scaled and m.left.meta["val"].dtype != dtype)
        if operands_differ or m.node.meta["val"].dtype != first.node.meta["val"].dtype:
            raise MissedError("a sum of products of several dtypes")
    for bias in total.biases:
        if first.is_scaled or bias.meta["val"].dtype != dtype or bias.meta["val"].shape != shape[-1:]:
            raise MissedError(f"{bias.name} is added before the reduction, and is no bias in the product's dtype")


def _put_scatter(rewrite: GraphRewrite, collective: CollectiveNode, layout: Layout, total: Sum, reduce_op: str) -> None:
    """Replace the collective and the matmuls by the operator."""
    node, ranks = collective.node, collective.ranks
    first, out = total.matmuls[0], node.meta["val"]
    M, N = first.node.meta["val"].shape[-2:]
    (n, stride), *rest = merged(layout.modes)
    if n % ranks:
        raise MissedError("the parts of the ranks are not at equal distances in the product")
    stride *= n // ranks  # from one rank's part of the product to the next
    outer = M * N // (ranks * stride)
    parts = relocated(((n // ranks, stride * ranks // n), *rest), [(stride, 1, 1), (outer, ranks * stride, stride)])
    dims = reshaped(Layout((parts,)), out.shape) if parts is not None else None
    if dims is None or (stride % N and ranks * stride != N):
        raise MissedError("the parts of the ranks are no rows and no columns of the product")
    shape, dim = [M], int(stride % N != 0)  # shape of the product without N, and the scattered dim
    if dim == 0 and outer > 1:
        shape, dim = [outer, M // outer], 1
    with rewrite.graph.inserting_before(node):
        lefts = [rewrite.reshape(m.left, [*shape, m.left.meta["val"].shape[-1]]) for m in total.matmuls]
        rights = [rewrite.reshape(m.right, m.right.meta["val"].shape[-2:]) for m in total.matmuls]
        if total.biases:
            left, right = _bias_product(rewrite, total.biases, shape, first.left.meta["val"])
            lefts, rights = [*lefts, left], [*rights, right]
        if len(lefts) > MAX_PAIRS:  # concatenate the narrowest along K, which copies the least
            by_width = sorted(zip(lefts, rights, strict=True), key=lambda pair: -pair[0].meta["val"].shape[-1])
            lefts, rights = (list(factors) for factors in zip(*by_width, strict=True))
            lefts[MAX_PAIRS - 1 :] = [rewrite.call(aten.cat.default, lefts[MAX_PAIRS - 1 :], -1)]
            rights[MAX_PAIRS - 1 :] = [rewrite.call(aten.cat.default, rights[MAX_PAIRS - 1 :])]
        left_scales, right_scales = [], []
        for m in total.matmuls:
            if m.left_scale is not None and m.right_scale is not None:
                left_scales.append(rewrite.scale(m.left_scale, [*shape, 1]))
                right_scales.append(rewrite.scale(m.right_scale, [1, N]))
        wide = dtype_of_sum(out.dtype, reduce_op, ranks)
        dtype = None if wide == out_dtype_of(lefts[0].meta["val"].dtype, None) else wide
        op = torch.ops.titanlite.matmul_reduce_scatter.default
        fast = all(m.fast_accum for m in total.matmuls)
        fused = rewrite.call(op, lefts, rights, dim, collective.group, None, left_scales, right_scales, dtype, fast)
        result = rewrite.contiguous(rewrite.arrange(fused, dims.dims))
        if reduce_op == "avg":
            result = rewrite.call(aten.div.Tensor, result, ranks)
        if wide != out.dtype:
            result = rewrite.call(torch.ops.prims.convert_element_type.default, result, out.dtype)
    waits = [user for user in node.users if user.target == torch.ops._c10d_functional.wait_tensor.default]
    rewrite.replace(dict.fromkeys((*waits, node), result), total.nodes)


def _bias_product(rewrite: GraphRewrite, biases: list[Node], shape: list[int], like: torch.Tensor) -> tuple[Node, Node]:
    """Insert two factors whose product has the sum of the biases in each row: ones, and the sum above rows of zeros.

    A row of ones has 16 bytes, the least that the kernels load.
    """
    K = 16 // like.dtype.itemsize
    bias = biases[0]
    for more in biases[1:]:
        bias = rewrite.call(aten.add.Tensor, bias, more)
    row = rewrite.reshape(bias, [1, *bias.meta["val"].shape])
    ones = rewrite.full([*shape, K], 1, like)
    return ones, rewrite.call(aten.constant_pad_nd.default, row, [0, 0, 0, K - 1])
