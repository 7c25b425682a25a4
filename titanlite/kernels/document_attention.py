"""Causal attention of packed tokens, each to the tokens of its own document alone.

Where a document begins is data, a number per token, so no shape changes with the documents: nothing is compiled anew,
and the host need not know. The definition forms scores in blocks of rows of a sample, never over all tokens; it leaves
out what causality and the window do, and masks what lies in other documents.

Source: Krell et al. 2021, "Efficient Sequence Packing without Cross-contamination", section 3.2; the gradient from Dao
et al. 2022, "FlashAttention", appendix B.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from titanlite.kernels.flex_documents import attend_flexibly, flexible_grad
from titanlite.kernels.operators import Split, device_code, operator

_LEAST_ROWS, _MOST_BLOCKS = 128, 32  # of a block of the definition; and blocks of a sample


def document_attention(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor, longest: int, window: int = 0, places: Tensor | None = None
) -> Tensor:
    """Attend to the tokens of the own document, up to and with the own one.

    A rank that has some of the tokens' queries, and keys and values of all, gives `places`. Keys that none of its
    queries sees may hold anything finite; their gradients are zero.

    Args:
        q: [M, H, E]; H is a multiple of K.
        k: [N, K, E]; N is a multiple of S.
        v: [N, K, E].
        starts: [M] int32, for each query's token the place among the N at which its document begins; each S-th of the
            N begins one. Never falls.
        longest: S, tokens of a sample.
        window: the last so many tokens alone, the own one included; 0: all.
        places: [M] int32, the place of each query's token among the N: rising, and each 128 queries' are consecutive
            from a multiple of 128 on, so M and N are multiples of 128. None: queries are of all tokens, M = N.

    Returns:
        [M, H, E] in `q.dtype`.
    """
    return _document_attention(q, k, v, starts, longest, window, places)[0]


def document_kernel(q: Tensor) -> str:
    """Name the kernel that attends: "document_attention" on Hopper, "flex_attention" on other GPUs and for heads that
    the former does not take, or "math".

    Args:
        q: [M, H, E].
    """
    if not q.is_cuda or q.dtype == torch.float64:
        return "math"
    is_hopper = torch.cuda.get_device_capability(q.device) == (9, 0)
    fits = q.dtype in (torch.bfloat16, torch.float16) and q.shape[2] in (64, 128) and len(q) % 128 == 0
    return "document_attention" if is_hopper and fits else "flex_attention"


_attend = device_code("document_attention.attend")
_attend_grad = device_code("document_attention_grad.attend_grad")


def _fast(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor, longest: int, window: int, places: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    kernel = document_kernel(q)
    if kernel == "math":
        return _document_attention.definition(q, k, v, starts, longest, window, places)
    attend = _attend if kernel == "document_attention" else attend_flexibly
    return attend(q, k, v, starts, longest, window, places)


def _fast_grad(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    sums: Tensor,
    starts: Tensor,
    longest: int,
    window: int,
    places: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    kernel = document_kernel(q)
    if kernel == "math":
        return _document_attention_grad.definition(grad, q, k, v, out, sums, starts, longest, window, places)
    if kernel == "flex_attention":
        return flexible_grad(grad, q, k, v, starts, longest, window, places)
    return _attend_grad(grad, q, k, v, out, sums, starts, longest, window, places)


# By heads, where those of queries and those of keys both divide. Not by tokens: `starts` are places among all of them.
@operator("document_attention", _fast, splits=(Split((1, 1, 1, None), 1), Split((1, 1, 1, None, None), 1)))
def _document_attention(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor, longest: int, window: int, places: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the result, and the logarithm of each query's sum of exponentials, [M, H] float32 or wider."""
    (n_rows, S), K = _tokens_of_sample(k, longest, places), k.shape[1]
    q_, k_, v_ = _samples(q, K, n_rows), _samples(k, K, S), _samples(v, K, S)
    (own, first), outs, sums = _first_seen(starts, S, window, places), list[Tensor](), list[Tensor]()
    for rows, keys in _row_blocks(S, first, window, places):
        scores = _masked_scores(q_, k_, own, first, rows, keys)
        p = scores.softmax(-1)
        outs.append((p.flatten(2, 3) @ v_[:, :, 0, keys]).unflatten(2, p.shape[2:4]))
        sums.append(scores.amax(-1, keepdim=True) - p.amax(-1, keepdim=True).log())
    out, sums_ = (_packed(torch.cat(blocks, dim=3)) for blocks in (outs, sums))
    return out.to(q.dtype), sums_.squeeze(-1)


_GRAD_SPLITS = Split((1, 1, 1, 1, 1, 1, None), 1), Split((1, 1, 1, 1, 1, 1, None, None), 1)


@operator("document_attention_grad", _fast_grad, splits=_GRAD_SPLITS)
def _document_attention_grad(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    sums: Tensor,
    starts: Tensor,
    longest: int,
    window: int,
    places: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v. The definition forms `sums` again."""
    (n_rows, S), K, scale = _tokens_of_sample(k, longest, places), k.shape[1], q.shape[-1] ** -0.5
    q_, grad_, out_ = (_samples(t, K, n_rows) for t in (q, grad, out))
    k_, v_ = _samples(k, K, S), _samples(v, K, S)
    (own, first), d_k, d_v = _first_seen(starts, S, window, places), torch.zeros_like(k_), torch.zeros_like(v_)
    of_rows, d_q = (grad_ * out_).sum(-1, keepdim=True), list[Tensor]()
    for rows, keys in _row_blocks(S, first, window, places):
        own_q, own_grad = (t[:, :, :, rows].flatten(2, 3) for t in (q_, grad_))  # [B, K, R·rows, E]
        p = _masked_scores(q_, k_, own, first, rows, keys).softmax(-1)
        of_p = (own_grad @ v_[:, :, 0, keys].mT).unflatten(2, p.shape[2:4])
        of_scores = of_p.sub_(of_rows[:, :, :, rows]).mul_(p).mul_(scale).flatten(2, 3)
        d_q.append((of_scores @ k_[:, :, 0, keys]).unflatten(2, p.shape[2:4]))
        d_k[:, :, 0, keys] += of_scores.mT @ own_q
        d_v[:, :, 0, keys] += p.flatten(2, 3).mT @ own_grad
    found = (_packed(t).to(q.dtype) for t in (torch.cat(d_q, dim=3), d_k, d_v))
    return next(found), next(found), next(found)


def _samples(x: Tensor, K: int, S: int) -> Tensor:
    """View [M, heads, E] as [B, K, heads / K, S, E], in the dtype of sums."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    return x.unflatten(0, (-1, S)).unflatten(2, (K, -1)).permute(0, 2, 3, 1, 4)


def _packed(x: Tensor) -> Tensor:
    """[B, K, R, S, E] → [M, K·R, E]: the inverse of `_samples`."""
    return x.permute(0, 3, 1, 2, 4).flatten(2, 3).flatten(0, 1).contiguous()


def _tokens_of_sample(k: Tensor, longest: int, places: Tensor | None) -> tuple[int, int]:
    """Return how many tokens of a sample have queries, and keys; with places all samples are taken as one."""
    return (longest, longest) if places is None else (len(places), len(k))


def _first_seen(starts: Tensor, S: int, window: int, places: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the places within a sample of its queries, and of the first token that each query sees, [B, queries]."""
    own = torch.arange(len(starts), device=starts.device) if places is None else places
    first = torch.maximum(starts, own - (window - 1)) if window else starts
    if places is not None:
        return places, first[None]
    return own[:S], (first - own // S * S).unflatten(0, (-1, S))


def _row_blocks(S: int, first: Tensor, window: int, places: Tensor | None) -> Iterator[tuple[slice, slice]]:
    """Give blocks of rows of a sample, with the tokens that some of their rows may see; one block for shapes alone."""
    n_rows = first.shape[1]
    n = n_rows if first.is_meta else max(_LEAST_ROWS, -(-n_rows // _MOST_BLOCKS))
    for row in range(0, n_rows, n):
        end = min(row + n, n_rows)
        if places is None:
            keys = slice(max(0, row - window + 1) if window else 0, end)
        elif places.device.type == "cpu":
            keys = slice(int(first[0, row:end].min()), int(places[end - 1]) + 1)
        else:  # the host does not wait for a GPU's numbers
            keys = slice(0, S)
        yield slice(row, end), keys


def _masked_scores(q: Tensor, k: Tensor, own: Tensor, first: Tensor, rows: slice, keys: slice) -> Tensor:
    """[B, K, R, rows, keys]; −∞ where a row does not see a token."""
    R, E = q.shape[2], q.shape[4]
    scores = (q[:, :, :, rows].flatten(2, 3) * E**-0.5) @ k[:, :, 0, keys].mT
    other = torch.arange(keys.start, keys.stop, device=q.device)
    unseen = (other > own[rows, None]) | (other < first[:, rows, None])  # [B, rows, keys]
    bias = torch.zeros_like(unseen, dtype=scores.dtype).masked_fill_(unseen, -torch.inf)  # added faster than filled in
    return scores.unflatten(2, (R, -1)).add_(bias[:, None, None])


def _save_documents(ctx, inputs, output) -> None:
    q, k, v, starts, ctx.longest, ctx.window, places = inputs
    ctx.save_for_backward(q, k, v, *output, starts, places)
    ctx.mark_non_differentiable(output[1])


def _document_backward(ctx, grad, _):
    *saved, places = ctx.saved_tensors
    grads = torch.ops.titanlite.document_attention_grad(grad, *saved, ctx.longest, ctx.window, places)
    return *grads, None, None, None, None


torch.library.register_autograd("titanlite::document_attention", _document_backward, setup_context=_save_documents)


def flops_of_samples(q_shape: Sequence[int], longest: int, window: int) -> int:
    """Count two products of E for each token that a query would see in one document a sample: shapes say no more.

    Args:
        q_shape: [M, H, E]; queries of some of the tokens alone count as their share.
        longest: S, tokens of a sample.
        window: that a token sees; 0: all.
    """
    M, H, E = q_shape
    W = min(window or longest, longest)
    return 4 * H * E * M * (W * longest - W * (W - 1) // 2) // longest


@register_flop_formula(torch.ops.titanlite.document_attention)
def _document_flops(q_shape, k_shape, v_shape, starts_shape, longest, window, *args, **kwargs) -> int:
    return flops_of_samples(q_shape, longest, window)


@register_flop_formula(torch.ops.titanlite.document_attention_grad)
def _document_grad_flops(grad_shape, q_shape, k_shape, v_shape, *shapes_and_numbers, **kwargs) -> int:
    """Five products in the place of two: the scores are formed again."""
    longest, window = shapes_and_numbers[3:5]
    return flops_of_samples(q_shape, longest, window) * 5 // 2
