"""Determine both parts of MFU (model FLOPs utilization): the FLOPs per token, and the peak FLOPs of the device.

MFU = tokens per second and device × FLOPs per token / peak FLOPs per second. The peak is always that of dense bf16,
also for float8 recipes, so that MFU compares runs of one model by speed alone. Runs in float8 may exceed 100 %. FLOPs
of recomputing activations do not count.

The peaks are the dense figures of the vendors' data sheets. NVIDIA prints most figures "with sparsity"; these are
halved here. Boards with the same chip differ in clocks and power (H100 SXM, PCIe, NVL), so the table is searched by the
full device name. CPUs and devices that are not in the table are measured with a matmul. The measured rate is below the
true peak, so MFU comes out too high. `peak_flops` also returns which source it used.
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

# (pattern of the device name, FLOPs per second). The first match wins, so special boards precede general ones.
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
_AT_LEAST, _LARGEST = 1024, 8192  # sizes of matmuls
_MEASURE_S, _REPEATS = 0.3, 5  # seconds for all sizes; runs per size, of which the fastest counts


def peak_flops(device: torch.device, dtype: torch.dtype = torch.bfloat16) -> tuple[float, str]:
    """Return a device's peak rate of matmul FLOPs: in dense bf16 by its data sheet, else measured with `dtype`.

    Returns:
        FLOPs per second, and a text for the log that names the source.
    """
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type.upper()
    known = None if device.type == "cpu" else dense_bf16_flops(name)
    if known is not None:
        return known, f"dense bf16 in the data sheet of {name}"
    flops, size = _measured_flops(device, dtype)
    return flops, f"measured with a {size}×{size} {str(dtype).removeprefix('torch.')} matmul on this {name}"


def dense_bf16_flops(name: str) -> float | None:
    """Look up the dense bf16 FLOPs per second of a device by its name; None if the table of data sheets lacks it.

    Slices of a GPU (MIG) and other chips of similar name (RTX 4090 Laptop, 4090 D, 3090 Ti) would match an entry with
    another peak. They count as unknown.
    """
    if re.search(r"\b(MIG|Laptop|D|Ti)\b", name):
        return None
    return next((flops for pattern, flops in _DENSE_BF16 if re.search(rf"\b(?:{pattern})\b", name)), None)


class TokenFlops(NamedTuple):
    """The FLOPs of one token in forward and backward, as MFU counts them.

    Matmuls: a multiply and an add per parameter and token in forward, and the same again in backward for each of the
    two gradients, so 6 per parameter. The output projection counts, tied or not; the embedding, which is a lookup,
    norms, RoPE and the loss do not.

    Attention, with S tokens per sequence and H heads of width E: per layer and token, Q Kᵀ and P V take 2·S·H·E each in
    forward, 4·S·H·E together. A causal token attends to half of the sequence on average, so 2·S·H·E remain, and 6·S·H·E
    with backward. Tokens outside a layer's window or in another document do not count, so `mean_attended` replaces S.
    """

    matmul: int  # FLOPs of the linear layers
    per_attended: int  # FLOPs of attention per unit of `mean_attended`

    def total(self, attended: float) -> float:
        """Return all FLOPs of a token; `attended` is a result of `mean_attended`."""
        return self.matmul + self.per_attended * attended


def token_flops_of(model: nn.Module, dims: ModelDims) -> TokenFlops:
    """Return the FLOPs of a token in a model, which may be on the meta device."""
    matmul_parameters = sum(m.used_by_a_token for m in model.modules() if isinstance(m, Projection))
    return TokenFlops(6 * matmul_parameters, 6 * dims.n_heads * dims.head_width)


def windows_of(model: nn.Module) -> list[int]:
    """Return the attention window of each layer, in tokens; 0 stands for all tokens."""
    return [m.window for m in model.modules() if isinstance(m, CausalAttention)]


def mean_attended(windows: list[int], lengths: np.ndarray) -> float:
    """Return twice the mean number of tokens that a token attends to in its document, summed over layers. The token
    itself counts by half. `windows`: attention window of each layer; `lengths`: tokens of each document, [n].
    """
    total = sum(windows.count(window) * twice_attended(lengths, window) for window in set(windows))
    return total / float(lengths.sum())


def _measured_flops(device: torch.device, dtype: torch.dtype) -> tuple[float, int]:
    """Time growing square matmuls within `_MEASURE_S`; return the highest FLOPs per second and the last size."""
    best, size = 0.0, 256
    _timed_matmul(torch.ones(size, size, device=device, dtype=dtype))  # loads the matmul library, which takes longer
    end = time.perf_counter() + _MEASURE_S
    while True:
        a = torch.ones(size, size, device=device, dtype=dtype)
        _timed_matmul(a)  # untimed: picks the kernel of this size
        seconds = min(_timed_matmul(a) for _ in range(_REPEATS))
        best = max(best, 2 * size**3 / seconds)
        # The next size takes 8 times as long. On a busy machine a small one takes as long as its threads wait.
        if size == _LARGEST or (size >= _AT_LEAST and time.perf_counter() + 8 * (1 + _REPEATS) * seconds > end):
            return best, size
        size *= 2


def _timed_matmul(a: torch.Tensor) -> float:
    """Return the seconds of `a @ a.T`, transposed as in a linear layer: bfloat16 on a CPU is slow otherwise."""
    if a.device.type != "cpu":
        torch.accelerator.synchronize(a.device)
    start = time.perf_counter()
    torch.mm(a, a.t())
    if a.device.type != "cpu":
        torch.accelerator.synchronize(a.device)
    return time.perf_counter() - start
