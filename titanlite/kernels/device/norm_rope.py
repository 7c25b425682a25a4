"""Device code of `titanlite.kernels.norm_rope`. A thread block takes a few tokens, and their heads one after the other.

It reads a token's angles once for all heads. The weights' gradients are sums over tokens and heads. Each thread block
adds up its own tokens in order, and a last pass adds up all thread blocks' sums, so that two runs give the same bits.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from titanlite.kernels.device.channel import multiprocessors
from titanlite.kernels.device.launch import cdiv, launch
from titanlite.kernels.device.rope import angles, halves, head_block, store, with_contiguous_heads

BLOCKS = 8
"""Thread blocks per multiprocessor that compute gradients. Its registers have room for three at a time."""


@triton.jit
def _mean(low, high, E: tl.constexpr):
    """Return the mean over each head of E columns, from its two halves."""
    return ((tl.sum(low, 1) + tl.sum(high, 1)) / E)[:, None]


@triton.jit
def _weight(weight, E: tl.constexpr, HALF: tl.constexpr):
    e = tl.arange(0, HALF)
    low = tl.load(weight + e, mask=e < E // 2, other=0.0).to(tl.float32)
    high = tl.load(weight + E // 2 + e, mask=e < E // 2, other=0.0).to(tl.float32)
    return low[None, :], high[None, :]


@triton.jit
def _head(x, out, wl, wh, c, s, inside, eps, E: tl.constexpr, HALF: tl.constexpr):
    low, high = halves(x, inside, E, HALF)
    scale = tl.rsqrt(_mean(low * low, high * high, E) + eps)
    low, high = low * scale * wl, high * scale * wh
    store(out, low * c - high * s, high * c + low * s, inside, E, HALF)


@triton.jit
def _norm_rope(
    qkv, q_weight, k_weight, cos, sin, q, k, M, S, KV, eps,
    R: tl.constexpr, E: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    c, s, inside = angles(cos, sin, m, S, M, E, HALF)
    row = m.to(tl.int64)[:, None]
    qkv += row * (KV * (R + 2) * E)
    q += row * (KV * R * E)
    k += row * (KV * E)
    wl, wh = _weight(q_weight, E, HALF)
    for head in range(KV * R):
        of = (head // R) * (R + 2) + head % R
        _head(qkv + of * E, q + head * E, wl, wh, c, s, inside, eps, E, HALF)
    wl, wh = _weight(k_weight, E, HALF)
    for head in range(KV):
        _head(qkv + (head * (R + 2) + R) * E, k + head * E, wl, wh, c, s, inside, eps, E, HALF)


@triton.jit
def _head_grad(grad, x, out, wl, wh, al, ah, c, s, inside, eps, E: tl.constexpr, HALF: tl.constexpr):
    """Store the gradient of a head in `out`, and return `al` and `ah`, sums for both halves of the weight's gradient,
    with this head added. wl, wh: halves of the weight; c, s: cosines and sines."""
    dl, dh = halves(grad, inside, E, HALF)
    low, high = halves(x, inside, E, HALF)
    scale = tl.rsqrt(_mean(low * low, high * high, E) + eps)
    low, high = low * scale, high * scale
    dl, dh = dl * c + dh * s, dh * c - dl * s
    al += dl * low
    ah += dh * high
    dl, dh = dl * wl, dh * wh
    mean = _mean(dl * low, dh * high, E)
    store(out, scale * (dl - low * mean), scale * (dh - high * mean), inside, E, HALF)
    return al, ah


@triton.jit
def _norm_rope_grad(
    q_grad, q_row, q_head, k_grad, k_row, k_head, v_grad, v_row, v_head,
    qkv, q_weight, k_weight, cos, sin, out, parts, M, S, KV, eps,
    R: tl.constexpr, E: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Store the gradient of `qkv` in `out`, and each thread block's share of the weights' gradients in `parts`,
    [blocks, 2, 2, HALF]: for q_weight and k_weight, each in two halves of a head."""
    ql, qh = _weight(q_weight, E, HALF)
    kl, kh = _weight(k_weight, E, HALF)
    aql = tl.zeros((ROWS, HALF), tl.float32)
    aqh = tl.zeros((ROWS, HALF), tl.float32)
    akl = tl.zeros((ROWS, HALF), tl.float32)
    akh = tl.zeros((ROWS, HALF), tl.float32)
    for block in range(tl.program_id(0), tl.cdiv(M, ROWS), tl.num_programs(0)):
        m = block * ROWS + tl.arange(0, ROWS)
        c, s, inside = angles(cos, sin, m, S, M, E, HALF)
        row = m.to(tl.int64)[:, None]
        x, d = qkv + row * (KV * (R + 2) * E), out + row * (KV * (R + 2) * E)
        for head in range(KV * R):
            of = (head // R) * (R + 2) + head % R
            grad = q_grad + row * q_row + tl.cast(head, tl.int64) * q_head
            aql, aqh = _head_grad(grad, x + of * E, d + of * E, ql, qh, aql, aqh, c, s, inside, eps, E, HALF)
        for head in range(KV):
            of = head * (R + 2) + R
            grad = k_grad + row * k_row + tl.cast(head, tl.int64) * k_head
            akl, akh = _head_grad(grad, x + of * E, d + of * E, kl, kh, akl, akh, c, s, inside, eps, E, HALF)
            low, high = halves(v_grad + row * v_row + tl.cast(head, tl.int64) * v_head, inside, E, HALF)
            store(d + (of + 1) * E, low, high, inside, E, HALF)
    e = tl.arange(0, HALF)
    parts += tl.program_id(0) * (4 * HALF)
    tl.store(parts + e, tl.sum(aql, 0))
    tl.store(parts + HALF + e, tl.sum(aqh, 0))
    tl.store(parts + 2 * HALF + e, tl.sum(akl, 0))
    tl.store(parts + 3 * HALF + e, tl.sum(akh, 0))


def _sizes(qkv: Tensor, cos: Tensor, queries_per_kv: int) -> tuple[int, int, int, int, int]:
    """Return S (positions), K (heads of keys), E (columns of a head), and the results of `head_block`."""
    S, E = len(cos), 2 * cos.shape[1]
    return S, qkv.shape[1] // E // (queries_per_kv + 2), E, *head_block(E)


def launch_norm_rope(
    qkv: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor, queries_per_kv: int, eps: float
) -> tuple[Tensor, Tensor]:
    qkv, q_weight, k_weight, cos, sin = (x.contiguous() for x in (qkv, q_weight, k_weight, cos, sin))
    M, R, (S, K, E, half, rows) = len(qkv), queries_per_kv, _sizes(qkv, cos, queries_per_kv)
    tensors = qkv, q_weight, k_weight, cos, sin, qkv.new_empty(M, K * R, E), qkv.new_empty(M, K, E)
    if M:
        key = M, S, K, R, E, eps, *(t.dtype for t in tensors)
        launch(
            _norm_rope, key, cdiv(M, rows), tensors,
            lambda: (*tensors, M, S, K, eps, R, E, half, rows), num_warps=4,
        )  # fmt: skip
    return tensors[-2:]


def launch_norm_rope_grad(
    q_grad: Tensor, k_grad: Tensor, v_grad: Tensor,
    qkv: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor, queries_per_kv: int, eps: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    q_grad, k_grad, v_grad = with_contiguous_heads(q_grad, k_grad, v_grad)
    qkv, q_weight, k_weight, cos, sin = (x.contiguous() for x in (qkv, q_weight, k_weight, cos, sin))
    M, R, (S, K, E, half, rows) = len(qkv), queries_per_kv, _sizes(qkv, cos, queries_per_kv)
    blocks = min(cdiv(M, rows), BLOCKS * multiprocessors(qkv.device))
    out, parts = qkv.new_empty(qkv.shape), qkv.new_empty(blocks, 2, 2, half, dtype=torch.float32)
    if M:
        strides = [grad.stride()[:2] for grad in (q_grad, k_grad, v_grad)]
        tensors = q_grad, k_grad, v_grad, qkv, q_weight, k_weight, cos, sin, out, parts
        launch(
            _norm_rope_grad, (M, S, K, R, E, eps, *strides, *(t.dtype for t in tensors)), blocks, tensors,
            lambda: (
                q_grad, *strides[0], k_grad, *strides[1], v_grad, *strides[2], *tensors[3:],
                M, S, K, eps, R, E, half, rows,
            ),
            num_warps=4,
        )  # fmt: skip
    of_q, of_k = (parts[:, n].sum(0)[:, : E // 2].flatten().to(q_weight.dtype) for n in range(2))  # no views of `parts`
    return out, of_q, of_k
