"""Causal attention of packed tokens, each to the tokens of its own document alone.

Where a document begins is data, a number per token, so no shape changes with the documents: nothing is compiled anew,
and the host need not know. The definition forms scores in blocks of rows of a sample, never over all tokens; it leaves
out what causality and the window do, and masks what lies in other documents.

Source: Krell et al. 2021, "Efficient Sequence Packing without Cross-contamination", section 3.2; the gradient from Dao
et al. 2022, "FlashAttention", appendix B.
"""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from titanlite.kernels.flex_documents import attend_flexibly, flexible_grad
from titanlite.kernels.operators import Split, device_code, operator

_LEAST_ROWS, _MOST_BLOCKS = 128, 32  # of a block of the definition; and blocks of a sample


def document_attention(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, longest: int, window: int = 0) -> Tensor:
    """Attend to the tokens of the own document, up to and with the own one.

    Args:
        q: [M, H, E]; H is a multiple of K. M is a multiple of S.
        k: [M, K, E].
        v: [M, K, E].
        starts: [M] int32, for each token the place among the M at which its document begins; each S-th token begins
            one.
        longest: S, tokens of a sample.
        window: the last so many tokens alone, the own one included; 0: all.

    Returns:
        [M, H, E] in `q.dtype`.
    """
    return _document_attention(q, k, v, starts, longest, window)[0]


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


def _fast(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, longest: int, window: int) -> tuple[Tensor, Tensor]:
    kernel = document_kernel(q)
    if kernel == "math":
        return _document_attention.definition(q, k, v, starts, longest, window)
    attend = _attend if kernel == "document_attention" else attend_flexibly
    return attend(q, k, v, starts, longest, window)


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
) -> tuple[Tensor, Tensor, Tensor]:
    kernel = document_kernel(q)
    if kernel == "math":
        return _document_attention_grad.definition(grad, q, k, v, out, sums, starts, longest, window)
    if kernel == "flex_attention":
        return flexible_grad(grad, q, k, v, starts, longest, window)
    return _attend_grad(grad, q, k, v, out, sums, starts, longest, window)


# By heads, where those of queries and those of keys both divide. Not by tokens: `starts` are places among all of them.
@operator("document_attention", _fast, splits=(Split((1, 1, 1, None), 1),))
def _document_attention(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor, longest: int, window: int
) -> tuple[Tensor, Tensor]:
    """Return the result, and the logarithm of each query's sum of exponentials, [M, H] float32 or wider."""
    q_, k_, v_ = (_samples(t, k.shape[1], longest) for t in (q, k, v))
    first, outs, sums = _first_seen(starts, longest, window), list[Tensor](), list[Tensor]()
    for rows, keys in _row_blocks(longest, window, q.is_meta):
        scores = _masked_scores(q_, k_, first, rows, keys)
        p = scores.softmax(-1)
        outs.append((p.flatten(2, 3) @ v_[:, :, 0, keys]).unflatten(2, p.shape[2:4]))
        sums.append(scores.amax(-1, keepdim=True) - p.amax(-1, keepdim=True).log())
    out, sums_ = (_packed(torch.cat(blocks, dim=3)) for blocks in (outs, sums))
    return out.to(q.dtype), sums_.squeeze(-1)


@operator("document_attention_grad", _fast_grad, splits=(Split((1, 1, 1, 1, 1, 1, None), 1),))
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
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v. The definition forms `sums` again."""
    K, scale = k.shape[1], q.shape[-1] ** -0.5
    q_, k_, v_, grad_, out_ = (_samples(t, K, longest) for t in (q, k, v, grad, out))
    first, d_k, d_v = _first_seen(starts, longest, window), torch.zeros_like(k_), torch.zeros_like(v_)
    of_rows, d_q = (grad_ * out_).sum(-1, keepdim=True), list[Tensor]()
    for rows, keys in _row_blocks(longest, window, q.is_meta):
        own_q, own_grad = (t[:, :, :, rows].flatten(2, 3) for t in (q_, grad_))  # [B, K, R·rows, E]
        p = _masked_scores(q_, k_, first, rows, keys).softmax(-1)
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


def _first_seen(starts: Tensor, S: int, window: int) -> Tensor:
    """Return the place within its sample of the first token that each one sees, [B, S]."""
    places = torch.arange(len(starts), device=starts.device)
    first = torch.maximum(starts, places - (window - 1)) if window else starts
    return (first - places // S * S).unflatten(0, (-1, S))


def _row_blocks(S: int, window: int, in_one: bool) -> Iterator[tuple[slice, slice]]:
    """Give blocks of rows of a sample, with the tokens that some of their rows may see; one block for shapes alone."""
    n = S if in_one else max(_LEAST_ROWS, -(-S // _MOST_BLOCKS))
    for row in range(0, S, n):
        end = min(row + n, S)
        yield slice(row, end), slice(max(0, row - window + 1) if window else 0, end)


def _masked_scores(q: Tensor, k: Tensor, first: Tensor, rows: slice, keys: slice) -> Tensor:
    """[B, K, R, rows, keys]; −∞ where a row does not see a token."""
    R, E = q.shape[2], q.shape[4]
    scores = (q[:, :, :, rows].flatten(2, 3) * E**-0.5) @ k[:, :, 0, keys].mT
    own, other = (torch.arange(s.start, s.stop, device=q.device) for s in (rows, keys))
    unseen = (other > own[:, None]) | (other < first[:, rows, None])  # [B, rows, keys]
    bias = torch.zeros_like(unseen, dtype=scores.dtype).masked_fill_(unseen, -torch.inf)  # added faster than filled in
    return scores.unflatten(2, (R, -1)).add_(bias[:, None, None])


def _save_documents(ctx, inputs, output) -> None:
    q, k, v, starts, ctx.longest, ctx.window = inputs
    ctx.save_for_backward(q, k, v, *output, starts)
    ctx.mark_non_differentiable(output[1])


def _document_backward(ctx, grad, _):
    grads = torch.ops.titanlite.document_attention_grad(grad, *ctx.saved_tensors, ctx.longest, ctx.window)
    return *grads, None, None, None


torch.library.register_autograd("titanlite::document_attention", _document_backward, setup_context=_save_documents)


@register_flop_formula(torch.ops.titanlite.document_attention)
def _document_flops(q_shape, k_shape, v_shape, starts_shape, longest, window, *args, **kwargs) -> int:
    """Two products of E for each token that a query would see in one document a sample: shapes do not say more."""
    M, H, E = q_shape
    W = min(window or longest, longest)
    return 4 * H * E * (M // longest) * (W * longest - W * (W - 1) // 2)


@register_flop_formula(torch.ops.titanlite.document_attention_grad)
def _document_grad_flops(grad_shape, q_shape, k_shape, v_shape, *shapes_and_numbers, **kwargs) -> int:
    """Five products in the place of two: the scores are formed again."""
    _, _, starts_shape, longest, window, *_ = shapes_and_numbers
    return _document_flops(q_shape, k_shape, v_shape, starts_shape, longest, window) * 5 // 2
