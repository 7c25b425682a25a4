"""The experts of a layer in float8 with one scale per row. Tensors are cast once; tokens are sent to experts as bytes.

As in `fused.py`, scales must not vary along the dim that a matmul sums over. A weight's gradient sums over the rows of
an expert. So both operands are transposed, and the narrower one is multiplied by the scales of both and cast again. In
the transposed operands the rows of an expert begin at multiples of 16 (`kernels/aligned_rows.py`).
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from titanlite.config.recipe_schema import Float8Recipe
from titanlite.float8.cast import DTYPES, Cast
from titanlite.float8.weight import GatheredWeight
from titanlite.kernels.aligned_rows import aligned_rows
from titanlite.kernels.collectives import Group
from titanlite.kernels.expert_gate import expert_gate_cast, expert_gate_grad_cast
from titanlite.kernels.expert_windows import (
    ARITHMETICS,
    RowGradients,
    combine_windows_at_owners,
    first_window,
    in_windows,
    window_gradients_at_owners,
)
from titanlite.kernels.float8_cast import cast_rows, cast_transpose, transpose
from titanlite.kernels.grouped_matmul import scaled_grouped_gradient, scaled_grouped_matmul
from titanlite.kernels.routing import gather_rows
from titanlite.kernels.token_exchange import Dispatch, Routing

ROWWISE = "rowwise"
"""The name of this file's arithmetic in `ARITHMETICS`; its arguments are the fields of `_How`."""


class Float8Experts:
    """Computes experts by a recipe whose scales are by row and powers of two; called as `kernels.experts.experts`.

    Args:
        recipe: the float8 recipe.
        group: see `kernels.experts.PlainExperts`.
    """

    def __init__(self, recipe: Float8Recipe, group: Group | None = None) -> None:
        self.recipe, self.group = recipe, group

    def __call__(self, x: Tensor, weights: Tensor, choices: Tensor, w13: Tensor, w2: Tensor, n_experts: int) -> Tensor:
        """Return the weighted sum of the results of each token's experts, [M, D] for M tokens of width D."""
        group = () if self.group is None else self.group
        count = n_experts // (1 if self.group is None else self.group.size)
        return _Float8Experts.apply(x, weights, choices, w13, w2, count, self.recipe, *group)  # type: ignore[no-any-return]


class _Side(NamedTuple):
    """An operand of a weight's gradient. Its aligned form has P rows, each a row of `cast` or padding."""

    cast: Cast  # [n, width], with scales of rows
    sources: Tensor  # [P], for each aligned row its row in `cast`; negative: padding

    def factors(self) -> Tensor:
        """Return the inverse scale of each aligned row, [P, 1]."""
        return self.cast.scale_inv[self.sources.clamp(min=0)]


class _How(NamedTuple):
    """The dtypes of operands, "e4m3" or "e5m2", and the accumulation of each product, "fast" or "split"."""

    input: str
    weight: str
    grad_output: str
    output: str
    grad_input: str
    grad_weight: str
    dtype: str  # of results

    @classmethod
    def of(cls, recipe: Float8Recipe, dtype: torch.dtype) -> "_How":
        dtypes, sums = (recipe.input.dtype, recipe.weight.dtype, recipe.grad_output.dtype), recipe.accumulation
        return cls(*dtypes, sums.output, sums.grad_input, sums.grad_weight, str(dtype).removeprefix("torch."))

    @property
    def result(self) -> torch.dtype:
        return getattr(torch, self.dtype)


@torch._dynamo.allow_in_graph  # Dynamo cannot see inside weights in float8
class _Float8Experts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weights: Tensor,
        choices: Tensor,
        w13: Tensor,
        w2: Tensor,
        count: int,
        recipe: Float8Recipe,
        *group: str | int,
    ) -> Tensor:
        ctx.to, how = (to := Dispatch(*group)), _How.of(recipe, x.dtype)
        c = Cast(*cast_rows(x, DTYPES[how.input]))
        *sent, every = to.gathered(*c, choices)
        routing = in_windows(every, to, count)
        _, slots, offsets, _ = first = first_window(routing, to, count)
        cast = [_straight(w, how) for w in (w13, w2)]
        a = _product_of_rows(_sent(Cast(*sent), first, to), _by_expert(cast[0], count), offsets, how, how.output)
        o = _float8_results(a, _by_expert(cast[1], count), slots, offsets, how)
        ctx.save_for_backward(x, weights, choices if group else None, a, w13, w2, *routing)
        ctx.count, ctx.how = count, how
        if routing.on_host is None:
            return to.sums(o, first, choices, weights, count)
        rows = o, slots, choices, weights, count, routing.slots, routing.offsets, routing.on_host
        return combine_windows_at_owners(*rows, [*sent, *cast[0], *cast[1]], _how_in_words(how), to.name)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weights, choices, a, w13, w2, *routing = ctx.saved_tensors
        how, count, to, routing = ctx.how, ctx.count, ctx.to, Routing(*routing)
        first, on_host = first_window(routing, to, count), routing.on_host
        g = Cast(*cast_rows(grad.contiguous(), DTYPES[how.grad_output]))
        for_w13, for_w2 = ctx.needs_input_grad[3:5]
        # The router's backward keeps x, too: casting it again takes less than keeping both.
        c = cast_rows(x, DTYPES[how.input], grad) if for_w13 or on_host is not None else ()
        *of_all, weights = to.gathered(*g, *c, weights)
        g, c = Cast(*of_all[:2]), of_all[2:]
        w13, w2, ends = _straight(w13, how), _straight(w2, how), first.offsets
        d_a, h, dots, d_rows = _through_experts(_sent(g, first, to), a, weights, w13, w2, first.slots, ends, how)
        x = Cast(*c) if for_w13 else None
        if on_host is None:  # d_rows is freed before the weights' gradients are computed
            d_x, d_weights = to.gradients(d_rows, first, choices, dots, count)
        d_w13, d_w2 = _of_weights(g, x, d_a, h, weights, first.slots, first.offsets, how, for_w2)
        if on_host is not None:
            of_rows = d_rows, first.slots, choices, dots, count, routing.slots, routing.offsets, on_host, weights
            given = [*g, *c, *w13, *w2]
            d_x, d_weights = window_gradients_at_owners(*of_rows, given, d_w13, d_w2, _how_in_words(how), to.name)
        d_w13, d_w2 = (None if w is None else w.flatten(0, 1) for w in (d_w13, d_w2))
        return d_x, d_weights, None, d_w13, d_w2, None, None, *[None] * 3 * (to.group is not None)


def _how_in_words(how: _How) -> str:
    return " ".join((ROWWISE, *how))


def _sent(c: Cast, routing: Routing, to: Dispatch) -> Cast:
    """Copy the float8 bytes and scales of tokens to the rows of their experts."""
    return Cast(to.rows(c.qdata, routing), _scales_of(c, routing.slots, routing.rows.shape[1]))


def _rows_of(c: Cast, slots: Tensor, top_k: int) -> Cast:
    """Copy the float8 bytes and scales of tokens to rows with these slots."""
    return Cast(gather_rows(c.qdata, slots, top_k), _scales_of(c, slots, top_k))


def _scales_of(c: Cast, slots: Tensor, top_k: int) -> Tensor:
    return c.scale_inv[slots.clamp(min=0) // top_k]


def _product_of_rows(a: Cast, weight: Cast, offsets: Tensor, how: _How, sums: str) -> Tensor:
    scales = a.scale_inv, weight.scale_inv
    return scaled_grouped_matmul(a.qdata, weight.qdata, *scales, offsets, how.result, sums == "fast")


def _float8_results(a: Tensor, w2: Cast, slots: Tensor, offsets: Tensor, how: _How) -> Tensor:
    h = Cast(*expert_gate_cast(a, slots, DTYPES[how.input]))
    return _product_of_rows(h, w2, offsets, how, how.output)


def _through_experts(
    g: Cast, a: Tensor, weights: Tensor, w13: Cast, w2: Cast, slots: Tensor, offsets: Tensor, how: _How
) -> tuple[Cast, Cast, Tensor, Tensor]:
    """Return the gradient of `a`, the gate's result, both cast, and the gradients of the weights and of the rows.

    `g` are the rows' gradients, `w13` and `w2` the stacked weights.
    """
    E = len(offsets) - 1
    d_h = _product_of_rows(g, _transposed(w2, E, how, g.qdata), offsets, how, how.grad_input)
    *cast, dots = expert_gate_grad_cast(d_h, a, weights, slots, DTYPES[how.grad_output])
    del g, a, d_h  # freed, unless the caller keeps them, before the rows' gradients are allocated
    d_a, h = Cast(*cast[:2]), Cast(*cast[2:])
    return d_a, h, dots, _product_of_rows(d_a, _transposed(w13, E, how, d_a.qdata), offsets, how, how.grad_input)


def _of_weights(
    g: Cast,
    x: Cast | None,
    d_a: Cast,
    h: Cast,
    weights: Tensor,
    slots: Tensor,
    offsets: Tensor,
    how: _How,
    for_w2: bool,
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of w13 and w2 from all tokens' gradients `g` and tokens `x`; None for one without."""
    if x is None and not for_w2:
        return None, None
    row_of, token_of, begins = aligned_rows(slots, offsets, weights.shape[1])
    weight = weights.flatten()[slots.clamp(min=0)][:, None]
    weighed = _Side(Cast(h.qdata, h.scale_inv * weight), row_of)
    d_w2 = _gradient(_Side(g, token_of), weighed, begins, how) if for_w2 else None
    d_w13 = None if x is None else _gradient(_Side(d_a, row_of), _Side(x, token_of), begins, how)
    return d_w13, d_w2


def _straight(weight: Tensor, how: _How) -> Cast:
    if isinstance(weight, GatheredWeight):
        return Cast(weight.qdata, weight.scale_inv)
    return Cast(*cast_rows(weight, DTYPES[how.weight]))


def _by_expert(weight: Cast, E: int) -> Cast:
    """View the stacked weights [E·N, K] of E experts, cast by row, as [E, N, K] with inverse scales [E, N]."""
    return Cast(weight.qdata.unflatten(0, (E, -1)), weight.scale_inv.view(E, -1))


def _transposed(weight: Cast, E: int, how: _How, after: Tensor) -> Cast:
    """Cast the transposes of the weights [E·N, K] of E experts, after the tensor `after` exists; return [E, K, N], with
    inverse scales [1, K] that all experts share."""
    qdata, scale_inv = cast_transpose(*weight, True, DTYPES[how.weight], True, after)
    return Cast(qdata.unflatten(1, (E, -1)).transpose(0, 1), scale_inv.t())


def _gradient(grad: _Side, x: _Side, begins: Tensor, how: _How) -> Tensor:
    """Return the gradient of a weight, [E, N, K], as the product of the transposed operands.

    The narrower one is multiplied by the scales of both and cast again. `begins`: first aligned row of each expert.
    """
    of_grad = grad.cast.qdata.shape[1] <= x.cast.qdata.shape[1]
    narrow, wide = (grad, x) if of_grad else (x, grad)
    operand = DTYPES[how.grad_output if of_grad else how.input]
    factors = narrow.factors() * wide.factors()
    again, scale_inv = cast_transpose(narrow.cast.qdata, factors, True, operand, True, None, narrow.sources)
    other = transpose(wide.cast.qdata, None, wide.sources)
    operands = (again, other, scale_inv, None) if of_grad else (other, again, None, scale_inv)
    return scaled_grouped_gradient(*operands, begins, how.result, how.grad_weight == "fast")


class _Float8Windows:
    """Computes windows after the first. Given are all ranks' tokens and the experts' weights, with inverse scales."""

    def __init__(self, *how: str) -> None:
        self.how = _How(*how)

    def results(self, given: list[Tensor], top_k: int, slots: Tensor, offsets: Tensor) -> Tensor:
        (x, w13, w2), E = _casts(given), len(offsets) - 1
        a = _product_of_rows(_rows_of(x, slots, top_k), _by_expert(w13, E), offsets, self.how, self.how.output)
        return _float8_results(a, _by_expert(w2, E), slots, offsets, self.how)

    def gradients(
        self, given: list[Tensor], weights: Tensor, slots: Tensor, offsets: Tensor, for_w13: bool, for_w2: bool
    ) -> RowGradients:
        (g, x, w13, w2), how, top_k = _casts(given), self.how, weights.shape[1]
        of_experts = _by_expert(w13, len(offsets) - 1)
        d_a, h, dots, d_rows = _through_experts(
            _rows_of(g, slots, top_k),
            _product_of_rows(_rows_of(x, slots, top_k), of_experts, offsets, how, how.output),
            weights, w13, w2, slots, offsets, how,
        )  # fmt: skip
        d_w13, d_w2 = _of_weights(g, x if for_w13 else None, d_a, h, weights, slots, offsets, how, for_w2)
        return RowGradients(d_rows, dots, d_w13, d_w2)


def _casts(given: list[Tensor]) -> list[Cast]:
    return [Cast(*pair) for pair in zip(given[::2], given[1::2], strict=True)]


ARITHMETICS[ROWWISE] = _Float8Windows
