"""Registration of operators, and the choice of what runs a collective matmul on a GPU, with the record of it.

The choice is equal on all ranks of a group: it depends on shapes and dtypes, which ranks compare when a call is new, on
the group, and on the GPUs of all of its ranks. What was chosen is counted by shape, for the receipt.
"""

import importlib.util
import logging
import os
import socket
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from titanlite.kernels.collectives import named_group
from titanlite.kernels.products import EXPECTED, NOTHING


class Lowered(NamedTuple):
    """The way that one operator ran."""

    op: str  # "all_gather_matmul" or "matmul_reduce_scatter"
    shapes: str  # of its operands
    reason: str | None = None  # why it was not fused, or None
    expected: bool = False  # that is as it should be: there was nothing to fuse, or fusing is slower


lowered: Counter[Lowered] = Counter()
"""All collective matmuls that this process has run on its GPU."""

_logger = logging.getLogger(__name__)

_access: dict[str, tuple[dist.ProcessGroup, str | None]] = {}
_library = torch.library.Library("titanlite", "FRAGMENT")


def define(
    name: str,
    definition: Callable[..., Any],
    on_gpus: Callable[..., Any],
    fake: Callable[..., Any],
    schema: str = "",
) -> None:
    """Make an operator `torch.ops.titanlite.<name>` of a function.

    By hand rather than with custom_op, whose wrappers take longer than the launch.

    Args:
        name: of the operator.
        definition: runs where no other function does.
        on_gpus: runs for CUDA tensors.
        fake: makes results without numbers.
        schema: the operator's signature; the definition's if empty.
    """
    schema = schema or torch.library.infer_schema(definition, mutates_args=())
    torch.library.define(f"titanlite::{name}", schema, tags=torch.Tag.pt2_compliant_tag)
    torch.library.impl(f"titanlite::{name}", "default")(definition)
    torch.library.impl(f"titanlite::{name}", "cuda")(on_gpus)
    torch.library.register_fake(f"titanlite::{name}")(fake)


def differentiate(
    name: str,
    on_gpus: Callable[..., Any],
    tensors: Callable[..., list[Tensor]],
    save: Callable[..., None],
    backward: Callable[..., Any],
) -> None:
    """Give an operator of lists of tensors a gradient.

    By hand too: torch's wrapper walks through all arguments with pytree, which takes as long as two launches; and to be
    dispatched once more takes as long as one.

    Args:
        name: of the operator.
        on_gpus: as it was defined with.
        tensors: its arguments → all tensors among them. What is left out counts as a constant.
        save: (ctx, arguments, results), results as the operator has them; writes down what backward needs.
        backward: (ctx, gradients of the results) → one for each of the `tensors`; `ctx.needs` says which are wanted.
    """
    op = getattr(torch.ops.titanlite, name).default

    def below(keys: torch._C.DispatchKeySet, arguments: tuple[Any, ...]) -> Any:
        keys = keys & torch._C._after_ADInplaceOrView_keyset
        with torch._C._AutoDispatchBelowAutograd():
            if keys.highestPriorityTypeId() == torch._C.DispatchKey.CUDA:  # plain tensors, and no mode is on
                return on_gpus(*arguments)
            return op.redispatch(keys, *arguments)

    def run(ctx: Any, keys: torch._C.DispatchKeySet, arguments: tuple[Any, ...], *own: Tensor) -> Any:
        results = below(keys, arguments)
        ctx.needs = ctx.needs_input_grad[2:]
        save(ctx, arguments, results)
        return tuple(results) if type(results) is list else results

    def back(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return (None, None, *backward(ctx, grads))

    # Profiles and error messages call the node by the name of its class.
    methods = {"forward": staticmethod(run), "backward": staticmethod(back)}
    node: Any = type(name, (torch.autograd.Function,), methods)

    def call(keys: torch._C.DispatchKeySet, *arguments: Any) -> Any:
        if torch.is_grad_enabled():
            own = tensors(*arguments)
            if any(x.requires_grad for x in own):
                results = node.apply(keys, arguments, *own)
                return list(results) if type(results) is tuple else results
        return below(keys, arguments)

    _library.impl(name, call, "Autograd", with_keyset=True)


def counted(op: str, group: str, shapes: str, reason: str | None) -> Lowered:
    """Return the row that counts a call; one rank warns of one that should have been fused and is not."""
    row = Lowered(op, shapes, reason, reason in EXPECTED)
    if row.reason and not row.expected and named_group(group).rank == 0:
        _logger.warning("%s of %s is not fused: %s", op, shapes, reason)
    return row


_agreed: dict[tuple[dist.ProcessGroup, str, str, str], str | None] = {}


def agree(op: str, group: str, what: str, own: str, reason: str | None) -> str | None:
    """Decide with all ranks of a group whether a call is fused, when the first of its kind comes; a collective.

    Ranks that differ in what is moved would wait for each other in vain, or read each other's memory by different maps.
    They may differ in the operand that stays where it is, as where a weight does not divide, and do without kernels.
    One case is not covered: such a weight where some ranks, and not all, have had a call of the same shapes before.
    Those do not ask again, and the others wait for them until the group's timeout.

    Args:
        op: the operator.
        group: name of the process group.
        what: all that must be equal on all ranks, in words. Nothing else, so that a call is new to all or to none.
        own: shapes of the operands that need not be equal.
        reason: why this rank cannot fuse it, or None.

    Returns:
        Why none of them does, or None.

    Raises:
        ValueError: on every rank, if two ranks are in different calls.
        RuntimeError: a call that is new while a CUDA graph is captured.
    """
    process_group = dist.distributed_c10d._resolve_process_group(group)  # type: ignore[arg-type]
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
    """Gather an object of each rank of a group; a collective."""
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "a collective matmul that is new to the ranks, while a CUDA graph is captured: they have to talk about it "
            "first; run it once before the capture"
        )
    gathered: list[Any] = [None] * group.size()
    dist.all_gather_object(gathered, own, group=group)
    return gathered


implementations: dict[object, tuple[Lowered, Callable[..., Any]]] = {}
"""Cache of validated calls: key → (counter, implementation)."""


def key_of(group: str, *tensors: Tensor | None) -> tuple[object, ...]:
    """Return what of a group and of operands a call's validation looks at."""
    process_group = dist.distributed_c10d._resolve_process_group(group)  # type: ignore[arg-type]
    return (process_group, *(None if t is None else (t.shape, t.stride(), t.dtype) for t in tensors))


def shapes_of(*tensors: Tensor) -> str:
    """Write the shapes of tensors: "8×6, 6×3"."""
    return ", ".join(dims(t.shape) for t in tensors)


def dims(shape: Iterable[int]) -> str:
    """Write a shape: "8×6"."""
    return "×".join(map(str, shape))


def no_peer_access(group: str) -> str | None:
    """Return why the ranks of a group cannot read each other's memory, or None; found out together, once."""
    process_group = dist.distributed_c10d._resolve_process_group(group)  # type: ignore[arg-type]
    known = _access.get(group)
    if known is None or known[0] is not process_group:
        known = _access[group] = (process_group, _ask_peers(process_group))
    return known[1]


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
