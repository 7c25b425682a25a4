"""Device code of the gradient of `titanlite.kernels.rope.rotated_heads`. A thread block takes a few tokens.

It reads a token's angles once, and goes through the token's heads one after the other.
"""

import triton
import triton.language as tl
from torch import Tensor

from titanlite.kernels.device.launch import cdiv, launch

NUMBERS = 2048
"""Numbers that a thread block holds at a time, of one head of some tokens; 16 per thread."""


@triton.jit
def angles(cos, sin, m, S, M, E: tl.constexpr, HALF: tl.constexpr):
    """Return the cosines and sines of the tokens `m`, of M in all, and a mask of the valid numbers. S: positions in
    the tables; E: columns of a head; HALF: E / 2 rounded up to a power of two."""
    e = tl.arange(0, HALF)[None, :]
    inside = (m < M)[:, None] & (e < E // 2)
    at = (m % S)[:, None] * (E // 2) + e
    return tl.load(cos + at, mask=inside, other=0.0), tl.load(sin + at, mask=inside, other=0.0), inside


@triton.jit
def halves(x, inside, E: tl.constexpr, HALF: tl.constexpr):
    """Load both halves of one head (E columns) of each token, as float32."""
    e = tl.arange(0, HALF)[None, :]
    low = tl.load(x + e, mask=inside, other=0.0).to(tl.float32)
    return low, tl.load(x + E // 2 + e, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def store(x, low, high, inside, E: tl.constexpr, HALF: tl.constexpr):
    """Store both halves of one head (E columns) of each token, in the dtype of `x`."""
    e = tl.arange(0, HALF)[None, :]
    tl.store(x + e, low.to(x.dtype.element_ty), mask=inside)
    tl.store(x + E // 2 + e, high.to(x.dtype.element_ty), mask=inside)


@triton.jit
def _rotated_back(grad, out, c, s, inside, E: tl.constexpr, HALF: tl.constexpr):
    low, high = halves(grad, inside, E, HALF)
    store(out, low * c + high * s, high * c - low * s, inside, E, HALF)


@triton.jit
def _rotated_heads_grad(
    q_grad, q_row, q_head, k_grad, k_row, k_head, v_grad, v_row, v_head, cos, sin, out, M, S, KV,
    R: tl.constexpr, E: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    c, s, inside = angles(cos, sin, m, S, M, E, HALF)
    row = m.to(tl.int64)[:, None]
    out += row * (KV * (R + 2) * E)
    for head in range(KV * R):
        of = (head // R) * (R + 2) + head % R
        _rotated_back(q_grad + row * q_row + tl.cast(head, tl.int64) * q_head, out + of * E, c, s, inside, E, HALF)
    for head in range(KV):
        of = head * (R + 2) + R
        _rotated_back(k_grad + row * k_row + tl.cast(head, tl.int64) * k_head, out + of * E, c, s, inside, E, HALF)
        low, high = halves(v_grad + row * v_row + tl.cast(head, tl.int64) * v_head, inside, E, HALF)
        store(out + (of + 1) * E, low, high, inside, E, HALF)


def head_block(E: int) -> tuple[int, int]:
    """Return half of E columns, rounded up to a power of two, and the tokens that a thread block holds at a time."""
    half = triton.next_power_of_2(E // 2)
    return half, max(1, NUMBERS // (2 * half))


def with_contiguous_heads(*grads: Tensor) -> list[Tensor]:
    """Return tensors [M, heads, E]; those whose heads are not contiguous are copied."""
    return [x if x.stride(-1) == 1 else x.contiguous() for x in grads]


def launch_rotated_heads_grad(q_grad: Tensor, k_grad: Tensor, v_grad: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    q_grad, k_grad, v_grad = with_contiguous_heads(q_grad, k_grad, v_grad)
    cos, sin = cos.contiguous(), sin.contiguous()
    (M, heads, E), K, S, (half, rows) = q_grad.shape, k_grad.shape[1], len(cos), head_block(q_grad.shape[2])
    out = q_grad.new_empty(M, (heads + 2 * K) * E)
    if M:
        strides = [grad.stride()[:2] for grad in (q_grad, k_grad, v_grad)]
        tensors = q_grad, k_grad, v_grad, cos, sin, out
        launch(
            _rotated_heads_grad, (M, S, K, heads, E, *strides, *(t.dtype for t in tensors)), cdiv(M, rows), tensors,
            lambda: (
                q_grad, *strides[0], k_grad, *strides[1], v_grad, *strides[2], cos, sin, out,
                M, S, K, heads // K, E, half, rows,
            ),
            num_warps=4,
        )  # fmt: skip
    return out
