"""Choose whether a collective matmul on a GPU runs as a fused kernel or as its definition, and count the choices.

All ranks of a group make the same choice. It depends on shapes and dtypes, which ranks compare at the first call of a
kind, on the group, and on the GPUs of all its ranks. Choices are counted by shape, for the receipt.

`MatmulOperator._choose` decides. The reason not to fuse a call can be the GPUs (`no_peer_access`), its shapes and
dtypes (`unsupported`), or a difference between ranks (`agree`). `parallel/tensor.py::ParallelLinear.fused` decides
whether a layer calls collective matmuls at all.
"""

import functools
import importlib.util
import logging
import os
import socket
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from titanlite.device import Device
from titanlite.kernels.collectives import Group, named_group, process_group_of
from titanlite.kernels.operators import differentiate, operator
from titanlite.kernels.products import EXPECTED, NOTHING, GatherCall, ScatterCall

C = TypeVar("C", GatherCall, ScatterCall)


class Lowered(NamedTuple):
    """The key by which calls of collective matmuls are counted."""

    op: str  # "all_gather_matmul" or "matmul_reduce_scatter"
    shapes: str  # of the operands
    reason: str | None = None  # why it was not fused; None: it was fused
    expected: bool = False  # rightly not fused: there was nothing to fuse, or fusing is slower


lowered: Counter[Lowered] = Counter()
"""Number of calls of each collective matmul that this process has run on its GPU."""

_logger = logging.getLogger(__name__)

implementations: dict[object, tuple[Lowered, Callable[..., Any]]] = {}
"""Implementations of validated calls: key → (key in `lowered`, implementation)."""


@dataclass(frozen=True)
class MatmulOperator(Generic[C]):
    """The functions that make up a collective matmul."""

    name: str
    schema: str  # the operator's signature
    call: Callable[..., C]  # the operator's arguments → one value
    mistakes: Callable[[C], Iterator[str]]  # messages about operands that do not fit, the most basic one first
    plain: Callable[[C], Any]  # the definition in plain torch, for calls that were checked
    in_words: Callable[[C], str]  # describes exactly what must be equal on all ranks: a call is new to all or to none
    shapes: Callable[[C], tuple[str, str]]  # of operands that may differ between ranks; and of all, to count calls
    unsupported: Callable[[C, int], str | None]  # (call, ranks) → the reason not to fuse the call, or None
    plan: Callable[[C, Group], Any]  # plans the kernels of calls with these shapes, dtypes and strides
    launch: Callable[[Any, C], Any]  # (plan, call) → results
    save: Callable[[Any, C, Any], None]  # (ctx, call, results), see `operators.differentiate`
    backward: Callable[[Any, Any], Any]  # see `operators.differentiate`
    flops: Callable[..., int]  # see `operators.operator`

    def register(self) -> None:
        """Register the operator and its gradient with torch."""
        op = operator(self.name, self._on_gpus, self.schema, flops=self.flops)(self._definition)
        differentiate(
            op,
            lambda *arguments: [t for t in self.call(*arguments).operands if t is not None],
            lambda ctx, arguments, results: self.save(ctx, self.call(*arguments), results),
            self.backward,
        )

    def _definition(self, *arguments: Any) -> Any:
        call = self.call(*arguments)
        self._check(call)
        return self.plain(call)

    def _check(self, call: C) -> None:
        if mistake := next(self.mistakes(call), None):
            raise ValueError(f"{self.name}: {mistake}")

    def _on_gpus(self, *arguments: Any) -> Any:
        """Run the operator on a GPU: fused where that is possible, its definition otherwise."""
        call = self.call(*arguments)
        process_group = process_group_of(call.group)
        tensors = tuple([None if t is None else (t.shape, t.stride(), t.dtype) for t in call.operands])
        key = self.name, process_group, tensors, call.options
        known = implementations.get(key)
        if known is None:
            known = implementations[key] = self._choose(call)
        row, run = known
        lowered[row] += 1
        return run(call)

    def lowered_as(self, call: C, reason: str | None) -> Lowered:
        """Return the key in `lowered` of a call that is not fused for `reason`; of a fused call if it is None."""
        return Lowered(self.name, self.shapes(call)[1], reason, reason in EXPECTED)

    def _choose(self, call: C) -> tuple[Lowered, Callable[[C], Any]]:
        """Validate a call and choose its implementation with all ranks. Rank 0 warns of reasons not in `EXPECTED`."""
        self._check(call)
        own, _ = self.shapes(call)
        group = named_group(call.group)
        reason = no_peer_access(call.group) or self.unsupported(call, group.size)
        reason = agree(self.name, call.group, self.in_words(call), own, reason)
        row = self.lowered_as(call, reason)
        if reason is None:
            return row, functools.partial(self.launch, self.plan(call, group))
        if not row.expected and group.rank == 0:
            _logger.warning("%s of %s is not fused: %s", self.name, row.shapes, reason)
        return row, self.plain


_agreed: dict[tuple[dist.ProcessGroup, str, str, str], str | None] = {}


def agree(op: str, group: str, what: str, own: str, reason: str | None) -> str | None:
    """Decide with all ranks of a group whether calls of a kind are fused. Collective at the first call of the kind.

    Ranks that send different shapes would wait for each other in vain, or read the wrong places of each other's memory.
    Operands that are not sent may differ, such as a weight that does not divide evenly; then no rank uses kernels. One
    case is not covered: if only some ranks have had a call of these shapes before, they do not communicate again, and
    the other ranks wait for them until the group's timeout.

    Args:
        op, group: names of the operator and of the process group.
        what: describes exactly what must be equal on all ranks, so that a call is new to all or to none.
        own: shapes of this rank's operands that may differ between ranks.
        reason: why this rank cannot fuse the call, or None.

    Returns:
        The reason why no rank fuses the call, or None.

    Raises:
        ValueError: the ranks' calls differ; every rank raises it.
        RuntimeError: the call is new, and a CUDA graph is being captured.
    """
    process_group = process_group_of(group)
    key = process_group, op, what, own
    if key in _agreed:
        return _agreed[key]
    gathered = _gather_objects(process_group, (f"{op}: {what}", own, reason))
    call, first, _ = gathered[0]
    for rank, (theirs, _, _) in enumerate(gathered):
        if theirs != call:
            raise ValueError(
                f"group {group}, a call that is new to its ranks\n"
                f"  rank 0  {call}\n"
                f"  rank {rank}  {theirs}\n"
                "  want: equal shapes and dtypes on all ranks, in the same order of calls\n"
                "  fix:  pad what is shorter on some ranks"
            )
    reasons = [theirs for _, _, theirs in gathered if theirs]
    unequal = [f"{first} on rank 0 and {its} on rank {r}" for r, (_, its, _) in enumerate(gathered) if its != first]
    _agreed[key] = min([r for r in reasons if r != NOTHING] or reasons or unequal, default=None)
    return _agreed[key]


def _gather_objects(group: dist.ProcessGroup, own: Any) -> list[Any]:
    """Gather one object from each rank of a group, in the order of ranks. Collective."""
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "a collective matmul that is new to the ranks, while a CUDA graph is captured: they have to talk about it "
            "first; run it once before the capture"
        )
    gathered: list[Any] = [None] * group.size()
    dist.all_gather_object(gathered, own, group=group)
    return gathered


def no_shared_memory(group: str, operator: int, n_slots: int, device: Device | None = None) -> str | None:
    """Return the reason why the ranks of a group cannot use symmetric memory, or None. Collective on the first call.

    If nothing else prevents it, the ranks try to allocate such memory, since the system may refuse. For `operator` and
    `n_slots` see `device.channel.channel`. `device`: the device that the run is built for; None: this process's GPU.
    """
    process_group = process_group_of(group)
    if device is not None and device.is_named:
        return device.obstacle_between(dist.get_process_group_ranks(process_group))
    return no_peer_access(group) or _try_to_share(process_group, group, operator, n_slots)


@functools.cache
def _try_to_share(process_group: dist.ProcessGroup, group: str, operator: int, n_slots: int) -> str | None:
    from titanlite.kernels.device.channel import channel  # slow to import, and needs Triton

    reason = None
    try:
        channel(group, operator, n_slots)
    except (torch.OutOfMemoryError, dist.DistError):  # no refusal by the system
        raise
    except RuntimeError as error:
        reason = f"symmetric memory: {next(iter(str(error).splitlines()), 'refused')}"
    return next(filter(None, _gather_objects(process_group, reason)), None)


def no_peer_access(group: str) -> str | None:
    """Return why the ranks of a group cannot read each other's memory, or None. Collective on the first call."""
    return _ask_peers(process_group_of(group))


@functools.cache
def _ask_peers(group: dist.ProcessGroup) -> str | None:
    own = torch.cuda.current_device()
    reason = None
    if importlib.util.find_spec("triton") is None:
        reason = "no Triton on"
    elif torch.cuda.get_device_capability() != (9, 0):
        reason = f"compute capability {'.'.join(map(str, torch.cuda.get_device_capability()))}, not 9.0, on"
    elif not all(torch.cuda.can_device_access_peer(own, i) for i in range(torch.cuda.device_count()) if i != own):
        reason = "no peer access between the GPUs of"
    may_share = os.environ.get("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES") == "1"
    host = socket.gethostname(), os.environ.get("SLURM_NODEID")
    reasons, hosts, numbers, shared = zip(*_gather_objects(group, (reason, host, own, may_share)), strict=True)
    for rank, reason in enumerate(reasons):
        if reason:
            return f"{reason} rank {rank}"
    if len(set(hosts)) > 1:
        return "ranks on several hosts"
    if len(set(numbers)) < len(numbers) and not all(shared):
        seen = ", ".join(map(str, numbers))
        return f"ranks with one number for their GPUs, {seen}: let each see all of the host (CUDA_VISIBLE_DEVICES)"
    return None
