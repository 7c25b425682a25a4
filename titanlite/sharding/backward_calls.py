"""What a user's own code calls in backward: each operator with its arguments, and the line; and the gradients it gives.

Backward is run on the meta device, whole or as on a rank. An operator is the user's if a frame of the user's is on the
stack that calls it: whatever class or hook it stands in, and what it calls of torch.
"""

import linecache
import sys
from collections.abc import Iterator, Mapping, Sequence
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction, Function
from torch.autograd.graph import Node, _engine_run_backward
from torch.compiler import set_stance
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from titanlite.errors import ShardingError, describe
from titanlite.models.mistakes import mistake
from titanlite.parallel.calls import arguments
from titanlite.sharding.graph import Constants, tensors_of

aten = torch.ops.aten
_NOT_OWN = {"torch", "titanlite", *sys.stdlib_module_names}

_REARRANGE = {
    *(aten.view, aten._unsafe_view, aten.clone, aten.permute, aten.squeeze, aten.unsqueeze),
    *(aten.as_strided, aten.empty_strided, aten.new_empty_strided),
}
"""Not compared: reshape, contiguous and einsum take others of these where a rank has one head; strides are sizes."""

_HOOK = "a hook of a gradient"


class Call(NamedTuple):
    """An operator that a user's code calls in backward.

    Attributes:
        operator: with its overload.
        numbers: its arguments but tensors and sizes of its result; and what constants hold.
        given: all of its arguments.
        result: what it gives.
        where: the function that calls it, and the line.
        line: its number, if it is of the model's file.
    """

    operator: torch._ops.OpOverload
    numbers: Mapping[str, str]
    given: tuple[Any, Any]
    result: Any
    where: str
    line: int | None


class Given(NamedTuple):
    """A gradient that a user's code gives.

    Attributes:
        tensor: the gradient.
        where: the function that computes it, and the line; or that gives it, where it was not computed in backward.
        line: its number, if it is of the model's file.
    """

    tensor: Tensor
    where: str
    line: int | None


class Recorded(TorchDispatchMode):
    """Takes down the operators of backward that a user's Python code calls, and the gradients that it gives.

    Args:
        file: the model's.

    Attributes:
        calls: so far.
        gradients: what torch's own operators gave.
        given: gradients that the user's code gave, in order.
    """

    def __init__(self, file: str) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self.gradients: set[Tensor] = set()
        self.given: list[Given] = []
        self._file = file
        self._rearranged: dict[Tensor, Call] = {}

    def rearranged(self, x: Tensor) -> list[Call]:
        """Give what a tensor was made by, of its root, if a user's code has only rearranged that."""
        call = self._rearranged.get(x)
        return [*self.rearranged(call.given[0][0]), call] if call else []

    def root(self, x: Tensor) -> Tensor:
        """Give the tensor that one is a rearrangement of."""
        calls = self.rearranged(x)
        return calls[0].given[0][0] if calls else x

    def give(self, gradients: Sequence[Tensor | None], where: str, line: int | None = None) -> None:
        """Take down gradients that the engine has, each once, but those that operators of torch gave it."""
        for x in gradients:
            if x is not None and x not in self.gradients and all(x is not known.tensor for known in self.given):
                root = self.root(x)
                call = next((c for c in reversed(self.calls) if any(y is root for y in tensors_of(c.result))), None)
                self.given.append(Given(x, *((call.where, call.line) if call else (where, line))))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if not (frames := own_frames()):
            self.gradients |= set(tensors_of(result))
        elif func.overloadpacket in _REARRANGE:
            if tensors_of(args):
                self._rearranged[result] = Call(func, {}, (args, kwargs), result, "", None)
        else:
            given = arguments(func, args, kwargs).items()
            numbers = {k: _written(v) for k, v in given if "size" not in k and "shape" not in k}
            self.calls.append(Call(func, numbers, (args, kwargs), result, *place_of(frames, self._file)))
        return result


def backward_of(model: nn.Module, tokens: int, file: str, want: str, fix: str) -> Recorded:
    """Run a model forward and backward.

    Args:
        model: on the meta device; takes [M] int64 token ids to one tensor.
        tokens: M of a micro-step.
        file: the model's.
        want: if it cannot be run, what is wanted instead, and `fix` the change that mends it.
        fix: see above.

    Raises:
        ShardingError: it cannot be run.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    try:
        with set_stance("force_eager"):
            logits = model(torch.empty(tokens, dtype=torch.long, device="meta"))
            ran = Recorded(file)
            for node in _nodes(logits.grad_fn):
                _watch(node, ran, file)
            with ran, Constants():  # which `torch.autograd.grad` would hide from what it calls
                given = (torch.ones_like(logits),), False, False, tuple(trained)
                gradients = _engine_run_backward((logits,), *given, allow_unreachable=True, accumulate_grad=False)
                ran.give(gradients, _HOOK)
    except Exception as error:
        raise ShardingError(describe(file, [mistake(error, file, want, fix)])) from error
    return ran


def _nodes(last: Node | None) -> Iterator[Node]:
    """What backward will run through."""
    left, seen = [last], {None, last}
    while left:
        node = left.pop()
        if node is not None:
            yield node
            others = {following for following, _ in node.next_functions} - seen
            seen |= others
            left += others


def _watch(node: Node, ran: Recorded, file: str) -> None:
    """Take down what a step of backward is given, which hooks may have made, and what a function of Python gives."""
    node.register_prehook(lambda gradients: ran.give(gradients, _HOOK))
    if isinstance(node, BackwardCFunction):
        function: Any = node._forward_cls  # type: ignore[attr-defined]
        code = (function.backward if function.vjp is Function.vjp else function.vjp).__code__
        line = code.co_firstlineno if code.co_filename == file else None
        node.register_hook(lambda gradients, _: ran.give(gradients, f"in {code.co_qualname}", line))


def own_frames() -> list[FrameType]:
    """Give the user's part of what calls an operator, innermost first; for a `__torch_dispatch__`."""
    own: list[FrameType] = []
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code is not backward_of.__code__:
        if frame.f_globals.get("__name__", "").partition(".")[0] not in _NOT_OWN:
            own.append(frame)
        frame = frame.f_back
    return own


def place_of(frames: Sequence[FrameType], file: str) -> tuple[str, int | None]:
    """Give the function and line that runs in the innermost frame of a file, or of any, and its number in the file."""
    frame = next((f for f in frames if f.f_code.co_filename == file), frames[0])
    line = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
    number = frame.f_lineno if frame.f_code.co_filename == file else None
    return f"in {frame.f_code.co_qualname}: {line}", number


def _written(argument: object) -> str:
    """An argument without its tensors; but with what constants hold."""
    return str(pytree.tree_map_only(Tensor, lambda x: None if x.is_meta else x.tolist(), argument))
