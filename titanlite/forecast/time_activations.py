"""Time the recomputation of a block's activations on this device, with the run's shapes and dtypes.

Each expensive operation of the trace runs by itself, on random operands of its shapes: a product with its own kernel, a
collective among the run's ranks. The time of elementwise work is that of a block's forward less the sum of these. All
this takes a second or two, and ten more to compile.
"""

import copy
import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from titanlite.activation_checkpoint import operations as ops
from titanlite.activation_checkpoint.operations import CLASSES
from titanlite.data.batches import sequences_of_samples
from titanlite.data.context_split import ContextGroup
from titanlite.float8.weight import local_data
from titanlite.forecast.activation_cost import Activation, activations
from titanlite.forecast.choose_save_list import RecomputeTimes, expensive
from titanlite.forecast.traced_block import Shape
from titanlite.forecast.traced_run import TracedRun
from titanlite.kernels.context_attention import exchanged
from titanlite.kernels.lowering import lowered
from titanlite.models.layers import CausalAttention, Linear, Sequences
from titanlite.observe.memory import restart_peak

_REPEATS = 5


def time_block(block: nn.Module, run: TracedRun, context: ContextGroup | None, device: torch.device) -> RecomputeTimes:
    """Time the expensive operations of all kinds of blocks, and a block's elementwise work: medians of five runs.

    Every rank must call this, as it times collectives. `block` is the model's first block on the meta device, split for
    this rank and converted to float8; it is not changed. `context` are the context-parallel ranks, if more than one.
    """
    sequences = context and sequences_of_samples(run.tokens * context.size, run.seq_len, context, device)
    listed = [activation for of_rule in expensive(run).values() for activation in of_rule]
    found = {a: _seconds(_operation(a, run.expert_parallel, device, sequences), device) for a in listed}
    first = run.blocks[0]
    dtype = {2: torch.bfloat16, 4: torch.float32}[run.itemsize]
    whole = _materialised(block, device, dtype)
    args, kwargs = _random(first.given_to, device, sequences)
    if run.compiled:
        whole.compile()

    @torch.no_grad()
    def forward() -> object:
        return whole(*args, **kwargs)

    parts = sum(found.get(a, 0.0) for a in activations(first))
    elementwise = max(_seconds(forward, device) - parts, 1e-9)
    lowered.clear()  # this and the next count calls in training alone
    exchanged.clear()
    restart_peak(device)
    return RecomputeTimes(found, elementwise)


def _operation(
    activation: Activation, expert_ranks: int, device: torch.device, sequences: Sequences | None
) -> Callable[[], object]:
    """Return a call of the operation on random operands; attention to whole samples uses this device's kernel."""
    args, kwargs = operands(activation, expert_ranks, device, sequences)
    if activation.op in CLASSES["attention"] and activation.op not in ops.OWN_ATTENTION:
        attend, of = CausalAttention(), args[:3]
        return lambda: attend(*of)
    if activation.op in CLASSES["communication"]:
        return lambda: torch.ops._c10d_functional.wait_tensor(activation.call[0](*args, **kwargs))
    return lambda: activation.call[0](*args, **kwargs)


def operands(
    activation: Activation, expert_ranks: int, device: torch.device, sequences: Sequences | None = None
) -> tuple[list[Any], dict[str, Any]]:
    """Make an operation's operands, (args, kwargs): random numbers, and indices like those of an average micro-step.

    As many rows of experts hold a token as in the mean of P = `expert_ranks` ranks. `sequences` are those of a
    context-parallel rank.
    """
    _, args, kwargs = activation.call
    args, kwargs = _random((args, kwargs), device)
    if activation.op == ops.PIECE_ATTENTION and args[3] is not None:
        of = sequences_of_samples(len(args[3]), args[-2], None, device)
        args = [*args[:3], of.starts, *of.bounds[0], *args[6:]]
    if activation.op == ops.CONTEXT_ATTENTION and sequences is not None:
        window, of = args[-1], sequences
        args = [*args[:3], of.starts, *of.bounds[window], of.places, *of.exchanges[window], of.group, *args[-2:]]
    if activation.op in CLASSES["experts"]:
        rows = activation.flops // (2 * math.prod(args[1].shape[1:]))
        args = [_even_groups(a, rows) if _is_index(a) else a for a in args]
    if activation.op in CLASSES["dispatch"]:
        is_window = activation.op in ops.WINDOWS  # argument 5 are slots of all windows, 6 and 7 the offsets of groups
        slots = len(args[5]) if is_window else None
        if activation.op == ops.GATHER_ROWS:
            slots = int(len(args[0]) * args[2])
        args = [_in_order(a, expert_ranks, slots) if _is_places(a, activation.op) else a for a in args]
        if is_window:
            args[6] = _even_groups(args[6], len(args[5]) // expert_ranks)
            args[7] = args[6].cpu()
    return [*args], kwargs


def _is_places(argument: object, op: str) -> bool:
    """Return whether an argument is a tensor of row or slot numbers, each at most once, and not of chosen experts."""
    return _is_index(argument) and (argument.dim() == 1 or op not in ops.EXCHANGES)  # type: ignore[attr-defined]


def _in_order(places: Tensor, expert_ranks: int, slots: int | None) -> Tensor:
    """Return a slot for each row: every P-th of the slots, as many as rows if None, then -1; P = `expert_ranks`."""
    every = torch.arange(places.numel(), dtype=places.dtype, device=places.device) * expert_ranks
    return torch.where(every < (slots or places.numel()), every, -1).view_as(places)


def _is_index(argument: object) -> bool:
    return isinstance(argument, Tensor) and argument.dtype == torch.int32


def _even_groups(offsets: Tensor, n_rows: int) -> Tensor:
    bounds = torch.arange(len(offsets), device=offsets.device) * n_rows // (len(offsets) - 1)
    return bounds.to(offsets.dtype)


def _random(shapes: Any, device: torch.device, sequences: Sequences | None = None) -> Any:
    def tensor(shape: object) -> object:
        if isinstance(shape, Sequences) and sequences is not None:
            return sequences
        if isinstance(shape, Sequences):
            starts: Any = shape.starts
            if starts is None:
                return Sequences(shape.longest)
            return sequences_of_samples(starts.size[0], shape.longest, None, device)
        if not isinstance(shape, Shape):
            return device if isinstance(shape, torch.device) else shape
        memory = torch.empty_strided(shape.size, shape.stride, dtype=shape.dtype, device=device)
        if not shape.dtype.is_floating_point:
            return memory.zero_()
        return memory.copy_(torch.randn(shape.size, device=device))

    return pytree.tree_map(tensor, shapes, is_leaf=lambda x: isinstance(x, (Shape, Sequences)))


def _materialised(block: nn.Module, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """Copy a block to a device with random weights: plain tensors, like those that FSDP gathers for compute."""
    memo: dict[int, object] = {}
    for parameter in block.parameters():
        local = torch.empty(local_data(parameter).shape, device=device, dtype=dtype).normal_(0, 0.02)
        memo[id(parameter)] = nn.Parameter(local)
    memo.update((id(buffer), torch.zeros_like(buffer, device=device)) for buffer in block.buffers())
    memo.update((id(m.matmul), m.matmul) for m in block.modules() if isinstance(m, Linear))
    return copy.deepcopy(block, memo)


def _seconds(action: Callable[[], object], device: torch.device) -> float:
    """Return the median seconds of five runs, after two runs for compilation and choice of kernels."""
    for _ in range(2):
        action()
    return statistics.median(_time_once(action, device) for _ in range(_REPEATS))


def _time_once(action: Callable[[], object], device: torch.device) -> float:
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
