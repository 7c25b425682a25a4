"""Device code of `titanlite.kernels.adamw`: one kernel for all tensors, which it finds in a table.

torch launches a kernel for every few tensors. Its kernels also write the clipped gradients back: they move 32 bytes for
each float32 parameter where 28 are needed, at three quarters of the memory's bandwidth (`scripts/bench/optimizer.py`).
"""

import triton
import triton.language as tl

BLOCK = 1024
"""Parameters that one thread block updates."""
WARPS = 4


@triton.jit
def _adamw(
    parameter, moment, gradients, distances, owners, blocks, sizes, decays, corrections, divisor, skip, squares,
    lr, decay_factor, one_less_beta1, beta2, one_less_beta2, eps, n,
    ALIGNED: tl.constexpr, MEASURE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Update one block of one tensor.

    parameter, moment: the first tensor of each kind.
    distances: [3, n] elements, from `parameter` to each parameter, and from `moment` to each first and second moment.
    gradients: [n], distances from `parameter` to each gradient.
    owners, blocks: of each thread block, the number of its tensor and of its block in the tensor.
    corrections: [2], 1 − β^t for both β.
    squares: if MEASURE, [2, blocks]: sums of squares of the parameters before the update, and of their changes.
    ALIGNED: whether all addresses and sizes allow accesses of 16 bytes.
    """
    is_applied = tl.load(skip) == 0
    if is_applied | MEASURE:  # parameters are measured in a skipped step, too
        owner = tl.load(owners + tl.program_id(0))
        size = tl.load(sizes + owner)
        to_p = tl.load(distances + owner)
        to_m = tl.load(distances + n + owner)
        to_v = tl.load(distances + 2 * n + owner)
        to_g = tl.load(gradients + owner)
        if ALIGNED:  # the compiler ignores hints on loaded numbers, but infers multiples of 4 from arithmetic
            size = size // 4 * 4
            to_p = to_p // 4 * 4
            to_m = to_m // 4 * 4
            to_v = to_v // 4 * 4
            to_g = to_g // 4 * 4
        at = tl.load(blocks + tl.program_id(0)).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = at < size
        g = tl.load(parameter + to_g + at, mask=inside, other=0.0) / tl.load(divisor)
        before = tl.load(parameter + to_p + at, mask=inside, other=0.0)
        p = before * (1 - lr * decay_factor * tl.load(decays + owner))
        m = tl.load(moment + to_m + at, mask=inside, other=0.0).to(tl.float32)
        v = tl.load(moment + to_v + at, mask=inside, other=0.0).to(tl.float32)
        m += one_less_beta1 * (g - m)
        v = beta2 * v + one_less_beta2 * g * g
        root = tl.sqrt(v) / tl.sqrt(tl.load(corrections + 1)) + eps
        p -= lr / tl.load(corrections) * (m / root)
        if MEASURE:
            change = tl.where(is_applied, p - before, 0.0)
            tl.store(squares + tl.program_id(0), tl.sum(before * before))
            tl.store(squares + tl.num_programs(0) + tl.program_id(0), tl.sum(change * change))
        if is_applied:
            tl.store(parameter + to_p + at, p, mask=inside)
            tl.store(moment + to_m + at, m.to(moment.dtype.element_ty), mask=inside)
            tl.store(moment + to_v + at, v.to(moment.dtype.element_ty), mask=inside)
