"""Attend to documents by torch's FlexAttention, on GPUs and with heads that the kernels for Hopper do not take.

It reaches about half of their rate (docs/performance.md), and compiles for each shape. Its blocks are found anew at
each call, from `starts`, on the device.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask, flex_attention

_MOST_SHAPES = 64
"""That are compiled for: of layers with and without a window, in training, evaluation and each stage of the data."""


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    compiled = torch.compile(function, dynamic=False)

    def call(*args: Any, **kwargs: Any) -> Any:
        with torch._dynamo.config.patch(recompile_limit=_MOST_SHAPES):
            return compiled(*args, **kwargs)

    return call


def attend_flexibly(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor, longest: int, window: int, places: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Attend as `document_attention`'s operator does."""
    n_rows, S = (longest, longest) if places is None else (len(q), len(k))
    in_rows = [_in_rows(q, n_rows), _in_rows(k, S), _in_rows(v, S)]
    out, aux = _flex(in_rows, _block_mask(starts, S, window, places), return_aux=AuxRequest(lse=True))
    return _packed_rows(out), aux.lse.transpose(1, 2).flatten(0, 1).contiguous()


def flexible_grad(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts: Tensor,
    longest: int,
    window: int,
    places: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys and values; the result is computed again for it."""
    n_rows, S = (longest, longest) if places is None else (len(q), len(k))
    with torch.enable_grad():
        in_rows = [_in_rows(t.detach(), n).requires_grad_() for t, n in ((q, n_rows), (k, S), (v, S))]
        out = _flex(in_rows, _block_mask(starts, S, window, places))
        d_q, d_k, d_v = torch.autograd.grad(out, in_rows, _in_rows(grad, n_rows))
    return _packed_rows(d_q), _packed_rows(d_k), _packed_rows(d_v)


def _flex(in_rows: list[Tensor], mask: BlockMask, **asked: Any) -> Any:
    q, k, v = in_rows
    return _compiled(flex_attention)(q, k, v, block_mask=mask, enable_gqa=q.shape[1] > k.shape[1], **asked)


def _block_mask(starts: Tensor, S: int, window: int, places: Tensor | None) -> BlockMask:
    begins = starts.unflatten(0, (-1, S) if places is None else (1, -1))  # [B, queries], places among all tokens

    def is_seen(sample: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        token = query if places is None else places[query]
        seen = (key <= token) & (sample * S + key >= begins[sample, query])
        return seen & (token - key < window) if window else seen

    of = {"B": len(begins), "H": None, "Q_LEN": begins.shape[1], "KV_LEN": S, "device": starts.device}
    return _compiled(create_block_mask)(is_seen, **of)


def _in_rows(x: Tensor, longest: int) -> Tensor:
    """View [M, heads, E] as [B, heads, S, E]."""
    return x.unflatten(0, (-1, longest)).transpose(1, 2)


def _packed_rows(x: Tensor) -> Tensor:
    """[B, heads, S, E] → [M, heads, E], contiguous."""
    return x.transpose(1, 2).flatten(0, 1).contiguous()
