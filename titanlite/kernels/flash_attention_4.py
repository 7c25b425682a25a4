"""Attention by FlashAttention-4, the package `flash-attn-4`, on GPUs for which it has forward and backward.

The package is imported and used only once `titanlite/training/attention.py` has found it installed and correct. Its
kernels are compiled at their first call, which takes some seconds each.

Source: https://github.com/Dao-AILab/flash-attention, flash_attn/cute; Dao et al. 2022, "FlashAttention".
"""

import importlib
import warnings
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor

PACKAGES = "flash-attn-4", "nvidia-cutlass-dsl", "quack-kernels"
"""Packages whose versions can change the bits of results."""

WIDTHS: Mapping[int, tuple[int, ...]] = {9: (32, 64, 96, 128, 192, 256), 10: (32, 64, 96, 128)}
"""Widths of heads to use, by the device's major compute capability. The package takes every multiple of 8, but its
gradients for 40 and 80 on Hopper are wrong (4.0.0b36: by a hundred times the rounding error)."""

DTYPES = torch.bfloat16, torch.float16

_served: tuple[int, ...] = ()


def serve(widths: tuple[int, ...]) -> None:
    """Use the package for heads of these widths in this process."""
    global _served
    _served = widths


def served() -> tuple[int, ...]:
    """Return the widths of heads for which this process uses the package."""
    return _served


def serves(q: Tensor) -> bool:
    """Return whether this process uses the package for queries […, E] of this dtype and width."""
    return q.dtype in DTYPES and q.shape[-1] in _served


def attend(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor | None, longest: int, window: int) -> tuple[Tensor, Tensor]:
    """Return the attention of queries, and their log-sum-exps, within samples or within the pieces of one run.

    `bounds` are the run's, see `attention.Bounds`; None: samples. Log-sum-exps are [B, H, S] or, of pieces, [H, M].
    """
    forward, _ = package()
    q, k, v = (_rows(x, bounds, longest) for x in (q, k, v))
    out, sums, *_ = forward(q, k, v, causal=True, return_lse=True, **_lengths_of(bounds, longest, window))
    return (out.flatten(0, 1) if bounds is None else out), sums


def attend_grad(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    sums: Tensor,
    bounds: Tensor | None,
    longest: int,
    window: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v. Their sums have a fixed order only in torch's deterministic mode."""
    _, backward = package()
    q, k, v, out, grad = (_rows(x, bounds, longest) for x in (q, k, v, out, grad))
    given = _lengths_of(bounds, longest, window)
    repeats = torch.are_deterministic_algorithms_enabled()  # costs 0.6 % of a step of Llama-3 8B
    grads = backward(q, k, v, out, grad, sums.contiguous(), causal=True, deterministic=repeats, **given)[:3]
    d_q, d_k, d_v = ((x.flatten(0, 1) if bounds is None else x).contiguous() for x in grads)
    return d_q, d_k, d_v


@cache
def package() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Import the package, and return its forward and backward.

    Raises:
        ImportError: the package is not installed. A broken installation may raise any exception.
    """
    interface = importlib.import_module("flash_attn.cute.interface")
    warnings.filterwarnings("ignore", "Argument aux_data", UserWarning)  # at each compilation, though none is passed
    return interface._flash_attn_fwd, interface._flash_attn_bwd


def _rows(x: Tensor, bounds: Tensor | None, longest: int) -> Tensor:
    """Make x [M, heads, E] contiguous; without `bounds`, view it as samples [B, S, heads, E]."""
    return x.contiguous() if bounds is not None else x.contiguous().unflatten(0, (-1, longest))


def _lengths_of(bounds: Tensor | None, longest: int, window: int) -> dict[str, Any]:
    given = {"window_size_left": window - 1, "window_size_right": 0} if window else {}
    if bounds is None:
        return given
    ends = {"cu_seqlens_q": bounds[0], "cu_seqlens_k": bounds[1]}
    return {**given, **ends, "max_seqlen_q": longest, "max_seqlen_k": longest}
