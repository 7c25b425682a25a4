"""The two sides of MFU: what a token costs by count, and what the device could do at best.

MFU = tokens per second and device × FLOPs per token / peak FLOPs per second. The peak is that of dense bf16, whatever
arithmetic a recipe uses, so that MFU compares runs of one model by speed alone; float8 may exceed 100 %. FLOPs that are
spent on recomputing activations do not count.

Source of the peaks: the vendors' data sheets, dense figures. NVIDIA prints most of them "with sparsity"; those are
halved here. Boards of one chip differ in clocks and power (H100 SXM, PCIe, NVL), so the whole device name decides.
A device that is not in the table, a CPU among them, is measured with a matmul; the result is below its peak, and
MFU above what a data sheet would give. Which of the two it was is part of the answer.
"""

import re
import time
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

from titanlite.config.recipe_schema import ModelDims
from titanlite.data.document_starts import twice_attended
from titanlite.models.layers import CausalAttention, Projection

# First match wins: the special board before the general one.
_DENSE_BF16: tuple[tuple[str, float], ...] = (
    (r"GB[23]00", 2500e12),
    (r"B[23]00", 2250e12),
    (r"H[12]00 NVL", 835e12),
    (r"H[18]00 PCIe", 756e12),
    (r"GH200|H200|H[18]00", 989e12),
    (r"H20", 148e12),
    (r"A[18]00", 312e12),
    (r"L40S", 362e12),
    (r"L40", 181e12),
    (r"L4", 121e12),
    (r"RTX 6000 Ada", 364e12),
    (r"RTX 5090", 209e12),
    (r"RTX 4090", 165e12),
    (r"RTX 3090", 71e12),
    (r"MI300A", 981e12),
    (r"MI300X|MI325X", 1307e12),
    (r"MI350X", 2300e12),
    (r"MI355X", 2500e12),
)
_MEASURE_S, _REPEATS = 0.3, 5  # other processes may take the cores meanwhile: the fastest counts


def peak_flops(device: torch.device, dtype: torch.dtype = torch.bfloat16) -> tuple[float, str]:
    """Find the highest rate of matmul FLOPs of a device, measured with a dtype where no data sheet has it.

    Returns:
        FLOPs per second, and how it is known, for the log.
    """
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type.upper()
    known = None if device.type == "cpu" else dense_bf16_flops(name)
    if known is not None:
        return known, f"dense bf16 in the data sheet of {name}"
    flops, size = _measured_flops(device, dtype)
    return flops, f"measured with a {size}×{size} {str(dtype).removeprefix('torch.')} matmul on this {name}"


def dense_bf16_flops(name: str) -> float | None:
    """Look up the data sheet's dense bf16 FLOPs per second of a device name; None if it is not known.

    A slice of a GPU (MIG) has the name of the whole, and so have other chips (RTX 4090 Laptop, 4090 D, 3090 Ti): these
    are treated as unknown.
    """
    if re.search(r"\b(MIG|Laptop|D|Ti)\b", name):
        return None
    return next((flops for pattern, flops in _DENSE_BF16 if re.search(rf"\b(?:{pattern})\b", name)), None)


class TokenFlops(NamedTuple):
    """The FLOPs of forward and backward for one token, as MFU counts them.

    Matmuls: a multiply and an add per parameter and token in forward, and the same again in backward for each of the
    two gradients, so 6 per parameter. The output projection counts, tied or not; the embedding, which is a lookup,
    norms, RoPE and the loss do not.

    Attention: per layer and token, Q Kᵀ and P V are each 2·S·H·E in forward, together 4·S·H·E over the full square; a
    causal token attends to half of it on average, 2·S·H·E; with backward three times as much, 6·S·H·E. Tokens outside a
    layer's window, or in another document, do not count (`mean_attended` in the place of S).
    """

    matmul: int  # of the linear layers
    per_attended: int  # for each token that `twice_attended` counts in a layer

    def total(self, attended: float) -> float:
        """Return all of them, where `mean_attended` counts so many."""
        return self.matmul + self.per_attended * attended


def token_flops_of(model: nn.Module, dims: ModelDims) -> TokenFlops:
    """Count what a token costs apart from how many others it attends to; the model may be on the meta device."""
    matmul_parameters = sum(m.used_by_a_token for m in model.modules() if isinstance(m, Projection))
    return TokenFlops(6 * matmul_parameters, 6 * dims.n_heads * dims.head_width)


def windows_of(model: nn.Module) -> list[int]:
    """Return the window of each layer's attention; 0: all tokens."""
    return [m.window for m in model.modules() if isinstance(m, CausalAttention)]


def mean_attended(windows: list[int], lengths: np.ndarray) -> float:
    """Return twice the tokens that a token sees in its document on average, its own counted by half, over all layers'
    windows; `lengths` are the documents' tokens, [n].
    """
    total = sum(windows.count(window) * twice_attended(lengths, window) for window in set(windows))
    return total / float(lengths.sum())


def _measured_flops(device: torch.device, dtype: torch.dtype) -> tuple[float, int]:
    """Time square matmuls, as large as the time allows, and take the fastest."""
    best, size = 0.0, 256
    _timed_matmul(torch.ones(size, size, device=device, dtype=dtype))  # loads the matmul library, which takes longer
    end = time.perf_counter() + _MEASURE_S
    while True:
        a = torch.ones(size, size, device=device, dtype=dtype)
        _timed_matmul(a)  # picks the kernel of this size
        seconds = min(_timed_matmul(a) for _ in range(_REPEATS))
        best = max(best, 2 * size**3 / seconds)
        # The next size takes 8 times as long.
        if size == 8192 or time.perf_counter() + 8 * (1 + _REPEATS) * seconds > end:
            return best, size
        size *= 2


def _timed_matmul(a: torch.Tensor) -> float:
    """Seconds of `a @ a.T`, as a linear layer multiplies: a CPU's bfloat16 is slow otherwise."""
    if a.device.type != "cpu":
        torch.accelerator.synchronize(a.device)
    start = time.perf_counter()
    torch.mm(a, a.t())
    if a.device.type != "cpu":
        torch.accelerator.synchronize(a.device)
    return time.perf_counter() - start
