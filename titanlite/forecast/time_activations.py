"""How long it takes to compute the parts of a block again, on this device and with this run's shapes and arithmetic.

Each part is run by itself, as the block would run it: a matmul through its layer's own arithmetic, a collective among
the same ranks, attention by the kernel that torch chooses; what is elementwise together, and compiled if blocks are. It
is run as forward runs it, though backward hides a little of it: it fuses elementwise work with its own, and collectives
with FSDP's. A second or two in all, and ten more to compile.
"""

import copy
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titanlite.activation_checkpoint.operations import FUSED, GATHER, SCATTER
from titanlite.float8.weight import local_data
from titanlite.forecast.activation_bytes import Activation, Layout
from titanlite.forecast.choose_save_list import Times, dear
from titanlite.kernels.collectives import gather_tokens, scatter_tokens
from titanlite.kernels.geglu import geglu
from titanlite.kernels.lowering import lowered
from titanlite.kernels.norm_rope import norm_rope
from titanlite.kernels.rope import rope
from titanlite.kernels.swiglu import swiglu
from titanlite.models.layers import CausalAttention, Linear, RMSNorm, add_bias
from titanlite.parallel.tensor import ColumnParallelLinear, ParallelLinear

_REPEATS = 5
_GATES = {"swiglu": swiglu, "geglu": geglu, "gelu": partial(F.gelu, approximate="tanh")}


def time_block(block: nn.Module, layout: Layout, device: torch.device) -> Times:
    """Time the parts of a block, and attention with every window that the model has.

    Every rank calls it: collectives are among its parts.

    Args:
        block: on the meta device, split and in its arithmetic; it is not changed.
        layout: of this rank.
        device: where to run.

    Returns:
        Seconds; each the median of five.
    """
    dtype = {2: torch.bfloat16, 4: torch.float32}[layout.itemsize]
    times = _time_parts(_materialised(block, device, dtype), layout, device, dtype)
    lowered.clear()  # it counts what training runs
    if device.type == "cuda":  # nothing of it counts in the peak of the run
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    return times


def _time_parts(block: nn.Module, layout: Layout, device: torch.device, dtype: torch.dtype) -> Times:
    dims, M, t, S, E = layout.dims, layout.tokens, layout.tensor_parallel, layout.seq_len, layout.dims.head_width
    H, K = dims.n_heads // t, dims.n_kv_heads // t

    def random(*shape: int) -> Tensor:  # with a gradient, as recomputation is part of backward
        return torch.randn(*shape, device=device, dtype=dtype, requires_grad=True)

    q, k, v = random(M // S, S, H, E), random(M // S, S, K, E), random(M // S, S, K, E)

    def attend(window: int) -> object:
        return CausalAttention(window)(*(heads.transpose(1, 2) for heads in (q, k, v)))

    found: dict[Activation, float] = {}
    for window in sorted(set(dims.windows)):
        listed = [a for rule in dear(layout, window).values() for a in rule]
        found |= {a: _seconds(partial(attend, window), device) for a in listed if not a.layer}
        parts = [a for a in listed if a.layer and a not in found]
        found |= {a: _seconds(_part(block, a.op, a.layer, M, random), device) for a in parts}

    angles, facts = torch.randn(S, E // 2, device=device), layout.block
    stream, attended, fed = (random(M // t, dims.dim) for _ in range(3))
    wqkv, _, w13, w2 = facts.layers
    widths = dict.fromkeys(("attention_norm", "ffn_norm", "post_attention_norm", "post_ffn_norm"), dims.dim)
    widths |= {"attention.q_norm": E, "attention.k_norm": E}
    named = dict(block.named_modules())
    norms: dict[str, Any] = {  # a model file's own block may call one otherwise, and need not have all
        name: named.get(name) or RMSNorm(width, dims.norm_eps).to(device, dtype) for name, width in widths.items()
    }
    # Backward of a joined feed-forward gates anew even if all is kept; eager mode does so once more.
    gated = [] if layout.compiled and layout.is_joined(w2) else [random(M, facts.gate_width * dims.ffn_dim // t)]
    projected = random(M if facts.qk_norms else 0, (H + 2 * K) * E)
    biased = [(random(M, len(bias)), bias)] if (bias := _linear(block, wqkv).bias) is not None else []

    @torch.no_grad()
    def elementwise() -> object:
        heads: Sequence[Tensor] = q, k
        if facts.qk_norms:
            scales = norms["attention.q_norm"].scale(), norms["attention.k_norm"].scale()
            heads = norm_rope(projected, *scales, angles, angles, H // K, dims.norm_eps)
        elif facts.is_rotary:
            heads = [rope(x.flatten(0, 1), angles, angles) for x in heads]
        total = stream + (norms["post_attention_norm"](attended) if facts.post_norms else attended)
        normed = [norms["attention_norm"](stream), total, norms["ffn_norm"](total)]
        if facts.post_norms:
            normed.append(norms["post_ffn_norm"](fed))
        gates = [_GATES[facts.gate](add_bias(x, _linear(block, w13).bias)) for x in gated]
        return heads, [add_bias(x, bias) for x, bias in biased], normed, gates

    return Times(found, _seconds(torch.compile(elementwise) if layout.compiled else elementwise, device))


def _materialised(block: nn.Module, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """A copy with weights of its own: plain tensors, as FSDP leaves them for compute."""
    weights: dict[int, object] = {}
    for parameter in block.parameters():
        local = torch.empty(local_data(parameter).shape, device=device, dtype=dtype).normal_(0, 0.02)
        weights[id(parameter)] = nn.Parameter(local)
    arithmetic = [module.matmul for module in block.modules() if isinstance(module, Linear)]
    return copy.deepcopy(block, {**weights, **{id(matmul): matmul for matmul in arithmetic}})


def _part(block: nn.Module, op: str, name: str, M: int, random: Callable[..., Tensor]) -> Callable[[], object]:
    """One operation of a linear layer, on random input."""
    layer = _linear(block, name)
    N, K = layer.weight.shape
    if isinstance(layer, ParallelLinear):
        rows = M // layer.group.size
        if op in FUSED:
            x = random(rows if isinstance(layer, ColumnParallelLinear) else M, K)
            return lambda: layer(x)
        if op == GATHER:
            x = random(rows, K)
            return lambda: gather_tokens(x, layer.group)
        if op == SCATTER:
            x = random(M, N)
            return lambda: scatter_tokens(x, layer.group)
    x = random(M, K)
    return lambda: layer.matmul(x, layer.weight)


def _linear(block: nn.Module, name: str) -> Linear:
    layer = block.get_submodule(name)
    assert isinstance(layer, Linear)  # noqa: S101
    return layer


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
