"""The plain products inside the collective matmuls: their shapes, scales and gradients."""

import functools
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import mm_flop

from titanlite.kernels.collectives import gather_dim, named_group
from titanlite.kernels.operators import operator
from titanlite.kernels.shapes import unviewed

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
KERNEL_DTYPES = (torch.bfloat16, torch.float16, *FLOAT8)
"""The dtypes that titanlite's own kernels multiply."""
FSDP_GATHER, FSDP_REDUCE, EXPERTS = 2, 3, 4
"""Indices in `device.channel.OPERATORS` of operators that share memory between ranks, besides collective matmuls."""
MAX_RANKS = 8
"""Most ranks that a fused collective matmul supports."""
MAX_PAIRS = 3
"""Most products that a fused matmul → reduce-scatter sums."""
NOTHING = "nothing to multiply"
"""The reason not to fuse a call that only gathers, or is empty."""
SLOWER = "NCCL and cuBLAS one after the other are faster for this shape, by the tuning table"
EXPECTED = (NOTHING, SLOWER)
"""Reasons for which a call is rightly not fused."""


def too_many_ranks(ranks: int) -> str | None:
    """Return the reason why kernels do not support a group of this size, or None."""
    return None if 2 <= ranks <= MAX_RANKS else f"a group of {ranks} ranks; the kernels take 2 to {MAX_RANKS}"


def unsupported_operands(dtype: torch.dtype, ranks: int) -> str | None:
    """Return why no collective matmul of this dtype is fused in a group of this size, or None."""
    if dtype not in KERNEL_DTYPES:
        return f"{dtype} operands; the kernels take bfloat16, float16 and float8"
    return too_many_ranks(ranks)


def contracts_last(form: str) -> bool:
    """Return whether products of this form contract the last dim of the gathered tensor."""
    return form in ("left", "right_t")


class GatherCall(NamedTuple):
    """The arguments of a call of `all_gather_matmul`; see its docstring."""

    shard: Tensor
    others: list[Tensor]
    dim: int
    size: int
    group: str
    form: str
    biases: list[Tensor]
    scale: Tensor | None
    scale_of: str
    other_scales: list[Tensor]
    out_dtype: torch.dtype | None
    fast_accum: bool

    @property
    def operands(self) -> tuple[Tensor | None, ...]:
        """Return all tensors among the arguments."""
        return self.shard, *self.others, *self.biases, self.scale, *self.other_scales

    @property
    def options(self) -> tuple[object, ...]:
        """Return the other arguments that decide how the call runs."""
        return len(self.others), self.dim, self.size, self.form, self.scale_of, self.out_dtype, self.fast_accum

    @property
    def at(self) -> int:
        """Return `dim` as a non-negative index."""
        return self.dim % self.shard.ndim

    @property
    def whole(self) -> list[int]:
        """Return the shape of the gathered tensor."""
        return [*self.shard.shape[: self.at], self.size, *self.shard.shape[self.at + 1 :]]

    @property
    def moves_scale(self) -> bool:
        """Return whether scales are gathered with the tensor."""
        return self.scale is not None and scales_travel(self.scale_of, self.dim, self.shard.ndim)


class ScatterCall(NamedTuple):
    """The arguments of a call of `matmul_reduce_scatter`; see its docstring."""

    lefts: list[Tensor]
    rights: list[Tensor]
    dim: int
    group: str
    bias: Tensor | None
    left_scales: list[Tensor]
    right_scales: list[Tensor]
    out_dtype: torch.dtype | None
    fast_accum: bool

    @property
    def operands(self) -> tuple[Tensor | None, ...]:
        """Return all tensors among the arguments."""
        return *self.lefts, *self.rights, self.bias, *self.left_scales, *self.right_scales

    @property
    def options(self) -> tuple[object, ...]:
        """Return the other arguments that decide how the call runs."""
        return len(self.lefts), self.dim, self.out_dtype, self.fast_accum


def dtype_of_sum(dtype: torch.dtype, reduce_op: str, ranks: int) -> torch.dtype:
    """Return the dtype in which to sum over ranks without overflow or double rounding; `reduce_op`: "sum" or "avg"."""
    if reduce_op == "sum" or (ranks.bit_count() == 1 and dtype != torch.float16):
        return dtype
    return torch.promote_types(dtype, torch.float32)


def product_shape(left: torch.Size | list[int], right: torch.Size | list[int]) -> list[int]:
    """Return the shape of `[…, K] @ [K, N]`."""
    return [*left[:-1], right[1]]


def differences(operands: Iterable[Tensor | None], scales: Iterable[Tensor | None]) -> Iterator[str]:
    """Yield a message if operands are on several devices, and for each scale that is not float32."""
    scales = [scale for scale in scales if scale is not None]
    devices = {t.device for t in (*operands, *scales) if t is not None}
    if len(devices) > 1:
        yield f"operands on {', '.join(sorted(map(str, devices)))}; want one device"
    for scale in scales:
        if scale.dtype != torch.float32:
            yield f"a scale of {scale.dtype}; want torch.float32"


def out_dtype_of(dtype: torch.dtype, wanted: torch.dtype | None) -> torch.dtype:
    """Return the dtype of a product of `dtype` operands: `wanted`, or if None `dtype`, or bfloat16 for float8."""
    return wanted or (torch.bfloat16 if dtype in FLOAT8 else dtype)


def product(
    left: Tensor,
    right: Tensor,
    bias: Tensor | None = None,
    left_scale: Tensor | None = None,
    right_scale: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    fast_accum: bool = False,
) -> Tensor:
    """Return `left […, K] @ right [K, N] + bias`, contiguous, summed in float32 (float64 in float64) and rounded once.

    Args:
        bias: [N], any dtype.
        left_scale, right_scale: float8 only: inverse scales, float32, [] each, or […, 1] and [1, N].
        out_dtype: of the result; None: the dtype of the operands, or bfloat16 for float8.
        fast_accum: float8 only: let tensor cores accumulate, with about 14 bits.
    """
    dtype = out_dtype_of(left.dtype, out_dtype)
    shape = product_shape(left.shape, right.shape)
    left = left.flatten(0, -2)
    if left_scale is not None and right_scale is not None:
        wide = torch.float32 if bias is not None else dtype
        out = scaled_product(left, right, left_scale, right_scale, wide, fast_accum)
        return unviewed(out if bias is None else (out + bias).to(dtype), shape)
    if bias is not None and bias.dtype == dtype == left.dtype:
        return unviewed(torch.addmm(bias, left, right), shape)
    if bias is None and dtype == left.dtype:
        return unviewed(left @ right, shape)
    accumulated = torch.promote_types(left.dtype, torch.float32)
    wide = left.to(accumulated) @ right.to(accumulated)
    return unviewed((wide if bias is None else wide + bias).to(dtype), shape)


def scales_travel(scale_of: str, dim: int, ndim: int) -> bool:
    """Return whether scales are gathered with the tensor: those by shard, and those by row unless rows are split."""
    return scale_of == "shard" or (scale_of == "row" and dim % ndim != ndim - 1)


def products(call: GatherCall, gathered: Tensor, scale: Tensor | None, first: int = 0) -> list[Tensor]:
    """Multiply the gathered tensor, whose scale is `scale`, by each of `call.others` from index `first` on."""
    operand = gathered.t() if call.form.endswith("_t") else gathered
    outs: list[Tensor] = []
    for i, other in enumerate(call.others[first:], first):
        bias, other_scale = call.biases[i] if call.biases else None, call.other_scales[i] if call.other_scales else None
        if call.form.startswith("left"):
            outs.append(product(operand, other, bias, scale, other_scale, call.out_dtype, call.fast_accum))
        else:
            of_columns = scale.reshape(1, -1) if scale is not None and scale.numel() > 1 else scale
            outs.append(product(other, operand, bias, other_scale, of_columns, call.out_dtype, call.fast_accum))
    return outs


def gather_scale(call: GatherCall) -> Tensor | None:
    """Return the scale of the gathered tensor: [], or [..., 1] by row. Collective if scales are gathered."""
    if call.scale is None or call.scale_of == "tensor":
        return call.scale
    rows = [*call.shard.shape[:-1], 1]
    if call.scale_of == "row" and call.at == call.shard.ndim - 1:
        return call.scale.view(rows)
    scale = call.scale.expand(rows) if call.scale_of == "shard" else call.scale
    return gather_dim(scale.reshape(rows), call.at, call.size, named_group(call.group))


def out_shapes(gathered: list[int], others: list[Tensor], form: str) -> list[list[int]]:
    """Return the shape of each product of a gathered tensor, whose shape is `gathered`."""
    operand = gathered[::-1] if form.endswith("_t") else gathered
    if form.startswith("left"):
        return [product_shape(operand, other.shape) for other in others]
    return [product_shape(other.shape, operand) for other in others]


def gradient_of_bias(grad: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the gradient of a bias [N] in `dtype`, rounded once; `grad`: gradient of the product, […, N]."""
    return grad.flatten(0, -2).sum(0, dtype=torch.promote_types(grad.dtype, dtype)).to(dtype)


def gradient_of_right(left: Tensor, grad: Tensor, right: Tensor) -> Tensor:
    """Return the gradient of `right` in `left @ right`, in the memory order of `right`.

    A weight [N, K] is passed as its transpose. If its gradient had another memory order, it would have to be copied.
    """
    left, grad = left.flatten(0, -2), grad.flatten(0, -2)
    if right.stride(0) == 1:
        return (grad.t() @ left).t()
    return left.t() @ grad


def scaled_product(
    left: Tensor, right: Tensor, left_scale: Tensor | None, right_scale: Tensor | None, dtype: torch.dtype, fast: bool
) -> Tensor:
    """Return a float8 product [M, N], accumulated in float32 and rounded once.

    If one operand has a single scale and the other has several, the single one is expanded: cuBLAS does not mix them.

    Args:
        left: [M, K], rows contiguous.
        right: [K, N], columns contiguous.
        left_scale: inverse scale, [] or one number for each row, float32; None: 1.
        right_scale: inverse scale, [] or one number for each column, float32; None: 1.
        dtype: of the result.
        fast: `fast_accum` of `product`.
    """
    M, N = left.shape[0], right.shape[1]
    if not left.is_cuda:
        left = left.float() if left_scale is None else left.float() * left_scale.reshape(-1, 1)
        right = right.float() if right_scale is None else right.float() * right_scale.reshape(1, -1)
        return (left @ right).to(dtype)
    left, right = left.contiguous(), right if right.stride(0) == 1 else right.t().contiguous().t()
    of_all = (left_scale is None or left_scale.numel() == 1) and (right_scale is None or right_scale.numel() == 1)
    if not of_all and dtype != torch.bfloat16:  # cuBLAS scales rows only if the result is bfloat16
        one = _ones((), left.device)
        wide = torch._scaled_mm(left, right, one, one, out_dtype=torch.float32, use_fast_accum=fast)
        for scale, shape in ((left_scale, (-1, 1)), (right_scale, (1, -1))):
            wide = wide if scale is None else wide * scale.reshape(shape)
        return wide.to(dtype)
    left_scale = _scale(left_scale, () if of_all else (M, 1), left.device)
    right_scale = _scale(right_scale, () if of_all else (1, N), left.device)
    return torch._scaled_mm(left, right, left_scale, right_scale, out_dtype=dtype, use_fast_accum=fast)


def _scale(scale: Tensor | None, shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Return a scale in this shape, contiguous, as cuBLAS needs it; ones for None."""
    if scale is None:
        return _ones(shape, device)
    if scale.shape != shape:
        scale = scale.reshape(shape) if shape == () or scale.numel() > 1 else scale.reshape(()).expand(shape)
    return scale.contiguous()


@functools.cache
def _ones(shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Return cached ones, ready on all streams. Filling new ones takes the host as long as launching the product."""
    ones = torch.ones(shape, dtype=torch.float32, device=device)
    torch.cuda.current_stream(device).synchronize()
    return ones


@operator("scaled_matmul", None, flops=lambda *given, **_: mm_flop(*given[:2]))
def scaled_matmul(
    left: Tensor,
    right: Tensor,
    left_scale_inv: Tensor | None,
    right_scale_inv: Tensor | None,
    out_dtype: torch.dtype,
    fast_accum: bool,
) -> Tensor:
    """Compute `scaled_product` as one operator, so that graphs traced on a CPU and on a GPU are equal."""
    return scaled_product(left, right, left_scale_inv, right_scale_inv, out_dtype, fast_accum)
