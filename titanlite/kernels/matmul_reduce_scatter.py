"""Matmul → reduce-scatter: products are summed over the ranks, and each rank keeps its chunk of the sum.

Several products are summed before they are reduced, so that the gradients of projections that share an input (q, k, v;
gate and up) cost one reduce-scatter. The definition below multiplies, then reduces. On GPUs with peer access, a kernel
sends each tile to its owner as soon as it is computed, and the owner adds all ranks' tiles in float32, in rank order,
so that two runs give the same bits (`titanlite/kernels/device/`).
"""

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from titanlite.kernels.all_gather_matmul import all_gather_matmul
from titanlite.kernels.collectives import named_group, scatter_dim
from titanlite.kernels.lowering import MatmulOperator
from titanlite.kernels.operators import device_code
from titanlite.kernels.products import (
    FLOAT8,
    ScatterCall,
    differences,
    gradient_of_bias,
    gradient_of_right,
    out_dtype_of,
    product,
    product_shape,
)
from titanlite.kernels.shapes import dims, shapes_of, split


def matmul_reduce_scatter(
    lefts: Sequence[Tensor],
    rights: Sequence[Tensor],
    dim: int,
    group: str,
    *,
    bias: Tensor | None = None,
    left_scales: Sequence[Tensor] = (),
    right_scales: Sequence[Tensor] = (),
    out_dtype: torch.dtype | None = None,
    fast_accum: bool = False,
) -> Tensor:
    """Sum `lefts[i] @ rights[i]` over i and over the ranks, and keep this rank's chunk.

    Args:
        lefts: […, K_i] each, equal except for K_i; 2-D to 4-D, any strides. Any float dtype, float8 too.
        rights: [K_i, N] each, any strides; in the dtype of `lefts`; float8 dtypes may be mixed.
        dim: the dim of the sum that is scattered; may be the last, N. Rank r keeps its indices r·⌈size/ranks⌉ up to
            (r+1)·⌈size/ranks⌉.
        group: name of the process group.
        bias: [N] or, if N is scattered, this rank's part of it; any dtype; added once, after the sum over the ranks.
        left_scales: float8 only: inverse scales of `lefts`, float32, [] or […, 1] each.
        right_scales: float8 only: inverse scales of `rights`, float32, [] or [1, N] each.
        out_dtype: dtype of the result; None: the dtype of `lefts`, or bfloat16 for float8.
        fast_accum: float8 only: let tensor cores accumulate over K with about 14 bits. Otherwise partial sums are added
            in float32 every 128 products.

    Returns:
        This rank's chunk of the sum along `dim`; contiguous.

    Raises:
        ValueError: operands do not fit each other; or shapes or dtypes differ between the ranks, which GPUs check at
            the first call of its kind.
    """
    return torch.ops.titanlite.matmul_reduce_scatter.default(
        list(lefts), list(rights), dim, group, bias, list(left_scales), list(right_scales), out_dtype, fast_accum
    )


def _multiply_and_scatter(call: ScatterCall) -> Tensor:
    """Multiply, then reduce and scatter: the operator's definition in plain torch."""
    lefts, rights, dim, group, bias, left_scales, right_scales, out_dtype, fast_accum = call
    dtype = out_dtype_of(lefts[0].dtype, out_dtype)
    if len(lefts) == 1:
        ls, rs = (scales[0] if scales else None for scales in (left_scales, right_scales))
        total = product(lefts[0], rights[0], None, ls, rs, dtype, fast_accum)
    elif not left_scales:  # one accumulator for all: the products side by side along K
        total = product(torch.cat(lefts, -1), torch.cat(rights), out_dtype=dtype)
    else:
        operands = zip(lefts, rights, left_scales, right_scales, strict=True)
        parts = [product(left, right, None, ls, rs, torch.float32, fast_accum) for left, right, ls, rs in operands]
        total = torch.stack(parts).sum(0).to(dtype)
    out = scatter_dim(total, dim % total.ndim, named_group(group))
    return out if bias is None else (out + bias).to(dtype)


def _mistakes_of_scatter(call: ScatterCall) -> Iterator[str]:
    """Yield a message for each mistake in the arguments. Later checks assume that the earlier ones passed."""
    lefts, rights, dim, group, bias, left_scales, right_scales, *_ = call
    if not lefts or len(lefts) != len(rights):
        yield f"{len(lefts)} lefts and {len(rights)} rights; want as many of each, at least one"
    first, N = lefts[0], rights[0].shape[-1]
    if not 2 <= first.ndim <= 4 or not -first.ndim <= dim < first.ndim:
        yield f"dim {dim} of a product of {first.ndim} dims; want 2 to 4 dims, and one of them"
    for i, (left, right) in enumerate(zip(lefts, rights, strict=True)):
        if right.ndim != 2 or left.shape[:-1] != first.shape[:-1] or list(right.shape) != [left.shape[-1], N]:
            yield (
                f"product {i} is {list(left.shape)} @ {list(right.shape)}, product 0 {list(first.shape)} @ "
                f"{list(rights[0].shape)}; want […, K] @ [K, N], equal but for K"
            )
        dtypes = {left.dtype, right.dtype, first.dtype}
        if len(dtypes) > 1 and not dtypes <= set(FLOAT8):
            yield f"operands of {', '.join(sorted(map(str, dtypes)))}; want equal dtypes"
    if (first.dtype in FLOAT8) != bool(left_scales) or bool(left_scales) != bool(right_scales):
        yield f"{first.dtype} operands need {'both scales' if first.dtype in FLOAT8 else 'no scale'}"
    for name, scales in (("left_scales", left_scales), ("right_scales", right_scales)):
        if scales and len(scales) != len(lefts):
            yield f"{len(scales)} {name} for {len(lefts)} products; want one each"
    for name, scales, rows in (("left", left_scales, math.prod(first.shape[:-1])), ("right", right_scales, N)):
        for i, scale in enumerate(scales):
            if scale.numel() not in (1, rows):
                yield f"{name}_scales[{i}] has {scale.numel()} numbers; want one, or {rows}"
    yield from differences([*lefts, *rights, bias], [*left_scales, *right_scales])
    ranks, shape = named_group(group), product_shape(first.shape, rights[0].shape)
    own = split(shape, dim, N, ranks.size).length(ranks.rank) if dim % first.ndim == first.ndim - 1 else N
    if bias is not None and list(bias.shape) != [own]:
        yield f"a bias of shape {list(bias.shape)}; want [{own}]"


def _scatter_in_words(call: ScatterCall) -> str:
    first = call.lefts[0]
    return (
        f"{dims(product_shape(first.shape, call.rights[0].shape))} scattered along dim {call.dim % first.ndim}, "
        f"{first.dtype} to {out_dtype_of(first.dtype, call.out_dtype)}, fast_accum {call.fast_accum}"
    )


def _save_operands(ctx, call: ScatterCall, results) -> None:
    lefts, rights, dim, group, bias, left_scales, *_ = call
    ctx.dim, ctx.group, ctx.n, ctx.float8 = dim % lefts[0].ndim, group, len(lefts), bool(left_scales)
    ctx.size = product_shape(lefts[0].shape, rights[0].shape)[dim]
    ctx.bias_dtype = None if bias is None else bias.dtype
    ctx.save_for_backward(*lefts, *rights)


def _scatter_backward(ctx, grads):
    """Return the gradients of lefts, rights and bias, in this order: one gather of the gradient feeds all of them."""
    (grad,) = grads
    if ctx.float8:
        raise NotImplementedError(
            "matmul_reduce_scatter: float8 operands have no gradient; the caller defines backward's casts"
        )
    saved = ctx.saved_tensors  # read once: checkpointing allows no second time
    lefts, rights = saved[: ctx.n], saved[ctx.n :]
    needs_left, needs_right = ctx.needs[: ctx.n], ctx.needs[ctx.n : 2 * ctx.n]
    wanted = [i for i in range(ctx.n) if needs_left[i]]
    narrow = grad.to(lefts[0].dtype)  # a matmul's operands need one dtype, `out_dtype` may be another
    gathered, *products = all_gather_matmul(narrow, [rights[i].t() for i in wanted], ctx.dim, ctx.size, ctx.group)
    d_lefts: list[Tensor | None] = [None] * ctx.n
    for i, d_left in zip(wanted, products, strict=True):
        d_lefts[i] = d_left
    d_rights = [
        gradient_of_right(left, gathered, right) if needed else None
        for left, right, needed in zip(lefts, rights, needs_right, strict=True)
    ]
    if ctx.bias_dtype is None:
        return *d_lefts, *d_rights
    # This rank's bias was added to its chunk only, so its gradient is the sum over this chunk.
    return *d_lefts, *d_rights, gradient_of_bias(grad, ctx.bias_dtype)


def _scatter_flops(left_shapes, right_shapes, *args, **kwargs) -> int:
    return sum(2 * math.prod(left) * right[1] for left, right in zip(left_shapes, right_shapes, strict=True))


MatmulOperator(
    name="matmul_reduce_scatter",
    schema="(Tensor[] lefts, Tensor[] rights, SymInt dim, str group, Tensor? bias, Tensor[] left_scales, "
    "Tensor[] right_scales, ScalarType? out_dtype, bool fast_accum) -> Tensor",
    call=ScatterCall,
    mistakes=_mistakes_of_scatter,
    plain=_multiply_and_scatter,
    in_words=_scatter_in_words,
    shapes=lambda call: (shapes := shapes_of(*call.lefts, *call.rights), shapes),
    unsupported=device_code("matmul_reduce_scatter.scatter_unsupported_reason"),
    plan=device_code("matmul_reduce_scatter.plan_scatter"),
    launch=device_code("matmul_reduce_scatter.launch_matmul_reduce_scatter"),
    save=_save_operands,
    backward=_scatter_backward,
    flops=_scatter_flops,
).register()
