"""Whether the backward of a user's own `autograd.Function` computes on a rank what it does in one process.

A graph of the model holds its forward. Backward of torch's operators follows from that; of a function of the user's own
it is code, which may read a size off a tensor as forward may (`local_sizes.py`), and trains another model in silence.
Therefore the model is run on the meta device, forward and backward, on whole tensors and on the parts of a rank: the
functions must call the same operators with the same numbers. Sizes of results may differ: autograd compares the shape
of each gradient with that of its tensor. With which tensors operators are called is not compared.
"""

import inspect
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from titanlite.errors import Problem, ShardingError, describe
from titanlite.models.mistakes import mistake
from titanlite.parallel.sharding.graph import Constants
from titanlite.parallel.sharding.local_sizes import FIX, on_a_rank
from titanlite.parallel.sharding.plan import LayerPlan


class _Call(NamedTuple):
    """An operator that a function's backward calls.

    Attributes:
        operator: with its overload.
        numbers: its arguments but tensors and sizes of its result; and what constants hold.
        line: of the user's file, and what stands there.
    """

    operator: object
    numbers: Mapping[str, str]
    line: int | None
    code: str


def check_local_backwards(model: nn.Module, tokens: int, layers: Mapping[str, LayerPlan], ranks: int) -> None:
    """Refuse a model with functions whose backward depends on sizes that are others on a rank.

    Args:
        model: on the meta device; as it was.
        tokens: M of a micro-step.
        layers: what its modules do on a rank.
        ranks: tensor-parallel ones.

    Raises:
        ShardingError: each line that computes with other numbers is in the message, up to the first from which on
            operators are others; or a backward cannot be run on the meta device.
    """
    file = inspect.getfile(type(model))
    anyhow = "code that runs, also on tensors without values (the meta device), forward and backward"
    one = _calls(
        model, tokens, file, anyhow, "change that function: no item(), no numpy; or tensor_parallel_degree = 1"
    )
    if not one:
        return
    with on_a_rank(model, layers, ranks, every_block=True):
        here = _calls(
            model, tokens, file, f"code that runs on the part of each tensor that one of {ranks} ranks has", FIX
        )
    problems: dict[object, Problem] = {}
    for (name, wanted), (other, own) in zip_longest(one, here, fillvalue=("", [])):
        for call, at in zip_longest(wanted, own):
            found = _difference(name or other, call, at, ranks)
            if found is not None:
                problems.setdefault((found.line, found.where), found)
            if call is None or at is None or call.operator != at.operator:
                break
    if problems:
        raise ShardingError(describe(file, list(problems.values())))


def _difference(name: str, one: _Call | None, here: _Call | None, ranks: int) -> Problem | None:
    """What is other of an operator; it may be missing in either place."""
    place = here or one
    assert place is not None  # noqa: S101  # one of both is there
    where = f"{name}.backward: {place.code}" if place.code else f"{name}.backward"
    if one is None or here is None or one.operator != here.operator:
        saw, want = (f"calls {call.operator}" if call else "calls nothing more" for call in (here, one))
    elif one.numbers != here.numbers:
        names = [k for k in {**one.numbers, **here.numbers} if one.numbers.get(k) != here.numbers.get(k)]
        saw, want = (", ".join(f"{k} = {call.numbers.get(k)}" for k in names) for call in (here, one))
        saw = f"{here.operator} with {saw}"
    else:
        return None
    return Problem(where, f"{saw} on one of {ranks} ranks", f"{want}, as in one process", FIX, place.line)


def _calls(model: nn.Module, tokens: int, file: str, want: str, fix: str) -> list[tuple[str, list[_Call]]]:
    """What each call of a user's function does in backward, with the function's name, in the order of backward."""
    found: list[tuple[str, list[_Call]]] = []

    def watched(function: type[Function], backward: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any) -> Any:
            calls: list[_Call] = []
            found.append((function.__name__, calls))
            with _Recorded(calls, file), Constants():
                return backward(*args)

        return called

    try:
        logits = model(torch.empty(tokens, dtype=torch.long, device="meta"))
        functions = _own_functions(logits)
        if functions:
            with ExitStack() as watching:
                for function in functions:
                    backward = function.backward
                    watching.callback(setattr, function, "backward", staticmethod(backward))
                    function.backward = staticmethod(watched(function, backward))  # type: ignore[method-assign]
                trained = [p for p in model.parameters() if p.requires_grad]
                torch.autograd.grad(logits.sum(), trained, allow_unused=True)
    except Exception as error:
        raise ShardingError(describe(file, [mistake(error, file, want, fix)])) from error
    return found


def _own_functions(result: Tensor) -> set[type[Function]]:
    """The functions behind a tensor that are neither torch's nor titanlite's."""
    found: set[type[Function]] = set()
    left, seen = [result.grad_fn], set[object]()
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        left += [before for before, _ in node.next_functions]
        function = getattr(type(node), "_forward_cls", None)
        if function is not None and function.__module__.partition(".")[0] not in ("torch", "titanlite"):
            found.add(function)
    return found


class _Recorded(TorchDispatchMode):
    """Takes down the operators that are called.

    Args:
        calls: gets them.
        file: the user's.
    """

    def __init__(self, calls: list[_Call], file: str) -> None:
        super().__init__()
        self._calls, self._file = calls, file

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        names = [argument.name for argument in func._schema.arguments]
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        numbers = {k: _written(v) for k, v in given.items() if "size" not in k and "shape" not in k}
        frame: Any = sys._getframe(1)
        while frame is not None and frame.f_code.co_filename != self._file:
            frame = frame.f_back
        code = (inspect.getframeinfo(frame).code_context or [""])[0].strip() if frame else ""
        self._calls.append(_Call(func, numbers, frame and frame.f_lineno, code))
        return func(*args, **kwargs)


def _written(argument: object) -> str:
    """An argument without its tensors; but with what constants hold."""
    return str(pytree.tree_map_only(Tensor, lambda x: None if x.is_meta else x.tolist(), argument))
