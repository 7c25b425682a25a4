"""The reduction of a unit's gradients: over the ranks that shard its weights, then over replicas.

A collective of the group sums in the dtype of `training.mixed_precision_reduce`. Gradients are cast to it, and put in
the order of ranks, by the same kernel. Copy engines send gradients from where autograd has left them, and sum in
float32; only small ones, or those whose rows the ranks cannot share evenly, are put in order before.

A gradient that is sent is kept until the compute stream has waited for the sum, which it does when the next unit is
reduced, as FSDP2 does: one reduction is in flight. Of sums that replicas add up, two are.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.profiler import record_function

from titanlite.kernels.chunk_cat import chunk_cat

TOGETHER = 2**17
"""Bytes of a rank's part of a gradient. Copy engines send smaller ones together."""

SUMS_OF_REPLICAS = 2
"""Units whose sums replicas add up at a time. The compute stream waits for the first before one more is reduced."""

_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor  # see `_all_gather`


class Reduction:
    """Reduces gradients of all units of a model.

    Args:
        follows: whether sums, the gradients, are allocated in memory of the compute stream, where activations were
            freed. This is safe without `record_stream`: the reducing streams have waited for the compute stream when
            the sum is allocated, and the compute stream waits for them before the optimizer's step, after which the sum
            is freed. It would not be safe for a sum that is cast, or added to a gradient: that is freed before it is
            read.
    """

    def __init__(self, follows: bool) -> None:
        self._follows = follows
        self._sent: list[Tensor] = []  # by the reduction in flight
        self._ended: Any = None  # event after the sum in flight
        # Sums that replicas add up on another stream than that of their memory, each with an event after that.
        self._summed: list[tuple[Tensor, Any]] = []
        self._streams: list[Any] = []  # that have reduced

    def __call__(self, unit: Any, gradients: dict[FSDPParam, Tensor]) -> None:
        """Add the sum over all data-parallel ranks of each gathered weight's gradient to its master's gradient.

        `unit`: a `PlacedGroup`.
        """
        handle, context, arena = unit.device_handle, unit.comm_ctx, unit.arena
        compute, stream, last = handle.current_stream(), context.reduce_scatter_stream, context.reduce_scatter_stream
        if self._ended is not None:
            compute.wait_event(self._ended)
        if len(self._summed) == SUMS_OF_REPLICAS:
            compute.wait_event(self._summed[0][1])
            del self._summed[0]
        self._sent = []  # before what is sent next takes memory
        ranks, params = arena.group.size(), list(gradients)
        if arena.reduce is not None:
            params, self._sent = in_pieces(gradients, ranks)
        else:
            dtype = next(iter(gradients.values())).dtype if arena.by_copy_engines else unit.mp_policy.reduce_dtype
            n = sum(param.padded_sharded_param_size.numel() for param in params)
            self._sent = [torch.empty(ranks, n, dtype=dtype, device=unit.device)]
            chunk_cat(list(gradients.values()), ranks, self._sent[0])
        gradients.clear()
        sizes = [param.padded_sharded_param_size.numel() for param in params]
        stream.wait_stream(compute)
        with record_function(unit._with_fqn("FSDP::post_backward_reduce")), torch.no_grad():
            with handle.stream(stream):
                if arena.reduce is not None:
                    total = self._allocate(sum(sizes), torch.float32, unit.device)
                    arena.reduce(self._sent, total)
                elif ranks == 1:
                    total = self._sent[0].view(-1)
                else:
                    total = self._allocate(sum(sizes), self._sent[0].dtype, unit.device)
                    _reduce_scatter(total, self._sent[0].view(-1), group=arena.group)
                    total = total.float() if arena.by_copy_engines else total
                self._ended = stream.record_event()
            if unit._is_hsdp:
                last = context.all_reduce_stream
                last.wait_stream(stream)
            with handle.stream(last):
                if unit._is_hsdp:
                    dist.all_reduce(total, group=unit._all_reduce_process_group)
                _add_to_masters(params, total.to(params[0].sharded_param.dtype).split(sizes))
                if unit._is_hsdp and not self._follows:  # else it is the gradient
                    self._summed.append((total, last.record_event()))
        self._streams += [each for each in (stream, last) if each not in self._streams]

    def finish(self, compute: Any) -> None:
        """Let a stream wait for all sums, and free what was kept for them."""
        for stream in self._streams:
            compute.wait_stream(stream)
        self._streams, self._sent, self._summed, self._ended = [], [], [], None

    def _allocate(self, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        if not self._follows:
            return torch.empty(size, dtype=dtype, device=device)
        is_cuda, settings = device.type == "cuda", cast("Any", torch.utils.deterministic)
        # Deterministic mode would fill the memory on this stream, while FSDP's stream writes the sum.
        fills, settings.fill_uninitialized_memory = settings.fill_uninitialized_memory, False
        with torch.cuda.stream(torch.cuda.default_stream(device)) if is_cuda else nullcontext():
            memory = torch.empty(size, dtype=dtype, device=device)
        settings.fill_uninitialized_memory = fills
        return memory


def in_pieces(gradients: dict[FSDPParam, Tensor], ranks: int) -> tuple[list[FSDPParam], list[Tensor]]:
    """Return parameters in another order, and tensors [ranks, n] that have the ranks' parts of gradients in it."""
    is_whole = {
        param: len(x) % ranks == 0 and x.is_contiguous() and x.nbytes >= ranks * TOGETHER
        for param, x in gradients.items()
    }
    params = sorted(gradients, key=is_whole.__getitem__, reverse=True)
    pieces = [gradients[param].view(ranks, -1) for param in params if is_whole[param]]
    if rest := [param for param in params if not is_whole[param]]:
        n = sum(param.padded_sharded_param_size.numel() for param in rest)
        pieces.append(gradients[rest[0]].new_empty(ranks, n))
        chunk_cat([gradients[param] for param in rest], ranks, pieces[-1])
    return params, pieces


def _add_to_masters(params: Sequence[FSDPParam], sums: Sequence[Tensor]) -> None:
    """Add sums, padded and flat, to the gradients of master weights."""
    for param, padded in zip(params, sums, strict=True):
        own = padded[: param.sharded_size.numel()].view(param.sharded_size)
        if param.sharded_param.grad is None:
            param.sharded_param.grad = param.to_sharded_dtensor(own)
        else:
            cast("Any", param.sharded_param.grad)._local_tensor += own
