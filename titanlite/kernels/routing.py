"""Routing of a mixture of experts: the experts of each token, their weights, and the order of the rows.

A row is one token at one of its experts; rows are sorted by expert, so that a grouped matmul finds each expert's rows
together. Sizes do not depend on values: there are M·K rows whatever the router chooses, so no shape changes, and the
host waits for nothing where a rank has all experts. Equal logits give equal rows in every run: ties go to the lower
expert, an expert's rows are sorted by token, and a token's rows are added up in the order of its choices.

M tokens, D width, E experts, K experts per token, G experts of this rank, R rows. Slot m·K + k: token m's k-th choice.

Source: Shazeer et al. 2017, "Outrageously Large Neural Networks", eq. 1 to 5; DeepSeek-AI 2024, "DeepSeek-V3 Technical
Report", eq. 12 to 16, for sigmoid scores and the bias.
"""

from typing import Any

import torch
from torch import Tensor

from titanlite.kernels.operators import Split, operator

SCORES = ("softmax", "softmax_of_chosen", "sigmoid")
LEAST_SUM = 1e-20
"""Added to the sum of the chosen sigmoids, since that may be zero."""


def _product(a: Tensor, b: Tensor) -> Tensor:
    """Return a @ b in float32 (float64 for float64); GPUs multiply 16-bit numbers directly and sum in float32."""
    dtype = torch.promote_types(torch.promote_types(a.dtype, b.dtype), torch.float32)
    if a.is_cuda and a.dtype == b.dtype and a.element_size() == 2:
        return torch.mm(a, b, out_dtype=dtype)
    return a.to(dtype) @ b.to(dtype)


def _router_flops(x_shape: Any, weight_shape: Any, *_: Any, **__: Any) -> int:
    return 2 * x_shape[0] * x_shape[1] * weight_shape[0]


@operator("router_logits", None, splits=(Split((0, None), 0), Split((None, 0), 1)), flops=_router_flops)
def router_logits(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply tokens [M, D] by the router's weight [E, D], to [M, E] float32; float64 for float64."""
    return _product(x, weight.t())


@operator("router_logits_grad", None, flops=lambda _, *shapes, **__: 2 * _router_flops(*shapes))
def router_logits_grad(grad: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of `x` and `weight`; first, `grad`, [M, E], is rounded to the wider of their dtypes."""
    grad = grad.to(torch.promote_types(x.dtype, weight.dtype))
    return _product(grad, weight).to(x.dtype), _product(grad.t(), x).to(weight.dtype)


torch.library.register_autograd(
    "titanlite::router_logits",
    lambda ctx, grad: torch.ops.titanlite.router_logits_grad(grad, *ctx.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


@operator("route", "routing.launch_route", splits=(Split((0,), 0), Split((0, None), 0)))
def route(
    logits: Tensor, bias: Tensor | None, top_k: int, score: str, normalised: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Choose the experts of each token.

    Args:
        logits: [M, E] float32.
        bias: [E] float32, added to the scores for the choice, not for the weights. None: the choice compares logits,
            which have the order of the scores.
        top_k: K, at most E.
        score: "softmax" over all experts, "softmax_of_chosen", whose bias is added to logits, or "sigmoid".
        normalised: whether the weights of a token are divided by their sum.
        scale: factor of the weights.

    Returns:
        Weights [M, K] in `logits.dtype` and choices [M, K] int32, by descending score. Of equal scores the lower expert
        comes first; NaN counts as the highest score.

    Raises:
        ValueError: `score` is unknown, or `top_k` is not between 1 and E.
    """
    check_route(logits, top_k, score)
    scored = logits if bias is None else _scores_of_all(logits, score) + bias
    choices = scored.sort(dim=1, descending=True, stable=True).indices[:, :top_k]
    return _chosen_weights(logits, choices, score, normalised) * scale, choices.to(torch.int32)


@operator("route_grad", "routing.launch_route_grad", splits=(Split((0, 0, 0), 0),))
def route_grad(grad: Tensor, logits: Tensor, choices: Tensor, score: str, normalised: bool, scale: float) -> Tensor:
    """Return the gradient of the logits, [M, E], in `route`; `grad`: gradient of the weights, [M, K]."""
    at, grad = choices.long(), grad * scale
    weights = _chosen_weights(logits, at, score, normalised)
    if score == "softmax" and not normalised:
        of_all = torch.zeros_like(logits).scatter(1, at, grad) - (grad * weights).sum(1, keepdim=True)
        return logits.softmax(1) * of_all
    if score != "sigmoid":
        of_chosen = weights * (grad - (grad * weights).sum(1, keepdim=True))
    else:
        chosen = logits.gather(1, at).sigmoid()
        if normalised:
            grad = (grad - (grad * weights).sum(1, keepdim=True)) / (chosen.sum(1, keepdim=True) + LEAST_SUM)
        of_chosen = grad * chosen * (1 - chosen)
    return torch.zeros_like(logits).scatter(1, at, of_chosen)


def _save_route(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    logits, _, _, *ctx.how = inputs
    ctx.save_for_backward(logits, output[1])
    ctx.mark_non_differentiable(output[1])


def _route_backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    return torch.ops.titanlite.route_grad(grad, *ctx.saved_tensors, *ctx.how), None, None, None, None, None


torch.library.register_autograd("titanlite::route", _route_backward, setup_context=_save_route)


def check_route(logits: Tensor, top_k: int, score: str) -> None:
    """Raise ValueError if `score` is unknown, or `top_k` is not between 1 and the number of experts."""
    if score not in SCORES:
        raise ValueError(f'route: score = "{score}"; want one of {", ".join(SCORES)}')
    if not 1 <= top_k <= logits.shape[1]:
        raise ValueError(f"route: top_k = {top_k}; want 1 to the number of experts, {logits.shape[1]}")


def _scores_of_all(logits: Tensor, score: str) -> Tensor:
    if score == "softmax_of_chosen":
        return logits
    return logits.softmax(1) if score == "softmax" else logits.sigmoid()


def _chosen_weights(logits: Tensor, choices: Tensor, score: str, normalised: bool) -> Tensor:
    """Return the weights of chosen experts, not scaled. A normalised softmax equals a softmax of the chosen logits."""
    if score == "sigmoid":
        chosen = logits.gather(1, choices).sigmoid()
        return chosen / (chosen.sum(1, keepdim=True) + LEAST_SUM) if normalised else chosen
    if score == "softmax" and not normalised:
        return logits.softmax(1).gather(1, choices)
    return logits.gather(1, choices).softmax(1)


@operator("expert_rows", "routing.launch_expert_rows")
def expert_rows(choices: Tensor, first: int, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Give each choice of one of this rank's experts a row; rows are sorted by expert, token and slot.

    Args:
        choices: [M, K] int32.
        first: number of this rank's first expert.
        count: G.

    Returns:
        The row of each choice, [M, K] int32, -1 if the expert is on another rank; the slot of each row, [M·K] int32, -1
        after the last row; and the first row of each expert with the end of the last expert, [G + 1] int32.
    """
    own = choices.flatten() - first
    own = torch.where((own >= 0) & (own < count), own, count)
    experts, order = own.sort(stable=True)
    begins = torch.arange(count + 1, dtype=torch.int32, device=choices.device)
    offsets = torch.searchsorted(experts, begins, out_int32=True)
    places = torch.arange(len(own), dtype=torch.int32, device=choices.device)
    slots = torch.where(experts < count, order.to(torch.int32), -1)
    rows = torch.empty_like(places).scatter(0, order, torch.where(experts < count, places, -1))
    return rows.view_as(choices), slots, offsets


_arrivals: dict[int, torch.cuda.Event] = {}
"""By address in host memory: the event behind a copy that the host has not waited for yet."""


def _rows_for_host_on_gpus(choices: Tensor, first: int, count: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows, slots, offsets = expert_rows.on_gpus(choices, first, count)
    on_host = torch.empty(offsets.shape, dtype=offsets.dtype, pin_memory=True)  # torch keeps it until it is copied to
    on_host.copy_(offsets, non_blocking=True)
    _arrivals[on_host.data_ptr()] = behind = torch.cuda.Event()
    behind.record()
    return rows, slots, offsets, on_host


@operator("expert_rows_for_host", _rows_for_host_on_gpus, on_two_devices=True)
def expert_rows_for_host(choices: Tensor, first: int, count: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the results of `expert_rows`, and a copy of the last in host memory, [G + 1] int32.

    The host does not wait for the copy; `arrived` does. It is queued before the kernels that read the rows.
    """
    rows, slots, offsets = expert_rows.definition(choices, first, count)
    on_host = torch.zeros_like(offsets, device="cpu") if offsets.is_meta else offsets.to("cpu", copy=True)
    return rows, slots, offsets, on_host


def arrived(on_host: Tensor) -> Tensor:
    """Return the last result of `expert_rows_for_host` once it has its values; only the first call for it may wait."""
    behind = _arrivals.pop(on_host.data_ptr(), None)
    if behind is not None:
        behind.synchronize()
    return on_host


@operator("gather_rows", "expert_rows.launch_gather_rows", splits=(Split((1, None), 1),))
def gather_rows(x: Tensor, slots: Tensor, top_k: int, after: Tensor | None = None) -> Tensor:
    """Copy each token to its rows.

    Args:
        x: [M, D].
        slots: [R] int32, slot m·K + k of each row, whose token is m; -1: a row of zeros. On a GPU, rows of zeros that
            follow more than 128 rows after the last row with a token are not written.
        top_k: K.
        after: see `spread_rows`.

    Returns:
        [R, D] in `x.dtype`.
    """
    bits = as_bytes(x)
    found = bits.index_select(0, slots.clamp(min=0) // top_k) if len(x) else bits.new_empty(len(slots), x.shape[1])
    return found.masked_fill(slots[:, None] < 0, 0).view(x.dtype)


@operator("combine", "expert_rows.launch_combine", splits=(Split((1, None), 1), Split((1, None, None), 1)))
def combine(o: Tensor, rows: Tensor, weights: Tensor | None) -> Tensor:
    """Add up the rows of each token, times its weights, in the order of its slots, in float32.

    Args:
        o: [R, D].
        rows: [M, K] int32, the rows of each token; -1 adds nothing.
        weights: [M, K] float32; None: all are 1.

    Returns:
        [M, D] in `o.dtype`, rounded once.
    """
    dtype = torch.promote_types(o.dtype, torch.float32)
    total = o.new_zeros(len(rows), o.shape[1], dtype=dtype)
    for k in range(rows.shape[1]):
        row = _rows_at(o, rows[:, k], dtype)
        total += row if weights is None else row * weights[:, k, None]
    return total.to(o.dtype)


@operator("spread_rows", "expert_rows.launch_spread_rows", splits=(Split((1, None), 1), Split((1, None, None), 1)))
def spread_rows(x: Tensor, rows: Tensor, weights: Tensor | None, n_rows: int, after: Tensor | None = None) -> Tensor:
    """Copy each token, times its weights, to its rows: the gradient of `combine`. Without weights the rows of tokens
    equal those of `gather_rows`, but `x` is read only once.

    Args:
        x: [M, D].
        rows: [M, K] int32, the rows of each token; -1: none.
        weights: [M, K] float32; None: all are 1.
        n_rows: R; rows without a token are not written.
        after: a tensor that must be computed first; it is not read. In backward it is a gradient: otherwise a compiler
            might keep the rows from forward, which take K times the memory of the tokens.

    Returns:
        [R, D] in `x.dtype`.
    """
    at = torch.where(rows < 0, n_rows, rows).flatten().long()
    spread = x[:, None].expand(-1, rows.shape[1], -1)
    if weights is not None:
        spread = (spread.to(torch.promote_types(x.dtype, torch.float32)) * weights[:, :, None]).to(x.dtype)
    spread = as_bytes(spread.flatten(0, 1))
    nothing = torch.nan if spread.is_floating_point() else 0x7F  # NaN in float8
    return spread.new_full((n_rows + 1, x.shape[1]), nothing).index_copy(0, at, spread)[:-1].view(x.dtype)


@operator("row_dots", "expert_rows.launch_row_dots")
def row_dots(grad: Tensor, o: Tensor, rows: Tensor) -> Tensor:
    """Return <grad[m], o[rows[m, k]]>, the gradient of the weights of `combine`; `grad`: gradient of its result.

    Returns:
        [M, K] float32 (float64 for float64); 0 where there is no row.
    """
    dtype = torch.promote_types(o.dtype, torch.float32)
    dots = [(_rows_at(o, row, dtype) * grad.to(dtype)).sum(1) for row in rows.unbind(1)]
    return torch.stack(dots, 1)


def rows_of_slots(slots: Tensor, n: int) -> Tensor:
    """Invert the slots of rows, [R] int32: return the row of each of n slots, [n] int32, -1 for none."""
    rows = slots.new_full((n + 1,), -1)  # the last element is for rows without a token
    places = torch.arange(len(slots), dtype=slots.dtype, device=slots.device)
    return rows.scatter(0, torch.where(slots < 0, n, slots).long(), places)[:-1]


def as_bytes(x: Tensor) -> Tensor:
    """View float8 as bytes, for copies: torch cannot index rows of float8 on CPUs."""
    return x.view(torch.uint8) if x.element_size() == 1 else x


def _rows_at(o: Tensor, row: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the rows of `o`, [R, D], with the indices `row`, [M], as [M, D]; zeros for -1."""
    if not len(o):
        return o.new_zeros(len(row), o.shape[1], dtype=dtype)
    return o.index_select(0, row.clamp(min=0)).to(dtype).masked_fill(row[:, None] < 0, 0)


def _save_gather_rows(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, slots, ctx.top_k, *_ = inputs
    ctx.tokens = len(x)
    ctx.save_for_backward(slots)


def _gather_rows_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    (slots,) = ctx.saved_tensors
    rows = rows_of_slots(slots, ctx.tokens * ctx.top_k).view(ctx.tokens, ctx.top_k)
    return combine(grad.contiguous(), rows, None), None, None, None


def _save_with_weights(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, rows, weights, *_ = inputs
    ctx.n_rows = len(x)
    ctx.save_for_backward(x if ctx.needs_input_grad[2] else None, rows, weights)


def _combine_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    o, rows, weights = ctx.saved_tensors
    of_o = spread_rows(grad, rows, weights, ctx.n_rows) if ctx.needs_input_grad[0] else None
    return of_o, None, None if o is None else row_dots(grad, o, rows).to(weights.dtype)


def _spread_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, rows, weights = ctx.saved_tensors
    of_x = combine(grad, rows, weights) if ctx.needs_input_grad[0] else None
    return of_x, None, None if x is None else row_dots(x, grad, rows).to(weights.dtype), None, None


torch.library.register_autograd("titanlite::gather_rows", _gather_rows_backward, setup_context=_save_gather_rows)
torch.library.register_autograd("titanlite::combine", _combine_backward, setup_context=_save_with_weights)
torch.library.register_autograd("titanlite::spread_rows", _spread_backward, setup_context=_save_with_weights)
