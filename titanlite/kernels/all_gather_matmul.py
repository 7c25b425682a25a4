"""All-gather → matmul: products of a tensor that is split over ranks with tensors that are not.

The gathered tensor G is the left or right operand, transposed or not, and is split along any dim. Several products
share one gather:

    form       product          G            typical use
    left       G @ B            […, K]       column-parallel forward, row-parallel input gradient
    right      A @ G            [K, N]       weight gradient, grad.t() @ all_gather(x)
    left_t     G.t() @ B        [K, M]       weight gradient, transposed
    right_t    A @ G.t()        [N, K]       x @ all_gather(w).t()

G is returned, too, since backward needs it. The definition below gathers, then multiplies. On GPUs with peer access, a
kernel multiplies rows as soon as they have arrived (`titanlite/kernels/device/`).

Float8 operands have scales. G has one scale for the tensor, equal on all ranks ("tensor"), one per rank's shard
("shard"), or one per row ("row"). Scales by shard are gathered with G, and so are scales by row unless rows are split.
"""

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from titanlite.kernels.collectives import gather_dim, named_group, scatter_dim
from titanlite.kernels.lowering import MatmulOperator
from titanlite.kernels.operators import device_code
from titanlite.kernels.products import (
    FLOAT8,
    GatherCall,
    contracts_last,
    differences,
    gather_scale,
    gradient_of_bias,
    gradient_of_right,
    out_dtype_of,
    out_shapes,
    products,
)
from titanlite.kernels.shapes import dims, shapes_of, split

FORMS = ("left", "right", "left_t", "right_t")
SCALES = ("tensor", "shard", "row")


def all_gather_matmul(
    shard: Tensor,
    others: Sequence[Tensor],
    dim: int,
    size: int,
    group: str,
    *,
    form: str = "left",
    biases: Sequence[Tensor] = (),
    scale: Tensor | None = None,
    scale_of: str = "tensor",
    other_scales: Sequence[Tensor] = (),
    out_dtype: torch.dtype | None = None,
    fast_accum: bool = False,
) -> list[Tensor]:
    """Gather a tensor G over ranks and multiply it by other tensors.

    Args:
        shard: this rank's shard of G: 2-D to 4-D for the form "left", 2-D for other forms. Any float dtype or float8.
        others: the other operand of each product, [K, N] for the "left" forms, […, K] for the "right" ones, in the
            dtype of `shard`; float8 dtypes may be mixed. Any strides.
        dim: the dim along which G is split.
        size: length of `dim` in G. Rank r holds the indices r·⌈size/ranks⌉ up to (r+1)·⌈size/ranks⌉ of this dim.
        group: name of the process group.
        form: operands of the products, one of FORMS, see the table of this module.
        biases: [N] each, of any dtype, added before the product is rounded.
        scale: float8 only: the inverse scale of G's bytes, float32, [], or […, 1] by row of `shard`.
        scale_of: the part of G that one scale is for: "tensor", "shard" or "row". If G is split along its last dim,
            ranks pass equal scales of full rows, and "shard" is refused.
        other_scales: float8 only: inverse scales of `others`, float32, [] each, or [1, N] for the "left" forms and
            […, 1] for the "right" ones.
        out_dtype: dtype of the products; None: the dtype of `shard`, or bfloat16 for float8.
        fast_accum: float8 only: let tensor cores accumulate with about 14 bits. Otherwise partial sums are added in
            float32 every 128 products.

    Returns:
        G, then the products in the order of `others`, then, if scales are gathered, G's scales by row, [..., 1]
        float32; all contiguous.

    Raises:
        ValueError: operands do not fit each other; or shapes or dtypes differ between the ranks, which GPUs check at
            the first call of its kind.
    """
    return torch.ops.titanlite.all_gather_matmul.default(
        shard, list(others), dim, size, group, form,
        list(biases), scale, scale_of, list(other_scales), out_dtype, fast_accum,
    )  # fmt: skip


def _gather_and_multiply(call: GatherCall) -> list[Tensor]:
    """Gather, then multiply: the operator's definition in plain torch."""
    gathered = gather_dim(call.shard, call.at, call.size, named_group(call.group))
    scale = gather_scale(call)
    results = [gathered, *products(call, gathered, scale)]
    return [*results, scale.contiguous()] if scale is not None and call.moves_scale else results


def _mistakes_of_gather(call: GatherCall) -> Iterator[str]:
    """Yield a message for each mistake in the arguments. Later checks assume that the earlier ones passed."""
    shard, others, dim, size, group, form, biases, scale, scale_of, other_scales, *_ = call
    ranks = named_group(group)
    if form not in FORMS:
        yield f"form {form!r}; want one of {', '.join(FORMS)}"
    if not -shard.ndim <= dim < shard.ndim:
        yield f"dim {dim} of a shard with {shard.ndim} dims; want {-shard.ndim} to {shard.ndim - 1}"
    if not 2 <= shard.ndim <= 4 or (form != "left" and shard.ndim != 2):
        want = "2 to 4 dims" if form == "left" else f"2 dims for the form {form!r}"
        yield f"a shard of {shard.ndim} dims; want {want}"
    whole = split(shard.shape, dim, size, ranks.size)
    dim %= shard.ndim
    if shard.shape[dim] != whole.length(ranks.rank):
        yield (
            f"rank {ranks.rank} of {ranks.size} passes {shard.shape[dim]} of {size} rows along dim {dim}; "
            f"want {whole.length(ranks.rank)}: chunks of {whole.chunk}"
        )
    contracted = (-1 if contracts_last(form) else 0) % shard.ndim
    K = size if contracted == dim else shard.shape[contracted]
    for i, other in enumerate(others):
        if form.startswith("left") and other.ndim != 2:
            yield f"others[{i}] has {other.ndim} dims; want [K, N]"
        own = other.shape[0] if form.startswith("left") else other.shape[-1]
        if own != K:
            yield f"others[{i}] of shape {list(other.shape)} contracts {own}; the gathered tensor {K}"
        if other.dtype != shard.dtype and not {other.dtype, shard.dtype} <= set(FLOAT8):
            yield f"others[{i}] is {other.dtype}, shard is {shard.dtype}; want equal dtypes"
    yield from differences([shard, *others, *biases], [scale, *other_scales])
    for name, given in (("biases", biases), ("other_scales", other_scales)):
        if given and len(given) != len(others):
            yield f"{len(given)} {name} for {len(others)} products; want one each"
    for i, (bias, shape) in enumerate(zip(biases, out_shapes(call.whole, others, form), strict=False)):
        if list(bias.shape) != shape[-1:]:
            yield f"biases[{i}] of shape {list(bias.shape)}; want {shape[-1:]}"
    for i, (other_scale, other) in enumerate(zip(other_scales, others, strict=False)):
        rows = other.shape[1] if form.startswith("left") else math.prod(other.shape[:-1])
        if other_scale.numel() not in (1, rows):
            yield f"other_scales[{i}] has {other_scale.numel()} numbers; want one, or {rows}"
    if scale_of not in SCALES:
        yield f"scale_of {scale_of!r}; want one of {', '.join(SCALES)}"
    if (shard.dtype in FLOAT8) != (scale is not None) or (scale is not None) != bool(other_scales):
        yield f"{shard.dtype} operands need {'both scales' if shard.dtype in FLOAT8 else 'no scale'}"
    if scale is not None:
        rows = math.prod(shard.shape[:-1])
        if scale.numel() != (rows if scale_of == "row" else 1):
            want = f"{rows} numbers, one for each row" if scale_of == "row" else "one number"
            yield f"a scale of {scale.numel()} numbers, one for each {scale_of}; want {want}"
        if scale_of != "tensor" and contracted != shard.ndim - 1:
            yield f"scales by {scale_of} along the contracted dim of the form {form!r}; want one scale"
        if scale_of == "shard" and dim == shard.ndim - 1:
            yield "scales by shard of a tensor split along the contracted dim; want one scale"


def _gather_in_words(call: GatherCall) -> str:
    return (
        f"{call.shard.dtype} {dims(call.whole)} gathered along dim {call.at}, {call.form}, scaled by {call.scale_of}, "
        f"to {out_dtype_of(call.shard.dtype, call.out_dtype)}, fast_accum {call.fast_accum}"
    )


def _save_gathered(ctx, call: GatherCall, results) -> None:
    ctx.set_materialize_grads(False)
    ctx.dim, ctx.size, ctx.group, ctx.form = call.at, call.size, call.group, call.form
    ctx.float8, ctx.bias_dtypes = call.scale is not None, [bias.dtype for bias in call.biases]
    ctx.save_for_backward(results[0], *call.others)


def _gather_backward(ctx, grads):
    """Return the gradients of shard, others and biases, in this order.

    The shard's gradient is a sum of products, computed by `matmul_reduce_scatter`. Other gradients are plain matmuls.
    """
    if ctx.float8:
        raise NotImplementedError(
            "all_gather_matmul: float8 operands have no gradient; the caller defines backward's casts"
        )
    gathered, *others = ctx.saved_tensors
    grad_gathered, *grads = grads[: 1 + len(others)]
    needs_shard, *needs_others = ctx.needs[: 1 + len(others)]
    d_biases = []
    if ctx.bias_dtypes:
        d_biases = [
            None if grad is None else gradient_of_bias(grad, dtype)
            for grad, dtype in zip(grads, ctx.bias_dtypes, strict=True)
        ]
    # A matmul's operands need one dtype, and `out_dtype` may have given the products another one.
    grads = [None if grad is None else grad.to(other.dtype) for grad, other in zip(grads, others, strict=True)]
    pairs = [(grad, other) for grad, other in zip(grads, others, strict=True) if grad is not None]
    d_shard, form = None, ctx.form
    if needs_shard and pairs:
        lefts, rights = zip(*(_grad_of_gathered(grad, other, form) for grad, other in pairs), strict=True)
        reduce = torch.ops.titanlite.matmul_reduce_scatter.default  # not imported: its module imports this one
        d_shard = reduce(list(lefts), list(rights), ctx.dim, ctx.group, None, [], [], None, False)
    if needs_shard and grad_gathered is not None:
        own = scatter_dim(grad_gathered, ctx.dim, named_group(ctx.group))
        d_shard = own if d_shard is None else d_shard + own
    d_others = [
        None if grad is None or not needed else _grad_of_other(gathered, grad, other, form)
        for grad, other, needed in zip(grads, others, needs_others, strict=True)
    ]
    return d_shard, *d_others, *d_biases


def _grad_of_gathered(grad: Tensor, other: Tensor, form: str) -> tuple[Tensor, Tensor]:
    """Return two matrices whose product is the gradient of G from one product; `grad`: the gradient of this product."""
    if form == "left":
        return grad, other.t()
    if form == "left_t":
        return other, grad.t()
    grad, other = grad.flatten(0, -2), other.flatten(0, -2)
    return (other.t(), grad) if form == "right" else (grad.t(), other)


def _grad_of_other(gathered: Tensor, grad: Tensor, other: Tensor, form: str) -> Tensor:
    """Return the gradient of `other`, from `grad`, the gradient of its product with G (`gathered`)."""
    if form == "left":
        return gradient_of_right(gathered, grad, other)
    if form == "left_t":
        return gradient_of_right(gathered.t(), grad, other)
    return grad @ (gathered.t() if form == "right" else gathered)


def _gather_flops(shard_shape, other_shapes, dim, size, group, form, *args, **kwargs) -> int:
    G = list(shard_shape)
    G[dim] = size
    kept = math.prod(G[:-1] if contracts_last(form) else G[1:])
    return sum(2 * kept * math.prod(other) for other in other_shapes)


MatmulOperator(
    name="all_gather_matmul",
    schema="(Tensor shard, Tensor[] others, SymInt dim, SymInt size, str group, str form, Tensor[] biases, "
    "Tensor? scale, str scale_of, Tensor[] other_scales, ScalarType? out_dtype, bool fast_accum) -> Tensor[]",
    call=GatherCall,
    mistakes=_mistakes_of_gather,
    plain=_gather_and_multiply,
    in_words=_gather_in_words,
    shapes=lambda call: (shapes_of(*call.others), shapes_of(call.shard, *call.others)),
    unsupported=device_code("gather_plan.gather_unsupported_reason"),
    plan=device_code("gather_plan.plan_gather"),
    launch=device_code("all_gather_matmul.launch_all_gather_matmul"),
    save=_save_gathered,
    backward=_gather_backward,
    flops=_gather_flops,
).register()
