"""Make torch operators of functions in plain torch, and record their sharding rules.

An operator has a definition, which runs on every device (on the meta device too, where compilers find the shapes of
results), and a launcher for GPUs. Operators are registered without `custom_op`, whose wrappers take longer than a
kernel launch.
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
    """An operator, which takes the arguments of its definition."""

    definition: Callable[P, R]  # in plain torch; tests compare the device code with it
    on_gpus: Callable[..., R]
    sends: "Sends | None"

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R: ...  # noqa: D102


class Sent(NamedTuple):
    """The bytes that a rank sends in one collective inside an operator."""

    kind: str  # "all_gather", "reduce_scatter", "all_reduce" or "all_to_all"
    n_bytes: int  # sent to other ranks


Sends = Callable[..., "list[Sent] | None"]
"""(device that the run is built for, *arguments of the operator) → its collectives; None: those of its definition."""


class Split(NamedTuple):
    """A sharding rule: each rank computes its part of an operator's results from its parts of the inputs, by itself.

    A rule holds for calls with as many tensors as `inputs` has entries: an argument that may be None needs two rules.
    """

    inputs: tuple[int | None, ...]  # the dim along which each tensor is split; None: every rank holds the full tensor
    output: int  # the dim along which all results are split


SPLITS: dict[torch._ops.OpOverload, tuple[Split, ...]] = {}
"""Sharding rules of titanlite's operators. A tensor-parallel model is refused if it calls an operator that has no rules
here, in `sharding/op_rules.py` or in DTensor."""


def operator(
    name: str,
    on_gpus: str | Callable[..., Any] | None,
    schema: str = "",
    splits: tuple[Split, ...] = (),
    sends: Sends | None = None,
    unless: Callable[..., object] | None = None,
    flops: Callable[..., int] | None = None,
    on_two_devices: bool = False,
) -> Callable[[Callable[P, R]], Operator[P, R]]:
    """Return a decorator that makes a function the definition of the operator `torch.ops.titanlite.<name>`.

    Args:
        name: of the operator.
        on_gpus: the implementation for CUDA tensors: a function, or a name for `device_code`; None: the definition.
        schema: the operator's signature; the definition's if empty.
        splits: the operator's sharding rules.
        sends: returns the operator's collectives. Needed if these are not its definition's, or depend on values.
        unless: (arguments of the operator) → whether the definition runs on GPUs instead of `on_gpus`.
        flops: (shapes of tensors, and other arguments) → floating-point operations.
        on_two_devices: whether some tensors are in host memory while the others are on a GPU. A compiler then finds
            results by the definition; otherwise it takes all to be where the arguments are.
    """

    def register(definition: Callable[P, R]) -> Operator[P, R]:
        signature = schema or torch.library.infer_schema(definition, mutates_args=())
        torch.library.define(f"titanlite::{name}", signature, tags=torch.Tag.pt2_compliant_tag)
        launch = device_code(on_gpus) if isinstance(on_gpus, str) else on_gpus or definition
        if unless is not None:
            launch = _either(unless, definition, launch)
        torch.library.impl(f"titanlite::{name}", "default")(definition)
        torch.library.impl(f"titanlite::{name}", "cuda")(launch)
        if on_two_devices:
            torch.library.register_fake(f"titanlite::{name}", definition)
        op = getattr(torch.ops.titanlite, name).default
        op.definition, op.on_gpus, op.sends = definition, launch, sends
        if splits:
            SPLITS[op] = splits
        if flops is not None:
            register_flop_formula(op.overloadpacket)(flops)
        return cast("Operator[P, R]", op)

    return register


def device_code(place: str) -> Callable[..., Any]:
    """Return a proxy of "module.function" in `kernels/device`. The module needs Triton: the first call imports it."""
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
    """Register the gradient of an operator that takes lists of tensors.

    torch's wrapper is too slow: it walks through all arguments with pytree, which takes as long as two kernel launches,
    and its additional dispatch takes as long as one.

    Args:
        op: the operator.
        tensors: (arguments of the operator) → all tensors among them, except constants.
        save: (ctx, arguments, results as the operator returns them); saves tensors and numbers for `backward`.
        backward: (ctx, gradients of the results) → a gradient, or None, for each of the `tensors`; `ctx.needs` has for
            each whether a gradient is needed.
    """
    overload, name = cast("torch._ops.OpOverload", op), cast("torch._ops.OpOverload", op)._opname

    def below(keys: torch._C.DispatchKeySet, arguments: tuple[Any, ...]) -> Any:
        keys = keys & torch._C._after_ADInplaceOrView_keyset
        with torch._C._AutoDispatchBelowAutograd():
            if keys.highestPriorityTypeId() == torch._C.DispatchKey.CUDA:  # plain tensors, and no mode is active
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
