"""Products of runs of rows with a weight each, as experts have them: the rows of a group lie together.

    rows of a     | 0 0 0 0 0 | 1 1 | 3 3 3 3 |      offsets 0, 5, 7, 7, 11: group 2 has none

How many rows a group has is data: shapes do not depend on it, nothing is compiled anew, and the host need not know.
Rows behind the last group are nobody's. What a product has there is undefined; a weight's gradient wants zeros or other
finite numbers there.
"""

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from titanlite.kernels.operators import device_code, operator

_multiply = device_code("grouped_matmul.launch_grouped_matmul")
_weight_gradient = device_code("grouped_gradient.launch_grouped_gradient")


def grouped_kernel(a: Tensor, weight: Tensor) -> str:
    """Name what multiplies: "grouped_matmul" on Hopper, "loop" (a product for each group, which waits for the GPU to
    know the groups) on other devices and for what the former does not take.

    Args:
        a: [R, K].
        weight: [G, N, K].
    """
    if not a.is_cuda or a.dtype not in (torch.bfloat16, torch.float16):
        return "loop"
    is_hopper = torch.cuda.get_device_capability(a.device) == (9, 0)
    return "grouped_matmul" if is_hopper and not any(n % 128 for n in weight.shape[1:]) else "loop"


def _multiply_groups(a: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    multiply = grouped_matmul.definition if grouped_kernel(a, weight) == "loop" else _multiply
    return multiply(a, weight, offsets)


def _weight_gradient_of_groups(grad: Tensor, x: Tensor, offsets: Tensor) -> Tensor:
    shape = x.new_empty(1, grad.shape[1], x.shape[1], device="meta")
    is_slow = grouped_kernel(x, shape) == "loop"
    return (grouped_weight_gradient.definition if is_slow else _weight_gradient)(grad, x, offsets)


@operator("grouped_matmul", _multiply_groups)
def grouped_matmul(a: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """Multiply the rows of each group with the group's weight, summed in float32 (float64's in float64), rounded once.

    Args:
        a: [R, K].
        weight: [G, N, K], the last two dims in either order in memory.
        offsets: [G + 1] int32: group g has the rows from offsets[g] to offsets[g + 1]; the first is 0.

    Returns:
        [R, N] in `a.dtype`.
    """
    y = a.new_zeros(len(a), weight.shape[1])
    for group, rows in _groups_with_rows(offsets):
        torch.mm(a[rows], weight[group].t(), out=y[rows])
    return y


@operator("grouped_weight_gradient", _weight_gradient_of_groups)
def grouped_weight_gradient(grad: Tensor, x: Tensor, offsets: Tensor) -> Tensor:
    """Return the gradient of each group's weight, zeros for a group without rows.

    Args:
        grad: [R, N], of the product.
        x: [R, K], that was multiplied.
        offsets: as of `grouped_matmul`.

    Returns:
        [G, N, K] in `x.dtype`.
    """
    gradient = x.new_zeros(len(offsets) - 1, grad.shape[1], x.shape[1])
    for group, rows in _groups_with_rows(offsets):
        torch.mm(grad[rows].t(), x[rows], out=gradient[group])
    return gradient


def _groups_with_rows(offsets: Tensor) -> Iterator[tuple[int, slice]]:
    """Give each group that has rows, with them; none without numbers, on the meta device."""
    if offsets.is_meta:
        return
    ends = offsets.tolist()
    for group, (first, end) in enumerate(pairwise(ends)):
        if end > first:
            yield group, slice(first, end)


@register_flop_formula([torch.ops.titanlite.grouped_matmul, torch.ops.titanlite.grouped_weight_gradient])
def _grouped_flops(left_shape, right_shape, *args, **kwargs) -> int:
    """As if every row had its group."""
    R, K = left_shape
    return 2 * R * K * (right_shape[1])
