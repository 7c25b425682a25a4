"""Offer the collective matmuls under the names and signatures of `torch.ops.symm_mem.fused_*`, as drop-ins.

Arguments, their order, and results are torch's. Operands that do not fit each other, and options that only torch's
operators support, raise ValueError. Shards of `A` have equal sizes on all ranks, and the length of a scattered dim is a
multiple of the number of ranks. Scaled operands are float8 and their scales float32: [] or [1] for the operand, or one
number for each row of `A` or column of `B`. Three things differ:

- Results are contiguous, whatever the gathered or scattered dim.
- Products without scales are differentiable.
- A scaled product is scattered along `orig_scatter_dim` of `output_shape`, as in torch's definition. torch's GPU code
  cuts the flattened rows instead, and returns other rows for `[B, S, N]` scattered along S with B > 1.

Source: `torch/distributed/_symmetric_memory/__init__.py` of torch 2.11 to 2.14, whose `_fallback` functions are the
definitions that the tests compare with.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from titanlite.errors import Problem
from titanlite.kernels.all_gather_matmul import all_gather_matmul
from titanlite.kernels.collectives import Group, all_reduce, named_group, scatter_dim
from titanlite.kernels.matmul_reduce_scatter import matmul_reduce_scatter
from titanlite.kernels.products import FLOAT8, dtype_of_sum

_SCALED_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def fused_all_gather_matmul(
    A: Tensor,
    Bs: list[Tensor],
    gather_dim: int,
    group_name: str,
    *,
    return_A: bool = True,
) -> tuple[Tensor | None, list[Tensor]]:
    """Gather `A` along a dim and multiply it by each of `Bs`.

    Args:
        A: […, K], 2-D to 4-D, this rank's shard.
        Bs: [K, N] each; if the last dim is gathered, [ranks · K, N].
        gather_dim: dim of `A`.
        group_name: of the process group.
        return_A: whether the gathered tensor is returned.

    Returns:
        The gathered tensor, or None, and the products; in `A`'s dtype.
    """
    gathered, *products = all_gather_matmul(A, Bs, gather_dim, _gathered_size(A, gather_dim, group_name), group_name)
    return (gathered if return_A else None), products


def fused_all_gather_scaled_matmul(
    A: Tensor,
    Bs: list[Tensor],
    A_scale: Tensor,
    B_scales: list[Tensor],
    gather_dim: int,
    group_name: str,
    biases: list[Tensor | None],
    result_scales: list[Tensor | None],
    out_dtypes: list[torch.dtype | None],
    use_fast_accum: list[bool],
) -> tuple[Tensor, list[Tensor]]:
    """Gather the float8 tensor `A` along a dim and multiply it by each of `Bs`, as `fused_all_gather_matmul` does.

    Args:
        A_scale: one scale of the tensor, equal on all ranks; scales of the rows of the shard, […, 1]; or scales of the
            rows of the gathered tensor, equal on all ranks.
        B_scales: [] or [1, N] each.
        biases: [N] or None each.
        result_scales: None each.
        out_dtypes: bfloat16, float16 or float32 each. If they differ, products are made in float32 and rounded once.
        use_fast_accum: of each product, whether tensor cores may accumulate it; they do if all allow it.

    Returns:
        The gathered tensor, and the products.
    """
    op = "fused_all_gather_scaled_matmul"
    lists = (B_scales, biases, result_scales, out_dtypes, use_fast_accum)
    names = ("B_scales", "biases", "result_scales", "out_dtypes", "use_fast_accum")
    for name, given in zip(names, lists, strict=True):
        if len(given) != len(Bs):
            raise _error(f"{op}: {name}", f"{len(given)} entries", f"{len(Bs)}, one for each of Bs", "give one each")
    dtypes = [_scaled_options(op, A, *options) for options in zip(Bs, result_scales, out_dtypes, strict=True)]
    size = _gathered_size(A, gather_dim, group_name)
    scale, scale_of = _scale_of_shard(op, A, A_scale, gather_dim, named_group(group_name))
    added: list[Tensor] = []
    if any(bias is not None for bias in biases):
        zeros = [B.new_zeros(B.shape[-1], dtype=torch.float32) for B in Bs]
        added = [zero if bias is None else bias for zero, bias in zip(zeros, biases, strict=True)]
    gathered, *products = all_gather_matmul(
        A,
        Bs,
        gather_dim,
        size,
        group_name,
        biases=added,
        scale=scale,
        scale_of=scale_of,
        other_scales=B_scales,
        out_dtype=dtypes[0] if len(set(dtypes)) == 1 else torch.float32,
        fast_accum=all(use_fast_accum),
    )
    products = products[: len(Bs)]  # the gathered scales follow
    return gathered, [product.to(dtype) for product, dtype in zip(products, dtypes, strict=True)]


def fused_matmul_reduce_scatter(A: Tensor, B: Tensor, reduce_op: str, scatter_dim: int, group_name: str) -> Tensor:
    """Multiply A, […, K] of 2 to 4 dims, by B, [K, N], reduce by "sum" or "avg", and scatter a dim of the product.

    Returns:
        This rank's chunk, in `A`'s dtype.
    """
    op = "fused_matmul_reduce_scatter"
    shape = [*A.shape[:-1], B.shape[-1]]
    dim, group = _scattered(op, "scatter_dim", shape, scatter_dim, group_name, reduce_op)
    wide = dtype_of_sum(A.dtype, reduce_op, group.size)
    return _reduced(matmul_reduce_scatter([A], [B], dim, group_name, out_dtype=wide), A.dtype, reduce_op, group)


def fused_scaled_matmul_reduce_scatter(
    A: Tensor,
    B: Tensor,
    A_scale: Tensor,
    B_scale: Tensor,
    reduce_op: str,
    orig_scatter_dim: int,
    scatter_dim_after_maybe_reshape: int,
    group_name: str,
    output_shape: Sequence[int] | None,
    bias: Tensor | None = None,
    result_scale: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
) -> Tensor:
    """Multiply float8 tensors, reduce the product and scatter it, as `fused_matmul_reduce_scatter` does.

    Args:
        A_scale, B_scale: [], or […, 1] and [1, N].
        orig_scatter_dim: the dim of `output_shape` that is scattered.
        scatter_dim_after_maybe_reshape: a dim of `A`; checked, but not used.
        output_shape: shape of the product before it is scattered, 2-D to 4-D; None: that of `A` with N as last dim.
        bias: [N], added to every rank's product before the reduction, as in torch.

    Returns:
        This rank's chunk of `output_shape`.
    """
    op = "fused_scaled_matmul_reduce_scatter"
    dtype = _scaled_options(op, A, B, result_scale, out_dtype)
    shape = [*A.shape[:-1], B.shape[-1]] if output_shape is None else list(output_shape)
    rows = A.numel() // max(1, A.shape[-1])
    if len(shape) < 2 or shape[-1] != B.shape[-1] or torch.Size(shape[:-1]).numel() != rows:
        want = f"{rows} rows in all, and {B.shape[-1]} columns as the last dim"
        raise _error(f"{op}: output_shape", str(shape), want, "give the product's shape before it is scattered")
    if not 0 <= scatter_dim_after_maybe_reshape < A.ndim:
        where, saw = f"{op}: scatter_dim_after_maybe_reshape", str(scatter_dim_after_maybe_reshape)
        raise _error(where, saw, f"a dim of A: 0 to {A.ndim - 1}", "0 if A was reshaped to two dims")
    if A_scale.numel() != 1 and list(A_scale.shape) != [*A.shape[:-1], 1]:
        want = f"one number, or {[*A.shape[:-1], 1]}, one for each row"
        raise _error(f"{op}: A_scale", f"shape {list(A_scale.shape)}", want, "reshape it as A")
    dim, group = _scattered(op, "orig_scatter_dim", shape, orig_scatter_dim, group_name, reduce_op)
    wide = dtype_of_sum(dtype, reduce_op, group.size)
    out = matmul_reduce_scatter(
        [A.reshape(*shape[:-1], A.shape[-1])],
        [B],
        dim,
        group_name,
        bias=None if bias is None else _sum_of_biases(bias, dim == len(shape) - 1, group),
        left_scales=[A_scale],
        right_scales=[B_scale],
        out_dtype=wide,
        fast_accum=use_fast_accum,
    )
    return _reduced(out, dtype, reduce_op, group)


def _error(where: str, saw: str, want: str, fix: str) -> ValueError:
    return ValueError(str(Problem(where, saw, want, fix)))


def _gathered_size(A: Tensor, gather_dim: int, group_name: str) -> int:
    """Return the length of the gathered dim; 0 for a dim that does not exist, which the operator refuses."""
    return A.shape[gather_dim] * named_group(group_name).size if -A.ndim <= gather_dim < A.ndim else 0


def _scaled_options(
    op: str, A: Tensor, B: Tensor, result_scale: Tensor | None, out_dtype: torch.dtype | None
) -> torch.dtype:
    """Return the dtype of a scaled product. Raise ValueError for other operands than float8, or a float8 result."""
    if not {A.dtype, B.dtype} <= set(FLOAT8):
        want, fix = f"{' or '.join(map(str, FLOAT8))}", f"{op.replace('_scaled', '')} for other dtypes"
        raise _error(f"{op}: A, B", f"{A.dtype}, {B.dtype}", want, fix)
    if result_scale is not None:
        want, fix = "None: it scales a float8 result", "cast the result afterwards"
        raise _error(f"{op}: result_scale", "a tensor", want, fix)
    if out_dtype not in _SCALED_DTYPES:
        saw = "None, which torch reads as A's float8" if out_dtype is None else str(out_dtype)
        want = " or ".join(map(str, _SCALED_DTYPES))
        raise _error(f"{op}: out_dtype", saw, want, "out_dtype=torch.bfloat16, and cast the result afterwards")
    return out_dtype


def _scale_of_shard(op: str, A: Tensor, A_scale: Tensor, gather_dim: int, group: Group) -> tuple[Tensor, str]:
    """Return `scale` and `scale_of` for `all_gather_matmul`."""
    rows, gather_dim = [*A.shape[:-1], 1], gather_dim % A.ndim
    whole = list(rows)
    if gather_dim < A.ndim - 1:
        whole[gather_dim] *= group.size
    if list(A_scale.shape) == rows:  # checked first: torch takes [1, 1] for a shard of one row as that row's scale
        return A_scale, "row"
    if A_scale.numel() == 1:
        return A_scale, "tensor"
    if list(A_scale.shape) == whole:
        length = A.shape[gather_dim]
        return A_scale.narrow(gather_dim, group.rank * length, length).contiguous(), "row"
    want = f"one number, {rows} for the rows of the shard, or {whole} for those of the gathered tensor"
    raise _error(f"{op}: A_scale", f"shape {list(A_scale.shape)}", want, "reshape it as A")


def _scattered(op: str, name: str, shape: list[int], dim: int, group_name: str, reduce_op: str) -> tuple[int, Group]:
    """Return the scattered dim as a non-negative index, and the group, after checking the arguments."""
    if reduce_op not in ("sum", "avg"):
        raise _error(f"{op}: reduce_op", repr(reduce_op), "sum or avg", "another collective for other reductions")
    if not -len(shape) <= dim < len(shape):
        raise _error(f"{op}: {name}", str(dim), f"a dim of {shape}: 0 to {len(shape) - 1}", f"{name}=0 for the first")
    group = named_group(group_name)
    if shape[dim] % group.size:
        want = f"a dim whose length is a multiple of {group.size} ranks; {shape[dim]} of {shape} is not"
        fix = "titanlite.kernels.matmul_reduce_scatter, which takes uneven chunks"
        raise _error(f"{op}: {name}", str(dim), want, fix)
    return dim % len(shape), group


def _reduced(total: Tensor, dtype: torch.dtype, reduce_op: str, group: Group) -> Tensor:
    """Return the sum over ranks, or the average in `dtype` for "avg"."""
    return total if reduce_op == "sum" else (total / group.size).to(dtype)


def _sum_of_biases(bias: Tensor, by_columns: bool, group: Group) -> Tensor:
    """Add up all ranks' biases in float32; return only this rank's part if columns are scattered."""
    return scatter_dim(bias.float(), 0, group) if by_columns else all_reduce(bias.float(), "sum", group)
