"""Products of groups of rows with one weight per group, for experts. The rows of a group are contiguous.

    rows of a     | 0 0 0 0 0 | 1 1 | 3 3 3 3 |      offsets 0, 5, 7, 7, 11: group 2 has none

The groups' sizes are data on the device: no shape depends on them, so that nothing is recompiled and the host does not
wait. Rows after the last group belong to no group. Products are undefined in these rows. For a weight's gradient, these
rows of the operands must be finite.
"""

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from titanlite.device import Device, device_of
from titanlite.kernels.operators import operator


def grouped_kernel(device: Device, dtype: torch.dtype, widths: Sequence[int]) -> str:
    """Name what computes results in `dtype`: "grouped_matmul", a kernel for Hopper, 16 bits and `widths`, N and K,
    divisible by 128; or "loop", one matmul per group after the host has waited for the groups' sizes."""
    is_taken = dtype.itemsize == 2 and not any(n % 128 for n in widths)
    return "grouped_matmul" if is_taken and device.capability == (9, 0) else "loop"


def _has_no_kernel(x: Tensor, dtype: torch.dtype, *widths: int) -> bool:
    return grouped_kernel(device_of(x.device), dtype, widths) == "loop"


def _is_loop(left: Tensor, right: Tensor, *others: Any) -> bool:
    dtype = next((given for given in others if isinstance(given, torch.dtype)), left.dtype)  # of float8's results
    return _has_no_kernel(left, dtype, left.shape[1], right.shape[1])


def _grouped_flops(left_shape: Any, right_shape: Any, *_: Any, **__: Any) -> int:
    """Count the operations for every row, also for rows of no group."""
    R, K = left_shape
    return 2 * R * K * right_shape[1]


@operator("grouped_matmul", "grouped_matmul.launch_grouped_matmul", unless=_is_loop, flops=_grouped_flops)
def grouped_matmul(a: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """Multiply the rows of each group with the group's weight. Sums are in float32 (float64 for float64), rounded once.

    Args:
        a: [R, K].
        weight: [G, N, K], the last two dims in any order in memory.
        offsets: [G + 1] int32: group g has the rows from offsets[g] to offsets[g + 1]; offsets[0] is 0.

    Returns:
        [R, N] in `a.dtype`.
    """
    y = a.new_zeros(len(a), weight.shape[1])
    for group, rows in _groups_with_rows(offsets):
        torch.mm(a[rows], weight[group].t(), out=y[rows])
    return y


@operator("grouped_weight_gradient", "grouped_gradient.launch_grouped_gradient", unless=_is_loop, flops=_grouped_flops)
def grouped_weight_gradient(grad: Tensor, x: Tensor, offsets: Tensor) -> Tensor:
    """Return the gradient of each group's weight, zeros for a group without rows.

    Args:
        grad: [R, N], gradient of the product.
        x: [R, K], left operand of the product.
        offsets: see `grouped_matmul`.

    Returns:
        [G, N, K] in `x.dtype`.
    """
    gradient = x.new_zeros(len(offsets) - 1, grad.shape[1], x.shape[1])
    for group, rows in _groups_with_rows(offsets):
        torch.mm(grad[rows].t(), x[rows], out=gradient[group])
    return gradient


@operator("scaled_grouped_matmul", "grouped_matmul.launch_scaled_grouped_matmul", unless=_is_loop, flops=_grouped_flops)
def scaled_grouped_matmul(
    a: Tensor,
    weight: Tensor,
    scale_inv: Tensor,
    weight_scale_inv: Tensor,
    offsets: Tensor,
    out_dtype: torch.dtype,
    fast_accum: bool,
) -> Tensor:
    """Multiply the rows of each group with the group's weight, both in float8, summed in float32 and rounded once.

    Args:
        a: [R, K] float8.
        weight: [G, N, K] float8, rows contiguous; in memory the groups are stacked, or side by side.
        scale_inv, weight_scale_inv: inverse scales, float32: [R, 1], and [G, N], or [1, N] for all groups.
        offsets: see `grouped_matmul`.
        out_dtype: of the result.
        fast_accum: let tensor cores accumulate, with about 14 bits.

    Returns:
        [R, N].
    """
    y = a.new_zeros(len(a), weight.shape[1], dtype=out_dtype)
    for group, rows in _groups_with_rows(offsets):
        product = a[rows].float() @ weight[group].float().t()
        y[rows] = (product * scale_inv[rows] * weight_scale_inv[group % len(weight_scale_inv)]).to(out_dtype)
    return y


@operator(
    "scaled_grouped_gradient",
    "grouped_gradient.launch_scaled_grouped_gradient",
    unless=lambda grad, x, _, __, ___, dtype, *____: x.shape[1] % 16 or _has_no_kernel(x, dtype, len(grad), len(x)),
    flops=lambda grad_shape, x_shape, *_, **__: 2 * math.prod(grad_shape) * x_shape[0],
)
def scaled_grouped_gradient(
    grad: Tensor,
    x: Tensor,
    grad_scale_inv: Tensor | None,
    x_scale_inv: Tensor | None,
    offsets: Tensor,
    out_dtype: torch.dtype,
    fast_accum: bool,
) -> Tensor:
    """Return the gradient of each group's weight from transposed float8 operands; zeros for a group without rows.

    Args:
        grad: [N, R] float8, contiguous: transposed gradient of the product.
        x: [K, R] float8, contiguous: transposed left operand of the product.
        grad_scale_inv, x_scale_inv: inverse scales, [N, 1] and [K, 1] float32; None: 1.
        offsets: see `grouped_matmul`; multiples of 16, as TMA requires (`aligned_rows`).
        out_dtype, fast_accum: see `scaled_grouped_matmul`.

    Returns:
        [G, N, K].
    """
    gradient = x.new_zeros(len(offsets) - 1, len(grad), len(x), dtype=out_dtype)
    for group, rows in _groups_with_rows(offsets):
        product = grad[:, rows].float() @ x[:, rows].float().t()
        product = product if grad_scale_inv is None else product * grad_scale_inv
        gradient[group] = (product if x_scale_inv is None else product * x_scale_inv.t()).to(out_dtype)
    return gradient


def _groups_with_rows(offsets: Tensor) -> Iterator[tuple[int, slice]]:
    """Yield each group that has rows, and the range of its rows. On the meta device sizes are not known: yield none."""
    if offsets.is_meta:
        return
    ends = offsets.tolist()
    for group, (first, end) in enumerate(pairwise(ends)):
        if end > first:
            yield group, slice(first, end)
