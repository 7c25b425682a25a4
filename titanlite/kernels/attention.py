"""Causal attention of packed tokens: within samples, documents or a window, and for a part of the queries.

M tokens, H heads of queries, K heads of keys and values, E width of a head, S tokens of a sample.

Queries and keys are cut into pieces. The queries of a piece see the keys of that piece: the last query all of them, and
each earlier query one less than the next. A document is a piece with as many keys as queries. With context parallelism
a piece can have more keys than queries: all keys from the document's beginning to the rank's last query.

    queries   | a a a a | b b b |          bounds  0 4 7
    keys      | a a a a a a | b b b |      bounds  0 6 9       the first query of a sees three keys

The number of pieces depends on the data. The device holds bounds of the largest possible number of pieces, and the host
their actual number, so that no batch causes a recompilation or a synchronisation. A run is a series of pieces with
contiguous queries and contiguous keys, which one kernel call computes. Only context parallelism has several runs.

Source: Krell et al. 2021, "Efficient Sequence Packing without Cross-contamination", section 3.2; the gradient from Dao
et al. 2022, "FlashAttention", appendix B.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from titanlite.kernels import flash_attention_4
from titanlite.kernels.flex_attention import attend_flexibly, flexible_grad
from titanlite.kernels.operators import Split, operator

_LEAST_ROWS, _MOST_BLOCKS = 128, 32  # least queries of a block of the definition; most blocks of a piece


class Bounds(NamedTuple):
    """The bounds of pieces, run by run. The last pieces of a run may be empty, and so may runs."""

    # [2, n] int32: of each run, the first query (row 0) and first key (row 1) of each piece, and the end of the last
    # piece, all counted from the run's first
    at: Tensor
    runs: Tensor  # [runs, 5] int64, CPU: first query, first key, end of keys, first column of `at`, number of columns


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    longest: int,
    window: int = 0,
    starts: Tensor | None = None,
    bounds: Bounds | None = None,
) -> Tensor:
    """Compute causal attention: each token attends to the tokens of its document up to and including itself.

    Args:
        q: [M, H, E]; H is a multiple of K.
        k, v: [M, K, E].
        longest: S, tokens of a sample; M is a multiple of S.
        window: number of most recent tokens, itself included, that a token sees; 0: all.
        starts: [M] int32, index of the first token of each token's document; every S-th token begins a document. None:
            every S tokens are one document.
        bounds: the documents of `starts` as pieces; needed with `starts`.

    Returns:
        [M, H, E] in `q.dtype`.
    """
    return _attention(q, k, v, starts, *(bounds or (None, None)), None, longest, window)[0]


def attention_kernel(q: Tensor, is_plain: bool = False) -> str:
    """Name the fastest kernel for queries […, E]; `is_plain`: attention is within whole samples, without a window.

    Returns:
        "flash_attention_4"; else "torch", if `is_plain`; else "flex_attention", or on CPUs and in float64 "math".
    """
    if flash_attention_4.serves(q):
        return "flash_attention_4"
    if is_plain:
        return "torch"
    return "flex_attention" if q.is_cuda and q.dtype != torch.float64 else "math"


def _fast(q: Tensor, k: Tensor, v: Tensor, *given: Any) -> tuple[Tensor, Tensor]:
    kernel, (starts, bounds, runs, places, *lengths) = attention_kernel(q), given
    if kernel == "flex_attention":
        return attend_flexibly(q, k, v, starts, places, *lengths)
    if bounds is None:
        return flash_attention_4.attend(q, k, v, None, *lengths)
    found = [
        flash_attention_4.attend(q[rows], k[keys], v[keys], at, *lengths)
        for rows, keys, at in _each_run(len(q), bounds, runs)
    ]
    outs, sums = zip(*found, strict=True)
    return (outs[0], sums[0].t()) if len(found) == 1 else (torch.cat(outs), torch.cat(sums, 1).t())


def _fast_grad(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor, *given: Any
) -> tuple[Tensor, Tensor, Tensor]:
    kernel, (starts, bounds, runs, places, *lengths) = attention_kernel(q), given
    if kernel == "flex_attention":
        return flexible_grad(grad, q, k, v, starts, places, *lengths)
    if bounds is None:
        return flash_attention_4.attend_grad(grad, q, k, v, out, sums, None, *lengths)
    (_, first, only), *others = each = [*_each_run(len(q), bounds, runs)]
    if not others and first == slice(0, len(k)):
        return flash_attention_4.attend_grad(grad, q, k, v, out, sums.t(), only, *lengths)
    d_q, d_k, d_v = q.new_empty(q.shape), k.new_zeros(k.shape), v.new_zeros(v.shape)
    for rows, keys, at in each:  # one after the other: runs may share keys
        of_run = grad[rows], q[rows], k[keys], v[keys], out[rows], sums.t()[:, rows]
        d_q[rows], of_keys, of_values = flash_attention_4.attend_grad(*of_run, at, *lengths)
        d_k[keys] += of_keys
        d_v[keys] += of_values
    return d_q, d_k, d_v


def _each_run(M: int, bounds: Tensor, runs: Tensor) -> Iterator[tuple[slice, slice, Tensor]]:
    """Yield the range of the M queries, the range of keys, and the bounds of each run that is not empty."""
    found = [run for run in runs.tolist() if run[4]]
    for (row, key, end, at, n), (following, *_) in zip(found, [*found[1:], [M]], strict=True):
        yield slice(row, following), slice(key, end), bounds[:, at : at + n]


# Tensor-parallel ranks split the heads, if both numbers of heads divide. A split each for calls with whole samples,
# with documents, and with documents of which a rank has a part.
_SPLITS = tuple(Split((1, 1, 1, *(None,) * n), 1) for n in (0, 3, 4))
_GRAD_SPLITS = tuple(Split((1, 1, 1, 1, 1, 1, *(None,) * n), 1) for n in (0, 3, 4))


@operator("attention", _fast, splits=_SPLITS, unless=lambda q, *_: attention_kernel(q) == "math")
def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts: Tensor | None,
    bounds: Tensor | None,
    runs: Tensor | None,
    places: Tensor | None,
    longest: int,
    window: int,
) -> tuple[Tensor, Tensor]:
    """Return the attention of each query, and the log-sum-exp of its scores, in the shapes of `_shapes`.

    `bounds` and `runs` are the fields of `Bounds`. With context parallelism k and v hold the N tokens of all ranks, and
    `places`, [M] int32, is the index of each query among these.
    """
    (out, sums), K = _shapes(q, k, v, starts, bounds, longest, window), k.shape[1]
    of_rows = sums[None] if bounds is not None else sums.transpose(1, 2)  # [samples, tokens, H]
    keys, values = _grouped(k, K), _grouped(v, K)
    for rows, seen, unseen in _query_blocks(len(q), bounds, runs, longest, window, q.device):
        scores = _scores(_grouped(q[rows], K), keys[:, seen], unseen)
        p = scores.softmax(-1)
        out[rows] = _packed(p @ values[:, seen], len(unseen)).to(q.dtype)
        sample, row = divmod(rows.start, of_rows.shape[1])
        lse = scores.amax(-1, keepdim=True) - p.amax(-1, keepdim=True).log()
        of_rows[sample, row : row + len(unseen)] = _packed(lse, len(unseen)).squeeze(-1)
    return out, sums


@operator("attention_grad", _fast_grad, splits=_GRAD_SPLITS, unless=lambda _, q, *__: attention_kernel(q) == "math")
def _attention_grad(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    sums: Tensor,
    starts: Tensor | None,
    bounds: Tensor | None,
    runs: Tensor | None,
    places: Tensor | None,
    longest: int,
    window: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v. This definition recomputes `sums`, forward's log-sum-exps."""
    K, scale = k.shape[1], q.shape[-1] ** -0.5
    keys, values = _grouped(k, K), _grouped(v, K)
    d_q, d_keys, d_values = q.new_empty(q.shape), torch.zeros_like(keys), torch.zeros_like(values)
    for rows, seen, unseen in _query_blocks(len(q), bounds, runs, longest, window, q.device):
        own_q, own_grad, own_out = (_grouped(x[rows], K) for x in (q, grad, out))
        p = _scores(own_q, keys[:, seen], unseen).softmax(-1)
        of_p = (own_grad @ values[:, seen].mT).sub_((own_grad * own_out).sum(-1, keepdim=True))
        of_scores = of_p.mul_(p).mul_(scale)
        d_q[rows] = _packed(of_scores @ keys[:, seen], len(unseen)).to(q.dtype)
        d_keys[:, seen] += of_scores.mT @ own_q
        d_values[:, seen] += p.mT @ own_grad
    d_k, d_v = (x.transpose(0, 1).to(q.dtype).contiguous() for x in (d_keys, d_values))
    return d_q, d_k, d_v


def _query_blocks(
    M: int, bounds: Tensor | None, runs: Tensor | None, longest: int, window: int, device: torch.device
) -> Iterator[tuple[slice, slice, Tensor]]:
    """Cut the M queries into blocks; yield for each its queries, the keys to read, and the mask of keys not seen.

    The mask is [queries, keys], true where a query does not see a key.
    """
    if bounds is None or runs is None:
        pieces = [(at, at + longest, at, at + longest) for at in range(0, M, longest)]
    else:
        pieces = list[tuple[int, int, int, int]]()
        for rows, keys, at in _each_run(M, bounds, runs):
            begins, firsts = (at.cpu() + torch.tensor([[rows.start], [keys.start]])).tolist()
            pieces += zip(begins, begins[1:], firsts, firsts[1:], strict=False)
    for begin, end, first, last in pieces:
        n, behind = max(_LEAST_ROWS, -(-(end - begin) // _MOST_BLOCKS)), last - end  # offset of a query's own key
        for row in range(begin, end, n):
            rows = slice(row, min(row + n, end))
            seen = slice(max(first, row + behind - window + 1) if window else first, rows.stop + behind)
            own = torch.arange(row + behind, rows.stop + behind, device=device)[:, None]
            other = torch.arange(seen.start, seen.stop, device=device)
            yield rows, seen, (other > own) | (other <= own - window) if window else other > own


def _grouped(x: Tensor, K: int) -> Tensor:
    """Group heads by the K heads of keys: [n, heads, E] → [K, heads / K · n, E], in float32 or wider."""
    return x.to(torch.promote_types(x.dtype, torch.float32)).unflatten(1, (K, -1)).permute(1, 2, 0, 3).flatten(1, 2)


def _packed(x: Tensor, n: int) -> Tensor:
    """Invert `_grouped` for n tokens: [K, heads / K · n, E] → [n, heads, E]."""
    return x.unflatten(1, (-1, n)).permute(2, 0, 1, 3).flatten(1, 2)


def _scores(q: Tensor, k: Tensor, unseen: Tensor) -> Tensor:
    """Return the scaled scores, [K, H / K · queries, keys]; −∞ where a query does not see a key (`unseen`)."""
    scores = (q * q.shape[-1] ** -0.5) @ k.mT
    bias = torch.zeros_like(unseen, dtype=scores.dtype).masked_fill_(unseen, -torch.inf)  # faster than filling scores
    return scores.unflatten(1, (-1, len(unseen))).add_(bias).flatten(1, 2)


# Needed for fake tensors: the definition reads the numbers in `bounds`, and its results would lack a device.
def _shapes(q, k, v, starts, bounds, *others):
    """Allocate the result [M, H, E] and log-sum-exps [M, H], heads outermost in memory; [B, H, S] for whole samples."""
    (M, H, _), longest = q.shape, others[-2]
    shape = (H, M) if bounds is not None else (M // longest, H, longest)
    sums = q.new_empty(shape, dtype=torch.promote_types(q.dtype, torch.float32))
    return q.new_empty(q.shape), sums if bounds is None else sums.t()


def _flops(q_shape: Sequence[int], *shapes_and_numbers: Any, **kwargs: Any) -> int:
    """Count the operations as if each sample were one document, since shapes do not show the documents.

    The last two numbers are S and the window. With context parallelism M queries count as their share of all tokens.
    """
    (M, H, E), (longest, window) = q_shape, shapes_and_numbers[-2:]
    W = min(window or longest, longest)
    return 4 * H * E * M * (W * longest - W * (W - 1) // 2) // longest


def with_gradient(name: str, n_others: int) -> None:
    """Register shapes, autograd and FLOPs of an attention operator, whose gradient is the operator `name`_grad.

    Args:
        name: of the operator. It takes q, k, v, starts and bounds, then other arguments, then S and the window, and
            returns the results of `_attention`.
        n_others: number of its last arguments that are not tensors.
    """
    of_grad = getattr(torch.ops.titanlite, f"{name}_grad")

    def save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.others = inputs[-n_others:]
        ctx.save_for_backward(*inputs[:3], *output, *inputs[3:-n_others])
        ctx.mark_non_differentiable(output[1])

    def backward(ctx: Any, grad: Tensor, _: None) -> tuple[Tensor | None, ...]:
        given = *ctx.saved_tensors, *ctx.others
        return *of_grad(grad, *given), *(None,) * (len(given) - 5)

    torch.library.register_fake(f"titanlite::{name}", _shapes)
    torch.library.register_fake(
        f"titanlite::{name}_grad", lambda _, *given: (*(x.new_empty(x.shape) for x in given[:3]),)
    )
    torch.library.register_autograd(f"titanlite::{name}", backward, setup_context=save)
    register_flop_formula(getattr(torch.ops.titanlite, name))(_flops)
    # Five products instead of two: the scores are recomputed.
    register_flop_formula(of_grad)(lambda grad, *given, **_: _flops(grad, *given) * 5 // 2)


with_gradient("attention", 2)
