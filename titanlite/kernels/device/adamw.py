"""Device code of `titanlite.kernels.adamw`: one kernel for all tensors, which it finds by a table.

torch's takes a launch for each handful of tensors and writes the clipped gradient back: 32 bytes of each parameter in
float32 where 28 are needed, at three quarters of memory's speed (`scripts/bench/optimizer.py`).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from titanlite.kernels.adamw import AdamWState

BLOCK = 1024
"""Parameters of a thread block."""
WARPS = 4


@triton.jit
def _adamw(
    parameter, moment, gradients, distances, owners, blocks, sizes, decays, corrections, divisor, skip,
    lr, one_less_beta1, beta2, one_less_beta2, eps, n,
    ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One block of one tensor.

    parameter, moment: the first of each; distances: [3, n] of parameters and both moments from these, in elements;
    gradients: [n] of gradients from the first parameter; owners, blocks: which block of which tensor;
    corrections: [2], 1 − β^t. ALIGNED: whether all addresses, and the sizes, allow for 16 bytes at once.
    """
    if tl.load(skip) == 0:
        owner = tl.load(owners + tl.program_id(0))
        size = tl.load(sizes + owner)
        to_p = tl.load(distances + owner)
        to_m = tl.load(distances + n + owner)
        to_v = tl.load(distances + 2 * n + owner)
        to_g = tl.load(gradients + owner)
        if ALIGNED:  # the compiler believes no hint on a number that was loaded, but it believes arithmetic
            size = size // 4 * 4
            to_p = to_p // 4 * 4
            to_m = to_m // 4 * 4
            to_v = to_v // 4 * 4
            to_g = to_g // 4 * 4
        at = tl.load(blocks + tl.program_id(0)).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = at < size
        g = tl.load(parameter + to_g + at, mask=inside, other=0.0) / tl.load(divisor)
        p = tl.load(parameter + to_p + at, mask=inside, other=0.0) * (1 - lr * tl.load(decays + owner))
        m = tl.load(moment + to_m + at, mask=inside, other=0.0).to(tl.float32)
        v = tl.load(moment + to_v + at, mask=inside, other=0.0).to(tl.float32)
        m += one_less_beta1 * (g - m)
        v = beta2 * v + one_less_beta2 * g * g
        root = tl.sqrt(v) / tl.sqrt(tl.load(corrections + 1)) + eps
        p -= lr / tl.load(corrections) * (m / root)
        tl.store(parameter + to_p + at, p, mask=inside)
        tl.store(moment + to_m + at, m.to(moment.dtype.element_ty), mask=inside)
        tl.store(moment + to_v + at, v.to(moment.dtype.element_ty), mask=inside)


class Update:
    """The blocks of a state, and where its tensors lie. Gradients lie elsewhere in every step."""

    def __init__(self, state: AdamWState) -> None:
        first, moment, device = state.parameters[0], state.exp_avg[0], state.updates.device
        sizes = torch.tensor([p.numel() for p in state.parameters])
        per_tensor = (sizes + BLOCK - 1) // BLOCK
        firsts = per_tensor.cumsum(0) - per_tensor
        owners = torch.arange(len(sizes)).repeat_interleave(per_tensor)
        placed = [
            _distances("parameter", state.parameters, first, state),
            _distances("exp_avg", state.exp_avg, moment, state),
            _distances("exp_avg_sq", state.exp_avg_sq, moment, state),
        ]
        self.state = state
        self.blocks = int(per_tensor.sum())
        self.aligned = bool((sizes % 4 == 0).all()) and all(aligned for _, aligned in placed)
        self.distances = torch.tensor([found for found, _ in placed]).to(device)
        self.owners = owners.int().to(device)
        self.numbers = (torch.arange(self.blocks) - firsts[owners]).int().to(device)
        self.sizes = sizes.to(device)
        self.decays = torch.tensor(state.weight_decays, dtype=torch.float32, device=device)
        self.betas = torch.tensor([state.beta1, state.beta2], dtype=torch.float64, device=device)

    def step(self, gradients: list[Tensor], lr: float, divisor: Tensor, skip: Tensor) -> None:
        """What `titanlite.kernels.adamw.adamw` returns."""
        state, first = self.state, self.state.parameters[0]
        found, aligned = _distances("gradient", gradients, first, state)
        distances = torch.tensor(found, pin_memory=first.is_cuda).to(first.device, non_blocking=True)
        corrections = (1 - self.betas**state.updates).float()  # float64 until here: β² may be near one
        _adamw[(self.blocks,)](
            first, state.exp_avg[0], distances, self.distances, self.owners, self.numbers, self.sizes, self.decays,
            corrections, divisor, skip,
            lr, 1 - state.beta1, state.beta2, 1 - state.beta2, state.eps, len(state.parameters),
            self.aligned and aligned, BLOCK, num_warps=WARPS,
        )  # fmt: skip


def _distances(kind: str, tensors: list[Tensor], base: Tensor, state: AdamWState) -> tuple[list[int], bool]:
    """How many elements behind `base` each tensor lies, and whether all begin at a multiple of 16 bytes."""
    for i, (t, p) in enumerate(zip(tensors, state.parameters, strict=True)):
        if t.dtype != base.dtype or t.numel() != p.numel() or not t.is_contiguous():
            found = f"{t.dtype}, {list(t.shape)} with strides {t.stride()}"
            raise ValueError(f"AdamW: {kind} {i} is {found}; it must be {base.dtype}, contiguous, {p.numel()} elements")
    addresses, start = [t.data_ptr() for t in tensors], base.data_ptr()
    return [(a - start) // base.itemsize for a in addresses], not any(a % 16 for a in addresses)
