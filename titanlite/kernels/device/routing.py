"""Device code of `titanlite.kernels.routing`: the choice of experts, its gradient, and the rows of tokens at experts.

To choose, a thread block holds the logits of a few tokens and takes the highest logit K times; of equal logits it takes
the lowest expert's. Logits are compared as integers of the same order, whose maximum a warp finds with one instruction.

Finding the rows takes three kernels. In the first, each thread block counts its choices by expert. The second sums each
expert's counts over the preceding thread blocks. In the third, each thread block places its choices after those of the
preceding blocks. The order in which thread blocks run does not matter.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from titanlite.kernels.device.launch import cdiv, launch
from titanlite.kernels.routing import LEAST_SUM, check_route

LOGITS = 2048
"""Logits that a thread block holds, of one or more tokens: 16 per thread."""
CHOICES = 128
"""Choices of experts that a thread block counts and places. It compares each with COLUMNS others at a time."""
COLUMNS = 32
COUNTED = 1024
"""Choices that a thread block of `_count_choices` counts."""
EXPERTS, COUNTS = 8, 4096
"""Experts whose counts a thread block adds up, and counts that it holds at a time, 16 per thread."""

TAKEN = tl.constexpr(-(2**31))
"""Mark of a logit that has been chosen: lower than any result of `_ordered`."""


@triton.jit
def _ordered(x):
    """Map float32 numbers to int32 numbers of the same order. Both zeros are equal, and NaN is the greatest."""
    x = tl.where(x == 0.0, 0.0, x)
    bits = tl.where(x == x, x.to(tl.int32, bitcast=True), 0x7FC00000)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _softmax_sum(x, inside):
    """Return each row's maximum, and the sum of exp(x - maximum), over the elements that are `inside`."""
    highest = tl.max(tl.where(inside, x, float("-inf")), 1)
    return highest, tl.sum(tl.where(inside, tl.exp(x - highest[:, None]), 0.0), 1)


@triton.jit
def _weights_of_chosen(
    chosen, inside, highest, total, SCORE: tl.constexpr, NORMALISED: tl.constexpr, LEAST_SUM: tl.constexpr
):
    """Return the weights of `chosen`, the logits of each token's chosen experts, [ROWS, SLOTS]. "softmax" needs
    `highest` and `total`, the results of `_softmax_sum` for all logits."""
    if SCORE == "sigmoid":
        weights = tl.where(inside, 1.0 / (1.0 + tl.exp(-chosen)), 0.0)
        if NORMALISED:
            weights = weights / (tl.sum(weights, 1)[:, None] + LEAST_SUM)
    elif SCORE == "softmax" and not NORMALISED:
        weights = tl.where(inside, tl.exp(chosen - highest[:, None]) / total[:, None], 0.0)
    else:
        own_highest, own_total = _softmax_sum(chosen, inside)
        weights = tl.where(inside, tl.exp(chosen - own_highest[:, None]) / own_total[:, None], 0.0)
    return weights


@triton.jit
def _route(
    logits, bias, weights, choices, M, scale,
    E: tl.constexpr, K: tl.constexpr, HAS_BIAS: tl.constexpr, SCORE: tl.constexpr, NORMALISED: tl.constexpr,
    LEAST_SUM: tl.constexpr, WIDTH: tl.constexpr, SLOTS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    m, e, k = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, WIDTH), tl.arange(0, SLOTS)
    inside = (m < M)[:, None] & (e < E)[None, :]
    x = tl.load(logits + m.to(tl.int64)[:, None] * E + e[None, :], mask=inside, other=0.0)
    here = (e < E)[None, :] & (m >= 0)[:, None]
    highest, total = _softmax_sum(x, here)
    scored = x
    if HAS_BIAS:
        if SCORE == "softmax":
            scored = tl.exp(x - highest[:, None]) / total[:, None]
        elif SCORE == "sigmoid":
            scored = 1.0 / (1.0 + tl.exp(-x))
        scored += tl.load(bias + e, mask=e < E, other=0.0)[None, :]
    left = tl.where(here, _ordered(scored), TAKEN)
    chosen = tl.zeros((ROWS, SLOTS), tl.float32)
    experts = tl.zeros((ROWS, SLOTS), tl.int32)
    for slot in tl.static_range(K):
        best = tl.max(left, 1)
        expert = tl.min(tl.where(left == best[:, None], e[None, :], WIDTH), 1)
        own = e[None, :] == expert[:, None]
        if HAS_BIAS:
            logit = tl.sum(tl.where(own, x, 0.0), 1)
        else:
            logit = (best ^ ((best >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
        left = tl.where(own, TAKEN, left)
        chosen = tl.where(k[None, :] == slot, logit[:, None], chosen)
        experts = tl.where(k[None, :] == slot, expert[:, None], experts)
    of_slots = (k < K)[None, :] & (m >= 0)[:, None]
    found = _weights_of_chosen(chosen, of_slots, highest, total, SCORE, NORMALISED, LEAST_SUM) * scale
    at, wanted = m.to(tl.int64)[:, None] * K + k[None, :], (m < M)[:, None] & (k < K)[None, :]
    tl.store(weights + at, found, mask=wanted)
    tl.store(choices + at, experts, mask=wanted)


@triton.jit
def _route_grad(
    grad, logits, choices, out, M, scale,
    E: tl.constexpr, K: tl.constexpr, SCORE: tl.constexpr, NORMALISED: tl.constexpr, LEAST_SUM: tl.constexpr,
    WIDTH: tl.constexpr, SLOTS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    m, e, k = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, WIDTH), tl.arange(0, SLOTS)
    row = m.to(tl.int64)[:, None]
    inside, of_slots = (m < M)[:, None] & (e < E)[None, :], (m < M)[:, None] & (k < K)[None, :]
    g = tl.load(grad + row * K + k[None, :], mask=of_slots, other=0.0) * scale
    experts = tl.load(choices + row * K + k[None, :], mask=of_slots, other=-1)
    chosen = tl.load(logits + row * E + experts, mask=of_slots, other=0.0)
    DENSE: tl.constexpr = SCORE == "softmax" and not NORMALISED
    highest, total = tl.zeros((ROWS,), tl.float32), tl.full((ROWS,), 1.0, tl.float32)
    of_all = tl.zeros((ROWS, WIDTH), tl.float32)
    if DENSE:
        x = tl.load(logits + row * E + e[None, :], mask=inside, other=0.0)
        highest, total = _softmax_sum(x, (e < E)[None, :] & (m >= 0)[:, None])
        of_all = tl.exp(x - highest[:, None]) / total[:, None]
    slots = (k < K)[None, :] & (m >= 0)[:, None]
    weights = _weights_of_chosen(chosen, slots, highest, total, SCORE, NORMALISED, LEAST_SUM)
    shared = tl.sum(g * weights, 1)[:, None]
    if SCORE == "sigmoid":
        sigmoid = tl.where(slots, 1.0 / (1.0 + tl.exp(-chosen)), 0.0)
        if NORMALISED:
            g = (g - shared) / (tl.sum(sigmoid, 1)[:, None] + LEAST_SUM)
        of_chosen = g * sigmoid * (1.0 - sigmoid)
    else:
        of_chosen = weights * (g - shared)
        if DENSE:
            of_all *= -shared
    for slot in tl.static_range(K):
        expert = tl.sum(tl.where(k[None, :] == slot, experts, 0), 1)
        own = tl.sum(tl.where(k[None, :] == slot, of_chosen, 0.0), 1)
        of_all = tl.where(e[None, :] == expert[:, None], own[:, None], of_all)
    tl.store(out + row * E + e[None, :], of_all, mask=inside)


@triton.jit
def _count_choices(
    choices, is_counted, counts, n, K: tl.constexpr, E: tl.constexpr, WIDTH: tl.constexpr, CHOICES: tl.constexpr
):
    """Add the number of each expert's choices by counted tokens to `counts`, [E] int64."""
    i, e = tl.program_id(0) * CHOICES + tl.arange(0, CHOICES), tl.arange(0, WIDTH)
    expert = tl.load(choices + i, mask=i < n, other=0)
    found = tl.histogram(expert, WIDTH, mask=(i < n) & (tl.load(is_counted + i // K, mask=i < n, other=0) != 0))
    tl.atomic_add(counts + e, found.to(tl.int64), mask=(e < E) & (found > 0), sem="relaxed")


@triton.jit
def _expert_counts(choices, slots, counts, n, first, G: tl.constexpr, WIDTH: tl.constexpr, CHOICES: tl.constexpr):
    """Count each thread block's choices of G experts from `first` on, [blocks, G], and set all `slots` to -1."""
    block, g = tl.program_id(0), tl.arange(0, WIDTH)
    i = block * CHOICES + tl.arange(0, CHOICES)
    expert = tl.load(choices + i, mask=i < n, other=-1) - first
    here = (expert >= 0) & (expert < G) & (i < n)
    tl.store(counts + block * G + g, tl.histogram(tl.where(here, expert, 0), WIDTH, mask=here), mask=g < G)
    tl.store(slots + i, tl.full((CHOICES,), -1, tl.int32), mask=i < n)


@triton.jit
def _expert_begins(counts, begins, totals, blocks, G: tl.constexpr, EXPERTS: tl.constexpr, ROWS: tl.constexpr):
    """Sum the counts of a few experts over the thread blocks of `_expert_counts`: over preceding blocks in `begins`,
    [blocks, G], and over all blocks in `totals`, [G]."""
    g = tl.program_id(0) * EXPERTS + tl.arange(0, EXPERTS)
    before = tl.zeros((EXPERTS,), tl.int32)
    for start in range(0, blocks, ROWS):
        b = start + tl.arange(0, ROWS)
        at, inside = b[:, None] * G + g[None, :], (b < blocks)[:, None] & (g < G)[None, :]
        own = tl.load(counts + at, mask=inside, other=0)
        tl.store(begins + at, before[None, :] + tl.cumsum(own, 0) - own, mask=inside)
        before += tl.sum(own, 0)
    tl.store(totals + g, before, mask=g < G)


@triton.jit
def _expert_places(
    choices, begins, totals, rows, slots, offsets, n, first,
    G: tl.constexpr, WIDTH: tl.constexpr, CHOICES: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Give each choice its row: after all rows of lower experts, and after earlier choices of the same expert."""
    block = tl.program_id(0)
    i = block * CHOICES + tl.arange(0, CHOICES)
    expert = tl.load(choices + i, mask=i < n, other=-1) - first
    before = tl.zeros((CHOICES, COLUMNS), tl.int32)
    for start in range(0, CHOICES, COLUMNS):
        j = block * CHOICES + start + tl.arange(0, COLUMNS)
        other = tl.load(choices + j, mask=j < n, other=-1) - first
        before += ((expert[:, None] == other[None, :]) & (j[None, :] < i[:, None])).to(tl.int32)
    for start in range(0, G, COLUMNS):
        g = start + tl.arange(0, COLUMNS)
        total = tl.load(totals + g, mask=g < G, other=0)
        before += tl.where(g[None, :] < expert[:, None], total[None, :], 0)
    here = (expert >= 0) & (expert < G) & (i < n)
    row = tl.load(begins + block * G + expert, mask=here, other=0) + tl.sum(before, 1)
    tl.store(rows + i, tl.where(here, row, -1), mask=i < n)
    tl.store(slots + row, i, mask=here)
    if block == 0:
        g = tl.arange(0, WIDTH)
        ends = tl.cumsum(tl.load(totals + g, mask=g < G, other=0), 0)
        tl.store(offsets + 1 + g, ends, mask=g < G)
        tl.store(offsets + g, tl.zeros((WIDTH,), tl.int32), mask=g == 0)


def launch_route(
    logits: Tensor, bias: Tensor | None, top_k: int, score: str, normalised: bool, scale: float
) -> tuple[Tensor, Tensor]:
    check_route(logits, top_k, score)
    logits, bias = _float32(logits), None if bias is None else _float32(bias)
    M, E = logits.shape
    weights, choices = logits.new_empty(M, top_k), logits.new_empty(M, top_k, dtype=torch.int32)
    if M:
        width, slots, rows = _route_tile(E, top_k)
        tensors, how = (logits, logits if bias is None else bias, weights, choices), (score, normalised, LEAST_SUM)
        launch(
            _route, (M, E, top_k, bias is None, scale, *how), cdiv(M, rows), tensors,
            lambda: (*tensors, M, scale, E, top_k, bias is not None, *how, width, slots, rows), num_warps=4,
        )  # fmt: skip
    return weights, choices


def launch_route_grad(
    grad: Tensor, logits: Tensor, choices: Tensor, score: str, normalised: bool, scale: float
) -> Tensor:
    grad, logits, choices = _float32(grad), _float32(logits), choices.contiguous()
    (M, E), K, out = logits.shape, choices.shape[1], torch.empty_like(logits)
    if M:
        width, slots, rows = _route_tile(E, K)
        tensors, how = (grad, logits, choices, out), (score, normalised, LEAST_SUM)
        launch(
            _route_grad, (M, E, K, scale, *how), cdiv(M, rows), tensors,
            lambda: (*tensors, M, scale, E, K, *how, width, slots, rows), num_warps=4,
        )  # fmt: skip
    return out


def launch_count_choices(choices: Tensor, is_counted: Tensor, n_experts: int) -> Tensor:
    choices, is_counted = choices.contiguous(), is_counted.contiguous()
    n, top_k = choices.numel(), choices.shape[1]
    counts = torch.zeros(n_experts, dtype=torch.int64, device=choices.device)
    if n:
        tensors, width = (choices, is_counted.view(torch.uint8), counts), max(16, triton.next_power_of_2(n_experts))
        launch(
            _count_choices, (n, top_k, n_experts), cdiv(n, COUNTED), tensors,
            lambda: (*tensors, n, top_k, n_experts, width, COUNTED), num_warps=8,
        )  # fmt: skip
    return counts


def launch_expert_rows(choices: Tensor, first: int, count: int) -> tuple[Tensor, Tensor, Tensor]:
    choices, n = choices.contiguous(), choices.numel()
    rows, slots, offsets = torch.empty_like(choices), choices.new_empty(n), choices.new_empty(count + 1)
    if not n:
        return rows, slots, offsets.zero_()
    width, blocks = max(16, triton.next_power_of_2(count)), cdiv(n, CHOICES)
    counts, begins, totals = (choices.new_empty(rows_of, count) for rows_of in (blocks, blocks, 1))
    at_once = min(COUNTS // EXPERTS, triton.next_power_of_2(blocks))
    launch(
        _expert_counts, (n, first, count), blocks, (choices, slots, counts),
        lambda: (choices, slots, counts, n, first, count, width, CHOICES), num_warps=8,
    )  # fmt: skip
    launch(
        _expert_begins, (blocks, count), cdiv(count, EXPERTS), (counts, begins, totals),
        lambda: (counts, begins, totals, blocks, count, EXPERTS, at_once), num_warps=8,
    )  # fmt: skip
    tensors = choices, begins, totals, rows, slots, offsets
    launch(
        _expert_places, (n, first, count), blocks, tensors,
        lambda: (*tensors, n, first, count, width, CHOICES, COLUMNS), num_warps=8,
    )  # fmt: skip
    return rows, slots, offsets


def _route_tile(E: int, K: int) -> tuple[int, int, int]:
    """Return the sizes of a thread block's tile: columns for E logits, columns for K choices, and tokens."""
    width = max(16, triton.next_power_of_2(E))
    return width, triton.next_power_of_2(K), max(1, LOGITS // width)


def _float32(x: Tensor) -> Tensor:
    if x.dtype != torch.float32:
        raise TypeError(f"route: {x.dtype} on a GPU; want float32")
    return x.contiguous()
