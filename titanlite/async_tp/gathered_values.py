"""Describe a matmul's gathered operand by the arguments of `all_gather_matmul`: form, dim, scales.

The operand is a matrix of the gathered tensor's elements, and one of its modes (`layout_modes.py`) runs over the ranks.
The form depends on the dim of this mode: kept or contracted, of the left or the right operand. Other modes may precede
this mode in its dim, such as a batch if the sequence is split. In a kept dim they become a separate dim. A sum over a
contracted dim may run in any order, so in this case the other operand is reordered instead.
"""

import math
from typing import NamedTuple

import torch
from torch.fx import Node

from titanlite.async_tp.graph_rewrite import CollectiveNode, Matmul, MissedError, collective_of
from titanlite.async_tp.layout_modes import Layout, Mode, Modes, identity, length, merged, steps
from titanlite.async_tp.view_tracking import ViewTracker

ALL_GATHER = torch.ops._c10d_functional.all_gather_into_tensor.default


class Gathered(NamedTuple):
    """The gathered tensor in the form in which the operator takes it, and its scale."""

    form: str  # argument of the operator
    dim: int  # dim of the shard that is gathered
    dims: tuple[Modes, ...]  # modes of the gathered tensor, over the collective's result
    dtype: torch.dtype
    out_dtype: torch.dtype  # of the products
    scale: Node | None
    scale_of: str  # "tensor" or "row"
    scale_dims: tuple[Modes, ...] | None  # modes of the shard of `scale`, if the graph all-gathers it


class Product(NamedTuple):
    """A matmul that reads the gathered tensor."""

    matmul: Matmul
    gathered: Gathered  # the operand that is gathered
    other: Node  # the other operand
    other_dims: tuple[Modes, ...] | None  # modes of the other operand, if it has to be reordered
    other_scale: Node | None


def product_of(
    collective: CollectiveNode, matmul: Matmul, moved: dict[Node, Layout | None], dependent: set[Node]
) -> Product:
    """Describe a matmul that reads an all-gather as a product of `all_gather_matmul`.

    Args:
        collective, matmul: the all-gather and the matmul.
        moved: the nodes that only move the gathered elements, with layouts; None for a split.
        dependent: the nodes that are computed from the gathered elements.

    Raises:
        MissedError: the operator cannot compute the product.
    """
    name = matmul.node.name
    is_left = matmul.left in moved
    if not is_left and matmul.right not in moved:
        raise MissedError(f"{name} reads it, but as neither operand")
    operands, scales = (matmul.left, matmul.right), (matmul.left_scale, matmul.right_scale)
    if not is_left:
        operands, scales = operands[::-1], scales[::-1]
    (own, other), (scale, other_scale) = operands, scales
    if {other, matmul.bias, other_scale} & dependent:
        raise MissedError(f"{name} has another operand that depends on the gathered tensor")
    layout = moved[own]
    assert layout is not None  # noqa: S101  # a matmul cannot read a split
    rows, columns = (_ranks_apart(modes, collective) for modes in layout.dims[-2:])
    if steps((rows, columns), math.prod(collective.node.meta["val"].shape)) is None:
        raise MissedError(f"{name} reads a part of the gathered tensor, as where padding was cut off")
    rank = (collective.ranks, shard_size(collective))
    if rank not in (*rows, *columns):
        raise MissedError(f"{name} reads rows in which the ranks alternate")
    kept, contracted = (0, 1) if is_left else (1, 0)
    axis = 0 if rank in rows else 1
    dims = [rows, columns]
    before = dims[axis][: dims[axis].index(rank)]
    after = dims[axis][len(before) + 1 :]
    other_dims = None
    if before and axis == contracted:  # a sum may run in any order that both operands share
        dims[axis] = (rank, *before, *after)
        other_dims = _reordered(other, 1 - contracted, length(before), collective.ranks, length(after))
    elif before and not is_left:
        raise MissedError(f"{name} has the ranks' columns within others, {length(before)} around them")

    scale_of, scale_dims = "tensor", None
    if scale is not None and scale.meta["val"].numel() > 1:
        scale_of = "row"
        if axis == kept:
            scale, scale_dims = _gathered_scale(scale, kept, collective, length(before), length(after))
    if scale in dependent:
        raise MissedError(f"{name} has a scale that depends on the gathered tensor")
    batched = bool(before) and axis == kept
    if scale_of == "row":  # rows of the operator's tensor, not of the matmul's
        transposed = not is_left
    else:
        transposed = not batched and _lies_transposed(dims, rank, collective)
    if transposed:
        dims.reverse()
        axis = 1 - axis
    form = ("left" if is_left else "right") + ("_t" if transposed else "")
    if batched:
        whole: tuple[Modes, ...] = (before, (rank, *after), dims[1])
        axis = 1
    else:
        whole = (dims[0], dims[1])
    dtype, out_dtype = own.meta["val"].dtype, matmul.node.meta["val"].dtype
    gathered = Gathered(form, axis, whole, dtype, out_dtype, scale, scale_of, scale_dims)
    return Product(matmul, gathered, other, other_dims, other_scale)


def shard_size(collective: CollectiveNode) -> int:
    """Return the number of elements of a shard, which is the stride of the ranks in the flat gathered tensor."""
    return math.prod(collective.input.meta["val"].shape)


def _ranks_apart(modes: Modes, collective: CollectiveNode) -> Modes:
    """Cut modes of the gathered tensor so that one of them runs exactly over the ranks."""
    size, out = shard_size(collective), []
    for n, stride in modes:
        if stride < size < n * stride and size % stride == 0 and n % (size // stride) == 0:
            out += [(n * stride // size, size), (size // stride, stride)]
        else:
            out.append((n, stride))
    return tuple(out)


def _reordered(other: Node, axis: int, before: int, ranks: int, after: int) -> tuple[Modes, ...]:
    """Return modes of the other operand, with the ranks outermost in dim `axis`, then lengths `before` and `after`."""
    shape = other.meta["val"].shape[-2:]
    layout = identity(shape)
    stride = 1 if axis == 1 else shape[1]
    dims = list(layout.dims)
    dims[axis] = merged(((ranks, after * stride), (before, ranks * after * stride), (after, stride)))
    return tuple(dims)


def _lies_transposed(dims: list[Modes], rank: Mode, collective: CollectiveNode) -> bool:
    """Return whether the shard, in the order of its memory, is the transpose of the matrix `dims`."""
    own = [tuple(mode for mode in modes if mode != rank) for modes in dims]
    size = shard_size(collective)
    straight, transposed = steps(own, size), steps(own[::-1], size)
    in_order = [how is not None and how.order == sorted(how.order) for how in (straight, transposed)]
    return in_order == [False, True]


def _gathered_scale(
    scale: Node, axis: int, collective: CollectiveNode, before: int, after: int
) -> tuple[Node, tuple[Modes, ...]]:
    """Find the all-gather of the gathered rows' scales, and the modes of its shard."""
    reason = "scales by row that are not all-gathered beside the tensor"
    source, layout = ViewTracker().trace(scale)
    if source.target != ALL_GATHER:
        raise MissedError(reason)
    theirs = collective_of(source)
    modes = _ranks_apart(layout.dims[axis], theirs)
    rank = (collective.ranks, shard_size(theirs))
    if (theirs.ranks, theirs.group) != (collective.ranks, collective.group) or rank not in modes:
        raise MissedError(reason)
    at = modes.index(rank)
    if (length(modes[:at]), length(modes[at + 1 :])) != (before, after):
        raise MissedError(reason)
    return source, (modes[:at], modes[at + 1 :], ())
