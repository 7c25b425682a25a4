"""AdamW on many tensors at once. An update can also clip the gradients, or be skipped.

On a GPU one kernel updates all tensors in one pass over memory (`titanlite/kernels/device/adamw.py`). Elsewhere torch's
fused AdamW is called.

Source: Loshchilov and Hutter 2019, "Decoupled Weight Decay Regularization", algorithm 2.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class AdamWState:
    """The tensors that an AdamW update changes, and its constants. All lists but `runs` have an entry per parameter."""

    parameters: list[Tensor]  # float32, contiguous, none of them empty
    exp_avg: list[Tensor]  # running means of the gradients, all float32 or all bfloat16
    exp_avg_sq: list[Tensor]  # running means of the squared gradients, in the dtype of `exp_avg`
    weight_decays: list[float]
    runs: list[int]  # lengths of runs of consecutive parameters, whose squares are summed per run
    updates: Tensor  # [] float32, number of updates including the present one; the caller counts
    beta1: float  # decay of `exp_avg`
    beta2: float  # decay of `exp_avg_sq`
    eps: float  # added to the square root of `exp_avg_sq`


def adamw(state: AdamWState) -> Callable[[list[Tensor], float, Tensor, Tensor, bool, float], Sequence[Tensor]]:
    """Return a function that applies one AdamW update to the tensors of a state.

    Args:
        state: its tensors are changed in place, and must not move in memory.

    Returns:
        The function. `state.updates` must already count the update. Its arguments are

        - the gradients of the parameters, float32, contiguous; their values are undefined afterwards;
        - the learning rate;
        - [] float32, a divisor of the gradients, which clips them;
        - [] float32, 1 to skip the update, so that no tensor changes, else 0;
        - whether to measure: the function then returns [2] for each run of consecutive parameters in `state.runs`,
          the sums of squares of the parameters before the update and of their changes;
        - a factor by which all weight decays are multiplied.

    Raises:
        ValueError: a tensor on a GPU is not contiguous, or has an unexpected dtype or number of elements.
    """
    if state.updates.is_cuda and state.parameters:
        return Update(state).step
    return functools.partial(_adamw_by_torch, state)


def _adamw_by_torch(
    state: AdamWState,
    gradients: list[Tensor],
    lr: float,
    divisor: Tensor,
    skip: Tensor,
    measure: bool = False,
    decay_factor: float = 1.0,
) -> Sequence[Tensor]:
    squares: list[Tensor] = []
    tensors = state.parameters, gradients, state.exp_avg, state.exp_avg_sq, state.weight_decays
    for parameter, gradient, *kept, weight_decay in zip(*tensors, strict=True):
        exp_avg, exp_avg_sq = (moment.float() for moment in kept)  # no copy if they are float32
        before = parameter.clone() if measure else None
        torch._fused_adamw_(
            [parameter],
            [gradient],
            [exp_avg],
            [exp_avg_sq],
            [],  # no running maxima: those are AMSGrad's
            [state.updates],
            lr=lr,
            beta1=state.beta1,
            beta2=state.beta2,
            weight_decay=weight_decay * decay_factor,
            eps=state.eps,
            amsgrad=False,
            maximize=False,
            grad_scale=divisor,
            found_inf=skip,
        )
        for narrow, updated in zip(kept, (exp_avg, exp_avg_sq), strict=True):
            if narrow is not updated:
                narrow.copy_(updated)
        if before is not None:
            weight = before.square().sum()
            squares.append(torch.stack((weight, before.sub_(parameter).square_().sum())))
    return [run.sum(0) for run in torch.stack(squares).split(state.runs)] if squares else ()


class Update:
    """Launches the kernel that updates a state. Between steps gradients may move in memory, the state's must not."""

    def __init__(self, state: AdamWState) -> None:
        from titanlite.kernels.device.adamw import BLOCK

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
        self.blocks_of_runs = [int(run.sum()) for run in per_tensor.split(state.runs)]
        self.aligned = bool((sizes % 4 == 0).all()) and all(aligned for _, aligned in placed)
        self.distances = torch.tensor([found for found, _ in placed]).to(device)
        self.owners = owners.int().to(device)
        self.numbers = (torch.arange(self.blocks) - firsts[owners]).int().to(device)
        self.sizes = sizes.to(device)
        self.decays = torch.tensor(state.weight_decays, dtype=torch.float32, device=device)
        self.betas = torch.tensor([state.beta1, state.beta2], dtype=torch.float64, device=device)

    def step(
        self,
        gradients: list[Tensor],
        lr: float,
        divisor: Tensor,
        skip: Tensor,
        measure: bool = False,
        decay_factor: float = 1.0,
    ) -> Sequence[Tensor]:
        """Apply one update. For the arguments see the function that `adamw` returns."""
        from titanlite.kernels.device import adamw as device

        state, first = self.state, self.state.parameters[0]
        found, aligned = _distances("gradient", gradients, first, state)
        distances = torch.tensor(found, pin_memory=first.is_cuda).to(first.device, non_blocking=True)
        corrections = (1 - self.betas**state.updates).float()  # computed in float64: β2 may be near 1
        squares = torch.empty(2, self.blocks, device=first.device) if measure else skip
        device._adamw[(self.blocks,)](
            first, state.exp_avg[0], distances, self.distances, self.owners, self.numbers, self.sizes, self.decays,
            corrections, divisor, skip, squares,
            lr, decay_factor, 1 - state.beta1, state.beta2, 1 - state.beta2, state.eps, len(state.parameters),
            self.aligned and aligned, measure, device.BLOCK, num_warps=device.WARPS,  # type: ignore[call-arg]  # the launch takes it
        )  # fmt: skip
        return [run.sum(1) for run in squares.split(self.blocks_of_runs, dim=1)] if measure else ()


def _distances(kind: str, tensors: list[Tensor], base: Tensor, state: AdamWState) -> tuple[list[int], bool]:
    """Return each tensor's distance from `base` in memory, in elements, and whether all begin at multiples of 16 bytes.

    `kind` names the tensors in the ValueError for a tensor that does not fit its parameter.
    """
    for i, (t, p) in enumerate(zip(tensors, state.parameters, strict=True)):
        if t.dtype != base.dtype or t.numel() != p.numel() or not t.is_contiguous():
            found = f"{t.dtype}, {list(t.shape)} with strides {t.stride()}"
            raise ValueError(f"AdamW: {kind} {i} is {found}; it must be {base.dtype}, contiguous, {p.numel()} elements")
    addresses, start = [t.data_ptr() for t in tensors], base.data_ptr()
    return [(a - start) // base.itemsize for a in addresses], not any(a % 16 for a in addresses)
