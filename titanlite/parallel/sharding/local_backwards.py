"""Whether a user's own code in backward computes on a rank what it does in one process.

A graph of the model holds its forward. Backward of torch's operators follows from that; an `autograd.Function`, a hook
or an operator of the user's own has code there, which may read a size off a tensor as forward may (`local_sizes.py`),
and trains another model in silence. Therefore the model is run on the meta device, forward and backward, on whole
tensors and on the parts of a rank: what such code calls in backward must be the same operators with the same numbers.
Sizes of results may differ: autograd compares the shape of each gradient with that of its tensor. So may what only
rearranges. With which tensors operators are called is not compared.
"""

import copy
import linecache
import sys
from collections.abc import Mapping
from inspect import getfile
from itertools import zip_longest
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import _engine_run_backward
from torch.compiler import set_stance
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from titanlite.errors import Problem, ShardingError, describe
from titanlite.models.mistakes import mistake
from titanlite.parallel.sharding.graph import Constants
from titanlite.parallel.sharding.local_sizes import FIX, on_a_rank
from titanlite.parallel.sharding.plan import LayerPlan

aten = torch.ops.aten
_NOT_OWN = {"torch", "titanlite", *sys.stdlib_module_names}

_REARRANGE = {
    *(aten.view, aten._unsafe_view, aten.clone, aten.expand, aten.permute, aten.squeeze, aten.unsqueeze),
    *(aten.as_strided, aten.empty_strided, aten.new_empty_strided),
}
"""Not compared: reshape, contiguous and einsum take others of these where a rank has one head; strides are sizes."""


class _Call(NamedTuple):
    """An operator that a user's code calls in backward.

    Attributes:
        operator: with its overload.
        numbers: its arguments but tensors and sizes of its result; and what constants hold.
        where: the function that calls it, and the line.
        line: its number, if it is of the model's file.
    """

    operator: object
    numbers: Mapping[str, str]
    where: str
    line: int | None


def check_local_backwards(model: nn.Module, tokens: int, layers: Mapping[str, LayerPlan], ranks: int) -> None:
    """Refuse a model with code in backward that depends on sizes that are others on a rank.

    Args:
        model: on the meta device; as it was.
        tokens: M of a micro-step.
        layers: what its modules do on a rank.
        ranks: tensor-parallel ones.

    Raises:
        ShardingError: each line that computes with other numbers is in the message, up to the first from which on
            operators are others; or a backward cannot be run on the meta device.
    """
    file = getfile(type(model))
    anyhow = "code that runs, also on tensors without values (the meta device), forward and backward"
    fix = "change that line: no item(), no numpy; or tensor_parallel_degree = 1"
    one = _calls(copy.deepcopy(model), tokens, file, anyhow, fix)
    part, want = copy.deepcopy(model), f"code that runs on the part of each tensor that one of {ranks} ranks has"
    with on_a_rank(part, layers, ranks, every_block=True):
        here = _calls(part, tokens, file, want, FIX)
    problems: dict[object, Problem] = {}
    for call, own in zip_longest(one, here):
        found = _difference(call, own, ranks)
        if found is not None:
            problems.setdefault((found.line, found.where), found)
        if call is None or own is None or call.operator != own.operator:
            break
    if problems:
        raise ShardingError(describe(file, list(problems.values())))


def _difference(one: _Call | None, here: _Call | None, ranks: int) -> Problem | None:
    """What is other of an operator; it may be missing in either place."""
    place = here or one
    assert place is not None  # noqa: S101  # one of both is there
    if one is None or here is None or one.operator != here.operator:
        saw, want = (f"calls {call.operator}" if call else "calls nothing more" for call in (here, one))
    elif one.numbers != here.numbers:
        names = [k for k in {**one.numbers, **here.numbers} if one.numbers.get(k) != here.numbers.get(k)]
        saw, want = (", ".join(f"{k} = {call.numbers.get(k)}" for k in names) for call in (here, one))
        saw = f"{here.operator} with {saw}"
    else:
        return None
    return Problem(place.where, f"{saw} on one of {ranks} ranks", f"{want}, as in one process", FIX, place.line)


def _calls(model: nn.Module, tokens: int, file: str, want: str, fix: str) -> list[_Call]:
    """What the user's code calls in backward, in order."""
    trained = [p for p in model.parameters() if p.requires_grad]
    try:
        with set_stance("force_eager"):
            logits = model(torch.empty(tokens, dtype=torch.long, device="meta"))
            given = (torch.ones_like(logits),), False, False, tuple(trained)
            with _Recorded(file) as recorded, Constants():  # which `torch.autograd.grad` would hide from what it calls
                _engine_run_backward((logits,), *given, allow_unreachable=True, accumulate_grad=False)
    except Exception as error:
        raise ShardingError(describe(file, [mistake(error, file, want, fix)])) from error
    return recorded.calls


class _Recorded(TorchDispatchMode):
    """Takes down the operators that are called by a user's Python code.

    Args:
        file: the model's.

    Attributes:
        calls: so far.
    """

    def __init__(self, file: str) -> None:
        super().__init__()
        self.calls: list[_Call] = []
        self._file = file

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        frames = [] if func.overloadpacket in _REARRANGE else _own_frames()
        if frames:
            names = [argument.name for argument in func._schema.arguments]
            given = {**dict(zip(names, args, strict=False)), **kwargs}
            numbers = {k: _written(v) for k, v in given.items() if "size" not in k and "shape" not in k}
            frame = next((f for f in frames if f.f_code.co_filename == self._file), frames[0])
            line = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
            number = frame.f_lineno if frame.f_code.co_filename == self._file else None
            self.calls.append(_Call(func, numbers, f"in {frame.f_code.co_qualname}: {line}", number))
        return func(*args, **kwargs)


def _own_frames() -> list[FrameType]:
    """The user's part of what runs in backward, innermost first."""
    own: list[FrameType] = []
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code is not _calls.__code__:
        if frame.f_globals.get("__name__", "").partition(".")[0] not in _NOT_OWN:
            own.append(frame)
        frame = frame.f_back
    return own


def _written(argument: object) -> str:
    """An argument without its tensors; but with what constants hold."""
    return str(pytree.tree_map_only(Tensor, lambda x: None if x.is_meta else x.tolist(), argument))
