"""How long it takes to compute the parts of a block again, on this device and with this run's shapes and arithmetic.

Each part is run by itself, as the block would run it: a matmul through its layer's own arithmetic, a collective among
the same ranks, attention by the kernel that torch chooses; what is elementwise together, and compiled if blocks are. It
is run as forward runs it, though backward hides a little of it: it fuses elementwise work with its own, and collectives
with FSDP's. A second or two in all, and ten more to compile.
"""

import copy
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from titanlite.config.recipe_schema import ModelRecipe
from titanlite.float8.weight import local_data
from titanlite.kernels.collectives import gather_tokens, scatter_tokens
from titanlite.kernels.lowering import lowered
from titanlite.kernels.rope import rope
from titanlite.kernels.swiglu import swiglu
from titanlite.models.layers import Linear
from titanlite.models.llama3 import Block
from titanlite.parallel.activation_bytes import LAYERS, Layout
from titanlite.parallel.choose_save_list import Times, dear
from titanlite.parallel.save_rules import CLASSES, FUSED
from titanlite.parallel.tensor import ColumnParallelLinear, ParallelLinear

_REPEATS = 5
_GATHER, _SCATTER = CLASSES["communication"]


def time_block(block: Block, sizes: ModelRecipe, layout: Layout, device: torch.device) -> Times:
    """Time the parts of a block. Every rank calls it: collectives are among its parts.

    Args:
        block: on the meta device, split and in its arithmetic; it is not changed.
        sizes: the model's dimensions.
        layout: the rank's.
        device: where to run.

    Returns:
        Seconds; each the median of five.
    """
    dtype = {2: torch.bfloat16, 4: torch.float32}[layout.itemsize]
    times = _time_parts(_materialised(block, device, dtype), sizes, layout, device, dtype)
    lowered.clear()  # it counts what training runs
    if device.type == "cuda":  # nothing of it counts in the peak of the run
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    return times


def _time_parts(block: Block, sizes: ModelRecipe, layout: Layout, device: torch.device, dtype: torch.dtype) -> Times:
    M, t, S, E = layout.tokens, layout.tensor_parallel, layout.seq_len, sizes.head_width
    H, K = sizes.n_heads // t, sizes.n_kv_heads // t

    def random(*shape: int) -> Tensor:  # with a gradient, as recomputation is part of backward
        return torch.randn(*shape, device=device, dtype=dtype, requires_grad=True)

    q, k, v = random(M // S, S, H, E), random(M // S, S, K, E), random(M // S, S, K, E)

    def attend() -> object:
        return block.attention.attend(*(heads.transpose(1, 2) for heads in (q, k, v)))

    found: dict[tuple[str, str], float] = {}
    for activation in (a for listed in dear(sizes, layout).values() for a in listed):
        action = attend if not activation.layer else _part(block, activation.op, activation.layer, M, random)
        found[activation.op, activation.layer] = _seconds(action, device)

    angles = torch.randn(S, E // 2, device=device)
    stream, attended = random(M // t, sizes.dim), random(M // t, sizes.dim)
    # Backward of a joined feed-forward gates anew even if all is kept; eager mode does so once more.
    gated = [] if layout.compiled and layout.is_joined(LAYERS[-1]) else [random(M, 2 * sizes.ffn_dim // t)]

    @torch.no_grad()
    def elementwise() -> object:
        rotated = [rope(heads.flatten(0, 1), angles, angles) for heads in (q, k)]
        return block.attention_norm(stream), rotated, block.ffn_norm.add(attended, stream), [swiglu(x) for x in gated]

    return Times(found, _seconds(torch.compile(elementwise) if layout.compiled else elementwise, device))


def _materialised(block: Block, device: torch.device, dtype: torch.dtype) -> Block:
    """A copy with weights of its own: plain tensors, as FSDP leaves them for compute."""
    weights: dict[int, object] = {}
    for parameter in block.parameters():
        local = torch.empty(local_data(parameter).shape, device=device, dtype=dtype).normal_(0, 0.02)
        weights[id(parameter)] = nn.Parameter(local)
    arithmetic = [module.matmul for module in block.modules() if isinstance(module, Linear)]
    return copy.deepcopy(block, {**weights, **{id(matmul): matmul for matmul in arithmetic}})


def _part(block: Block, op: str, name: str, M: int, random: Callable[..., Tensor]) -> Callable[[], object]:
    """One operation of a linear layer, on random input."""
    layer = block.get_submodule(name)
    assert isinstance(layer, Linear)  # noqa: S101
    N, K = layer.weight.shape
    if isinstance(layer, ParallelLinear):
        rows = M // layer.group.size
        if op in FUSED:
            x = random(rows if isinstance(layer, ColumnParallelLinear) else M, K)
            return lambda: layer(x)
        if op == _GATHER:
            x = random(rows, K)
            return lambda: gather_tokens(x, layer.group)
        if op == _SCATTER:
            x = random(M, N)
            return lambda: scatter_tokens(x, layer.group)
    x = random(M, K)
    return lambda: layer.matmul(x, layer.weight)


def _seconds(action: Callable[[], object], device: torch.device) -> float:
    """The median of a few runs, after two that compile and choose."""
    for _ in range(2):
        action()
    return statistics.median(_once(action, device) for _ in range(_REPEATS))


def _once(action: Callable[[], object], device: torch.device) -> float:
    if device.type != "cuda":
        begin = time.perf_counter()
        action()
        return time.perf_counter() - begin
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    action()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3
