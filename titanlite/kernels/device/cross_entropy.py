"""Device code of `titanlite.kernels.cross_entropy`: two passes over the logits, each of which reads them once.

A compiler reads them twice for the log-sum-exp, and takes indices of 64 bits for more than 2³¹ logits
(benchmarks/results/kernels.jsonl).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from titanlite.kernels.device.launch import cdiv, launch
from titanlite.kernels.ignore_index import IGNORE_INDEX

IGNORED = tl.constexpr(IGNORE_INDEX)
LEAST = tl.constexpr(torch.finfo(torch.float32).min)
LANES, AT_ONCE = 1024, 8
"""Sums that a thread block keeps of a row, and logits of each that it reads before it changes them."""
BLOCK = 2048
"""Logits whose gradient a thread block computes."""
WARPS = 4


@triton.jit
def _tanh(x):
    """Return tanh with an absolute error of a few units of 2⁻²⁴; that of PTX has an error of 2⁻¹¹."""
    return 2 * tl.sigmoid(2 * x) - 1


@triton.jit
def _cross_entropy_statistics(
    logits, targets, lse, picked, first, V, stride, softcap,
    CAPPED: tl.constexpr, AT_ONCE: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Store a row's log-sum-exp, and its target's logit, 0 if the target is not among its columns."""
    m = tl.program_id(0)
    row = logits + m.to(tl.int64) * stride
    at = tl.arange(0, AT_ONCE)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    most = tl.full((LANES,), LEAST, tl.float32)  # finite: the difference of two infinities is none
    total = tl.zeros((LANES,), tl.float32)
    for start in range(0, V, AT_ONCE * LANES):
        k = start + at
        x = tl.load(row + k, mask=k < V, other=float("-inf")).to(tl.float32)
        if CAPPED:
            x = tl.where(k < V, softcap * _tanh(x / softcap), float("-inf"))
        higher = tl.maximum(most, tl.max(x, 0))
        total = total * tl.exp(most - higher) + tl.sum(tl.exp(x - higher[None, :]), 0)
        most = higher
    top = tl.max(most, 0)
    tl.store(lse + m, top + tl.log(tl.sum(total * tl.exp(most - top), 0)))
    target = tl.load(targets + m) - first
    owned = (target >= 0) & (target < V)
    of_target = tl.load(row + target, mask=owned, other=0.0).to(tl.float32)
    if CAPPED:
        of_target = softcap * _tanh(of_target / softcap)
    tl.store(picked + m, of_target)


@triton.jit
def _cross_entropy_gradient(
    logits, targets, lse, scale, first, V, stride, softcap, z_loss, CAPPED: tl.constexpr, BLOCK: tl.constexpr
):
    """Write the gradient of a part of a row over its logits."""
    blocks = tl.cdiv(V, BLOCK)
    m = tl.program_id(0) // blocks
    k = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    at, inside = logits + m.to(tl.int64) * stride + k, k < V
    x = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    if CAPPED:
        slope = _tanh(x / softcap)
        x, slope = softcap * slope, 1 - slope * slope
    divisor, target = tl.load(lse + m), tl.load(targets + m)
    gradient = tl.exp(x - divisor) * (1 + 2 * z_loss * divisor) - tl.where(k == target - first, 1.0, 0.0)
    if CAPPED:
        gradient *= slope
    gradient *= tl.where(target == IGNORED, 0.0, tl.load(scale))
    tl.store(at, gradient.to(logits.dtype.element_ty), mask=inside)


def launch_cross_entropy_statistics(
    logits: Tensor, targets: Tensor, first: int, softcap: float
) -> tuple[Tensor, Tensor]:
    logits = _contiguous_rows(logits)
    (M, V), stride = logits.shape, logits.stride(0)
    lse, picked = (torch.empty(M, dtype=torch.float32, device=logits.device) for _ in range(2))
    tensors, numbers = (logits, targets.contiguous(), lse, picked), (first, V, stride, softcap)
    if M:
        launch(
            _cross_entropy_statistics, (logits.dtype, *numbers), M, tensors,
            lambda: (*tensors, *numbers, softcap > 0, AT_ONCE, LANES), num_warps=WARPS,
        )  # fmt: skip
    return lse, picked


def launch_cross_entropy_gradient(
    logits: Tensor, targets: Tensor, first: int, lse: Tensor, scale: Tensor, softcap: float, z_loss: float
) -> None:
    rows = _contiguous_rows(logits)
    (M, V), stride = rows.shape, rows.stride(0)
    tensors, numbers = (rows, targets.contiguous(), lse, scale), (first, V, stride, softcap, z_loss)
    if M:
        launch(
            _cross_entropy_gradient, (logits.dtype, *numbers), M * cdiv(V, BLOCK), tensors,
            lambda: (*tensors, *numbers, softcap > 0, BLOCK), num_warps=WARPS,
        )  # fmt: skip
    if rows is not logits:
        logits.copy_(rows)


def _contiguous_rows(logits: Tensor) -> Tensor:
    return logits if logits.stride(1) == 1 else logits.contiguous()
