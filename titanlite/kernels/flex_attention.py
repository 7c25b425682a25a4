"""Attention to documents and windows by torch's FlexAttention, where FlashAttention-4 is not available.

FlexAttention is about half as fast (docs/performance.md), and is compiled for each shape. Its block mask is computed at
each call on the device, from `starts`.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask, flex_attention

_KEYS = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
"""torch's dispatch keys outside of any mode, with which each call runs. The first call of a compiled block checks
operators' results in a mode that hides vmap and autograd from operators, and FlexAttention needs both."""
_MOST_SHAPES = 64
"""Maximum number of compilations. Layers with and without a window need one each for training, evaluation and each
stage of the data."""


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    compiled = torch.compile(function, dynamic=False)

    def call(*args: Any, **kwargs: Any) -> Any:
        with torch._dynamo.config.patch(recompile_limit=_MOST_SHAPES):
            return compiled(*args, **kwargs)

    return call


def attend_flexibly(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor | None, places: Tensor | None, longest: int, window: int
) -> tuple[Tensor, Tensor]:
    """Return the attention of queries and their log-sum-exps, as the operator of `kernels/attention.py` does."""
    with torch._C._ForceDispatchKeyGuard(*_KEYS):
        out, aux = _flex(*_in_blocks(q, k, v, starts, places, longest, window), return_aux=AuxRequest(lse=True))
    sums = aux.lse.contiguous() if starts is None else aux.lse.transpose(0, 1).flatten(1).t()
    return _packed_rows(out), sums


def flexible_grad(grad: Tensor, *given: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Recompute the attention, and return the gradients of q, k and v. `given`: arguments of `attend_flexibly`."""
    with torch._C._ForceDispatchKeyGuard(*_KEYS), torch.enable_grad():
        in_rows, mask = _in_blocks(*given)
        out = _flex([x.requires_grad_() for x in in_rows], mask)
        d_q, d_k, d_v = torch.autograd.grad(out, in_rows, _in_rows(grad, out.shape[2]))
    return _packed_rows(d_q), _packed_rows(d_k), _packed_rows(d_v)


def _flex(in_rows: list[Tensor], mask: BlockMask, **asked: Any) -> Any:
    q, k, v = in_rows
    return _compiled(flex_attention)(q, k, v, block_mask=mask, enable_gqa=q.shape[1] > k.shape[1], **asked)


def _in_blocks(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor | None, places: Tensor | None, longest: int, window: int
) -> tuple[list[Tensor], BlockMask]:
    """View queries, keys and values as [B, heads, S, E], and make the block mask of the keys that each query sees."""
    queries, S = (longest, longest) if places is None else (len(q), len(k))
    in_rows = [_in_rows(t.detach(), n) for t, n in ((q, queries), (k, S), (v, S))]
    B = len(in_rows[0])
    begins = None if starts is None else starts.unflatten(0, (B, queries))  # indices among all tokens

    def is_seen(sample: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        token = query if places is None else places[query]
        seen = key <= token
        if begins is not None:
            seen = seen & (sample * S + key >= begins[sample, query])
        return seen & (token - key < window) if window else seen

    return in_rows, _compiled(create_block_mask)(is_seen, B=B, H=None, Q_LEN=queries, KV_LEN=S, device=q.device)


def _in_rows(x: Tensor, longest: int) -> Tensor:
    """View [M, heads, E] as [B, heads, S, E]."""
    return x.unflatten(0, (-1, longest)).transpose(1, 2)


def _packed_rows(x: Tensor) -> Tensor:
    """Invert `_in_rows`: [B, heads, S, E] → [M, heads, E], contiguous."""
    return x.transpose(1, 2).flatten(0, 1).contiguous()
