"""titanlite's operators: how a function in plain torch becomes one, and the sharding rules beside them.

An operator is its definition, which runs on every device, without numbers on the meta device too, where compilers ask
for the shapes of results; and what runs it on GPUs. They are registered by hand rather than with custom_op, whose
wrappers take longer than the launch.
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
    """The bytes that a rank sends in one collective inside an operator.

    Attributes:
        kind: "all_gather", "reduce_scatter", "all_reduce" or "all_to_all".
        n_bytes: to other ranks.
    """

    kind: str
    n_bytes: int


Sends = Callable[..., "list[Sent] | None"]
"""(device that is built for, *arguments of the operator) → what it sends; None: what its definition does."""


class Split(NamedTuple):
    """One way to compute parts of an operator's results from parts of its inputs, on each rank alone.

    Attributes:
        inputs: for each tensor among its arguments the dim that is split; None for one that every rank has whole. Of a
            call with other numbers of tensors, where one is None, other splits serve.
        output: the dim by which its results, all of them, are split.
    """

    inputs: tuple[int | None, ...]
    output: int


SPLITS: dict[torch._ops.OpOverload, tuple[Split, ...]] = {}
"""How the ranks of a group may share the work of an operator. One that is not here, and that neither
`sharding/op_rules.py` nor DTensor has rules of, is refused in a tensor-parallel model."""


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
        on_gpus: runs for CUDA tensors: a function, or "module.function" of `kernels/device`, imported by the first
            call because it needs Triton; None: the definition too.
        schema: the operator's signature; the definition's if empty.
        splits: its sharding rules.
        sends: what it sends where that is not what its definition does, or depends on numbers.
        unless: its arguments → whether the definition runs for CUDA tensors too.
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

    By hand too: torch's wrapper walks through all arguments with pytree, which takes as long as two launches; and to be
    dispatched once more takes as long as one.

    Args:
        op: the operator.
        tensors: its arguments → all tensors among them. What is left out counts as a constant.
        save: (ctx, arguments, results), results as the operator has them; writes down what backward needs.
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
