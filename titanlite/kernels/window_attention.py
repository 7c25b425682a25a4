"""Causal attention to a window of tokens.

No score is computed but those that some window holds: chunks of W queries, each against itself and the chunk before it,
or torch's flash kernel, which passes over the tiles outside. `scaled_dot_product_attention` has no such argument, and a
mask over the square takes all S² scores.

Source: Beltagy et al. 2020, "Longformer", section 3.1; the gradient from Dao et al. 2022, "FlashAttention", appendix B.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from titanlite.kernels.operators import Split, operator


def window_attention(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    """Attend to the last `window` tokens, the own one included.

    Args:
        q: [B, H, S, E]; H is a multiple of K.
        k: [B, K, S, E].
        v: [B, K, S, E].
        window: W ≥ 1.

    Returns:
        [B, H, S, E] in `q.dtype`, tokens outermost in memory.
    """
    return _window_attention(q, k, v, window)[0]


def kernel(q: Tensor) -> str:
    """Name the kernel: "flash_attention", or "math" where that has none for the device, dtype or width of heads.

    Args:
        q: [B, H, S, E].
    """
    fits = q.dtype in (torch.bfloat16, torch.float16) and q.shape[-1] % 8 == 0 and q.shape[-1] <= 256
    return "flash_attention" if fits and q.is_cuda and torch.cuda.get_device_capability(q.device) >= (8, 0) else "math"


def _flash(q: Tensor, k: Tensor, v: Tensor, window: int) -> tuple[Tensor, Tensor]:
    if kernel(q) == "math":
        return _window_attention.definition(q, k, v, window)
    S, heads = q.shape[2], [t.transpose(1, 2) for t in (q, k, v)]
    of_window = {"window_size_left": window - 1, "window_size_right": 0}
    out, sums, *_ = torch.ops.aten._flash_attention_forward(*heads, None, None, S, S, 0.0, True, False, **of_window)
    return _tokens_outermost(out.transpose(1, 2)), sums


def _flash_grad(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor, window: int
) -> tuple[Tensor, Tensor, Tensor]:
    if kernel(q) == "math":
        return _window_attention_grad.definition(grad, q, k, v, out, sums, window)
    S, unused = q.shape[2], q.new_empty(2, dtype=torch.uint64)  # where dropout would find its seed
    given = [t.transpose(1, 2) for t in (grad, q, k, v, out)]
    of_window = {"window_size_left": window - 1, "window_size_right": 0}
    found = torch.ops.aten._flash_attention_backward(
        *given, sums, None, None, S, S, 0.0, True, unused, unused, **of_window
    )
    d_q, d_k, d_v = (_tokens_outermost(t.transpose(1, 2)) for t in found)
    return d_q, d_k, d_v


# By sequences, or by heads where those of queries and those of keys both divide.
@operator("window_attention", _flash, splits=(Split((0, 0, 0), 0), Split((1, 1, 1), 1)))
def _window_attention(q: Tensor, k: Tensor, v: Tensor, window: int) -> tuple[Tensor, Tensor]:
    """Return the result, and the logarithm of each query's sum of exponentials, [B, H, S] float32 or wider."""
    S = q.shape[2]
    q_, k_, v_ = _query_chunks(q, k, v, window)
    scores = _scores(q_, k_, window)
    sums = scores.logsumexp(-1, keepdim=True)
    out = (scores - sums).exp() @ v_
    return _tokens_outermost(_joined(out, S).to(q.dtype)), _joined(sums, S).squeeze(-1).contiguous()


@operator("window_attention_grad", _flash_grad)
def _window_attention_grad(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor, window: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v, laid out as `out` is."""
    S = q.shape[2]
    q_, k_, v_ = _query_chunks(q, k, v, window)
    grad_, out_, sums_ = (_in_chunks(t, k.shape[1], window) for t in (grad, out, sums.unsqueeze(-1)))
    p = (_scores(q_, k_, window) - sums_).exp()
    of_scores = p * (grad_ @ v_.mT - (grad_ * out_).sum(-1, keepdim=True)) * q.shape[-1] ** -0.5
    d_q = _joined(of_scores @ k_, S).to(q.dtype)
    d_k, d_v = (
        _overlaid((of_heads.mT @ rows).sum(2), S).to(q.dtype) for of_heads, rows in ((of_scores, q_), (p, grad_))
    )
    return _tokens_outermost(d_q), _tokens_outermost(d_k), _tokens_outermost(d_v)


def _query_chunks(q: Tensor, k: Tensor, v: Tensor, W: int) -> tuple[Tensor, Tensor, Tensor]:
    """Cut queries into [B, K, R, n, W, E], with the keys and values that each chunk reads, [B, K, 1, n, 2·W, E]."""
    own = _in_chunks(q, k.shape[1], W)
    read = [F.pad(t, (0, 0, W, -t.shape[2] % W)).to(own.dtype).unfold(2, 2 * W, W).mT.unsqueeze(2) for t in (k, v)]
    return own, read[0], read[1]


def _in_chunks(x: Tensor, K: int, W: int) -> Tensor:
    """Cut [B, H, S, …] into [B, K, R, n, W, …], zeros behind the last token, in the dtype of sums."""
    x = F.pad(x, (0, 0, 0, -x.shape[2] % W)).to(_of_sums(x.dtype))
    return x.unflatten(2, (-1, W)).unflatten(1, (K, -1))


def _joined(x: Tensor, S: int) -> Tensor:
    """The inverse of `_in_chunks`."""
    return x.flatten(3, 4).flatten(1, 2)[:, :, :S]


def _overlaid(x: Tensor, S: int) -> Tensor:
    """Sum over the chunks that read a token: [B, K, n, 2·W, E] → [B, K, S, E]."""
    before, own = (half.flatten(2, 3) for half in x.chunk(2, dim=3))
    W = x.shape[3] // 2
    return (F.pad(own, (0, 0, W, 0)) + F.pad(before, (0, 0, 0, W)))[:, :, W : W + S]


def _scores(q: Tensor, k: Tensor, W: int) -> Tensor:
    """[B, K, R, n, W, 2·W]; −∞ outside the window and before the first token."""
    own, other = torch.arange(W, 2 * W, device=q.device)[:, None], torch.arange(2 * W, device=q.device)
    seen = (other <= own) & (other > own - W)
    has_token = torch.arange(q.shape[3], device=q.device)[:, None, None] * W + other >= W
    return (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~(seen & has_token), -torch.inf)


def _of_sums(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _tokens_outermost(x: Tensor) -> Tensor:
    """[B, heads, S, E] with the strides of a transposed [B, S, heads, E]."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def _save_window(ctx, inputs, output) -> None:
    *given, ctx.window = inputs
    ctx.save_for_backward(*given, *output)
    ctx.mark_non_differentiable(output[1])


def _window_backward(ctx, grad, _):
    return *torch.ops.titanlite.window_attention_grad(grad, *ctx.saved_tensors, ctx.window), None


torch.library.register_autograd("titanlite::window_attention", _window_backward, setup_context=_save_window)


@register_flop_formula(torch.ops.titanlite.window_attention)
def _window_flops(q_shape, k_shape, v_shape, window, *args, **kwargs) -> int:
    """Two products of E for each token that a query sees."""
    B, H, S, E = q_shape
    W = min(window, S)
    return 4 * B * H * E * (W * S - W * (W - 1) // 2)


@register_flop_formula(torch.ops.titanlite.window_attention_grad)
def _window_grad_flops(grad_shape, q_shape, k_shape, v_shape, result_shape, sums_shape, window, *args, **kwargs) -> int:
    """Five products in the place of two: the scores are formed again."""
    return _window_flops(q_shape, k_shape, v_shape, window) * 5 // 2
