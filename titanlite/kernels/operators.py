"""titanlite's operators: how a function in plain torch becomes one, and the sharding rules beside them.

An operator has a definition, which runs on every device (on the meta device too, where compilers ask for the shapes of
results), and a launcher for GPUs. It is registered by hand: the wrappers of `custom_op` take longer than a launch.
"""

import functools
import importlib
from collections.abc import Callable
from typing import Any, NamedTuple, ParamSpec, Protocol, TypeVar, cast

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

P = ParamSpec("P")
R = TypeVar("R")

_library = torch.library.Library("titanlite", "FRAGMENT")


class Operator(Protocol[P, R]):
    """An operator, called as its definition."""

    definition: Callable[P, R]  # what the device code is held against
    on_gpus: Callable[..., R]
    sends: "Sends | None"

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R: ...  # noqa: D102


class Sent(NamedTuple):
    """The bytes that a rank sends in one collective inside an operator."""

    kind: str  # "all_gather", "reduce_scatter", "all_reduce" or "all_to_all"
    n_bytes: int  # to other ranks


Sends = Callable[..., "list[Sent] | None"]
"""(device that the run is built for, *arguments of the operator) → what it sends; None: as much as its definition."""


class Split(NamedTuple):
    """One way to compute parts of an operator's results from parts of its inputs, on each rank alone.

    It serves calls with as many tensors as `inputs`: an argument that may be None needs a second split.
    """

    inputs: tuple[int | None, ...]  # the dim by which each tensor is split; None for one that every rank has whole
    output: int  # the dim by which all results are split


SPLITS: dict[torch._ops.OpOverload, tuple[Split, ...]] = {}
"""How the ranks of a group may share an operator's work. A tensor-parallel model is refused if it calls one that has no
rules here, in `sharding/op_rules.py` or in DTensor."""


def operator(
    name: str,
    on_gpus: str | Callable[..., Any] | None,
    schema: str = "",
    splits: tuple[Split, ...] = (),
    sends: Sends | None = None,
    unless: Callable[..., object] | None = None,
    flops: Callable[..., int] | None = None,
) -> Callable[[Callable[P, R]], Operator[P, R]]:
    """Make an operator `torch.ops.titanlite.<name>` of a function.

    Args:
        name: of the operator.
        on_gpus: runs for CUDA tensors: a function, or a name for `device_code`; None: the definition.
        schema: the operator's signature; the definition's if empty.
        splits: its sharding rules.
        sends: what it sends, if its definition sends something else, or if this depends on numbers in tensors.
        unless: the operator's arguments → whether the definition runs on GPUs, too.
        flops: (shapes of tensors and other arguments) → floating-point operations.
    """

    def register(definition: Callable[P, R]) -> Operator[P, R]:
        signature = schema or torch.library.infer_schema(definition, mutates_args=())
        torch.library.define(f"titanlite::{name}", signature, tags=torch.Tag.pt2_compliant_tag)
        launch = device_code(on_gpus) if isinstance(on_gpus, str) else on_gpus or definition
        if unless is not None:
            launch = _either(unless, definition, launch)
        torch.library.impl(f"titanlite::{name}", "default")(definition)
        torch.library.impl(f"titanlite::{name}", "cuda")(launch)
        op = getattr(torch.ops.titanlite, name).default
        op.definition, op.on_gpus, op.sends = definition, launch, sends
        if splits:
            SPLITS[op] = splits
        if flops is not None:
            register_flop_formula(op.overloadpacket)(flops)
        return cast("Operator[P, R]", op)

    return register


def device_code(place: str) -> Callable[..., Any]:
    """Return "module.function" of `kernels/device`, imported by the first call because it needs Triton."""
    module, function = place.split(".")

    @functools.cache
    def found() -> Callable[..., Any]:
        return getattr(importlib.import_module(f"titanlite.kernels.device.{module}"), function)

    return lambda *arguments: found()(*arguments)


def _either(unless: Callable[..., object], definition: Callable[..., R], launch: Callable[..., R]) -> Callable[..., R]:
    return lambda *arguments: (definition if unless(*arguments) else launch)(*arguments)


def differentiate(
    op: Operator[..., Any],
    tensors: Callable[..., list[Tensor]],
    save: Callable[..., None],
    backward: Callable[..., Any],
) -> None:
    """Give an operator of lists of tensors a gradient.

    Also by hand: torch's wrapper walks through all arguments with pytree, which takes as long as two launches, and one
    more dispatch takes as long as a launch.

    Args:
        op: to which it is given.
        tensors: its arguments → all tensors among them, except constants.
        save: (ctx, arguments, results as the operator returns them); saves what backward needs.
        backward: (ctx, gradients of the results) → one for each of the `tensors`; `ctx.needs` says which are wanted.
    """
    overload, name = cast("torch._ops.OpOverload", op), cast("torch._ops.OpOverload", op)._opname

    def below(keys: torch._C.DispatchKeySet, arguments: tuple[Any, ...]) -> Any:
        keys = keys & torch._C._after_ADInplaceOrView_keyset
        with torch._C._AutoDispatchBelowAutograd():
            if keys.highestPriorityTypeId() == torch._C.DispatchKey.CUDA:  # plain tensors, and no mode is on
                return op.on_gpus(*arguments)
            return overload.redispatch(keys, *arguments)

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
