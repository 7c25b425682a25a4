"""RMSNorm with float32 statistics, also for a residual stream that has further readers.

The normalised value is rounded once, at the end, so that a recomputation has the same bits. Backward is one pass over
memory, which adds the gradient from the further readers before rounding. A compiler's kernels take 1.5 times as long
within a step (docs/performance.md).

Source: Zhang and Sennrich 2019, "Root Mean Square Layer Normalization", eq. 4.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from titanlite.kernels.operators import operator


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Divide each row by its root mean square and scale it: [..., D] in `x.dtype`.

    The weight is [D], `eps` is added to the mean square.
    """
    return _RMSNorm.apply(x, weight, eps)  # type: ignore[no-any-return]


def fork_rms_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return `rms_norm` of the residual stream [M, D], for a sublayer, and `x` itself for its further readers.

    Backward adds the gradients of both in one pass.
    """
    return _Fork.apply(x, weight, eps)  # type: ignore[no-any-return]


class _RMSNorm(torch.autograd.Function):
    """Forward has no kernel: compilers fuse its operations."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        if weight.shape != x.shape[-1:]:
            raise ValueError(f"rms_norm: weight {list(weight.shape)}; want the width of x {list(x.shape)}")
        h = x.float()
        mean = h.square().mean(-1, keepdim=True)
        ctx.save_for_backward(x, weight, mean)
        ctx.eps = eps
        y = h * torch.rsqrt(mean + eps) * weight.float()
        return y if y.dtype == x.dtype else y.to(x.dtype)  # torch 2.11 would lose the gradient of a `to` without effect

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return *torch.ops.titanlite.rms_norm_grad(grad, *ctx.saved_tensors, None, ctx.eps), None


class _Fork(torch.autograd.Function):
    """`_RMSNorm` that also returns its input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        return _RMSNorm.forward(ctx, x, weight, eps), x.view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, rest: Tensor) -> tuple[Tensor | None, ...]:
        return *torch.ops.titanlite.rms_norm_grad(grad, *ctx.saved_tensors, rest, ctx.eps), None


@operator("rms_norm_grad", "rms_norm.launch_rms_norm_grad")
def rms_norm_grad(
    grad: Tensor, x: Tensor, weight: Tensor, mean: Tensor, rest: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """Return the gradient of `x`, [..., D], plus `rest`, another gradient of `x`; and the gradient of `weight`.

    `mean`: [..., 1], mean squares of `x`.
    """
    scale = torch.rsqrt(mean + eps)
    normed, grad = x.float() * scale, grad.float()
    of_weight = (grad * normed).reshape(-1, x.shape[-1]).sum(0)
    grad = grad * weight.float()
    of_x = scale * (grad - normed * (grad * normed).mean(-1, keepdim=True))
    return (of_x if rest is None else of_x + rest).to(x.dtype).contiguous(), of_weight.to(weight.dtype)
