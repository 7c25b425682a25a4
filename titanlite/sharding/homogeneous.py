"""Whether a model does nothing but repeat the blocks that stand for others: then their plan is that of all of them.

A model's code may do by a block's number, or by how many there are, what two blocks of a kind do not show. So it is run
on the meta device as it is, and with those blocks alone, and what it calls is compared. It must call its blocks one
after the other, with nothing between them, each with what the one before gives and with tensors that all of them share;
blocks of a kind must call the same with the same; and in front of the blocks and behind them both models must do the
same. That takes an eighth of the time in which `torch.export` makes a graph of the whole. Anything else, and what is
not understood, is no repetition, and all blocks are planned.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.compiler import set_stance
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from titanlite.sharding.graph import kind_of, tensors_of
from titanlite.sharding.local_sizes import put

_BLOCK = re.compile(r"layers\.\d+\.")


def only_repeats(
    model: nn.Module,
    fewer: nn.Module,
    tokens: int,
    changed: Callable[[nn.Module], AbstractContextManager[object]] = nullcontext,
) -> bool:
    """Say whether a model calls the same as with fewer blocks, but for the number of times.

    Args:
        model: on the meta device; has `layers`.
        fewer: the same with some of its blocks, one of each kind at least.
        tokens: M of a micro-step.
        changed: makes either model another one, for a while.
    """
    kinds = {block: kind_of(block) for block in model.layers}  # type: ignore[union-attr]  # before they are changed
    calls: list[_Calls] = []
    try:
        for each in (model, fewer):
            with changed(each), set_stance("force_eager"):  # what a user has compiled
                calls.append(_run(each, tokens, kinds))
    except Exception:  # the code is a user's: the plan of all of its blocks says what is wrong with it
        return False
    return calls[0] == calls[1]


class _NoRepetitionError(Exception):
    """Blocks are no chain, or not alike."""


class _Calls(NamedTuple):
    """What a model calls, by what both models have.

    Attributes:
        before: the calls before the first block.
        first: what the first block is given.
        given: what each kind of block is given elsewhere.
        blocks: the calls of each kind.
        behind: the calls behind the last block, and what the model returns.
    """

    before: list[object]
    first: object
    given: dict[str, object]
    blocks: dict[str, object]
    behind: object


def _run(model: nn.Module, tokens: int, kinds: Mapping[nn.Module, str]) -> _Calls:
    blocks: list[nn.Module] = list(model.layers)  # type: ignore[arg-type]
    trace = _Trace(model)
    before: list[list[object]] = []
    first: list[object] = []
    given: dict[str, list[object]] = defaultdict(list)
    of_kind: dict[str, list[object]] = defaultdict(list)

    def watched(n: int, forward: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any, **kwargs: Any) -> Any:
            if n != len(before) or (n and trace.calls):
                raise _NoRepetitionError
            before.append(trace.calls)
            (given[kinds[blocks[n]]] if n else first).append(trace.described((args, kwargs)))
            trace.enter(n, (args, kwargs))
            result = forward(*args, **kwargs)
            of_kind[kinds[blocks[n]]].append(trace.leave(result))
            return result

        return called

    with ExitStack() as watching:
        for n, block in enumerate(blocks):
            watching.enter_context(put(vars(block), "forward", watched(n, block.forward)))
        watching.enter_context(trace)
        result = model(trace.input(tokens))
        behind = trace.calls, trace.described(result)
    if len(before) != len(blocks):
        raise _NoRepetitionError
    return _Calls(before[0], first[0], _one_of_each(given), _one_of_each(of_kind), behind)


def _one_of_each(found: dict[str, list[object]]) -> dict[str, object]:
    """What all blocks of a kind have in common, which is everything."""
    if any(one != each[0] for each in found.values() for one in each):
        raise _NoRepetitionError
    return {kind: each[0] for kind, each in found.items()}


class _Trace(TorchFunctionMode):
    """The calls of a model, with tensors by what made them or holds them.

    Args:
        model: before it runs.

    Attributes:
        calls: since a block began or ended.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.calls: list[object] = []
        self._names: dict[int, list[str]] = defaultdict(list)
        self._kept: list[object] = []  # a tensor that is gone would leave its id to another
        for kind in (model.named_parameters, model.named_buffers):
            for name, tensor in kind(remove_duplicate=False):
                self._names[id(tensor)].append(name)
                self._kept.append(tensor)
        self._everywhere = {i: names for i, names in self._names.items() if not any(map(_BLOCK.match, names))}
        self._here: dict[int, object] = {}
        self._made = 0

    def input(self, tokens: int) -> Tensor:
        """The model's, [M] int64."""
        made = torch.empty(tokens, dtype=torch.long, device="meta")
        self._kept.append(made)
        self._here[id(made)] = "tokens"
        return made

    def described(self, value: object) -> object:
        """What a call is given, or gives: tensors by their makers, everything else as it is written."""
        leaves, shape = pytree.tree_flatten(value)
        return [self._tensor(x) if isinstance(x, Tensor) else repr(x) for x in leaves], repr(shape)

    def enter(self, n: int, given: object) -> None:
        """A block begins."""
        if n == 0:
            self._everywhere |= self._here  # type: ignore[arg-type]
        prefix = f"layers.{n}."
        self._here = {
            i: names[0].removeprefix(prefix)
            for i, names in self._names.items()
            if len(names) == 1 and names[0].startswith(prefix)
        }
        self._here |= {id(x): ("given", place) for place, x in reversed(list(enumerate(tensors_of(given))))}
        self.calls, self._made = [], 0

    def leave(self, result: object) -> object:
        """A block ends, which gives one tensor, the last that it makes; give all that it did."""
        done = self.calls, self.described(result)
        if [self._here[id(x)] for x in tensors_of(result)] != [self._made - 1]:
            raise _NoRepetitionError
        self._here = {id(x): "the result of the block" for x in tensors_of(result)}
        self.calls, self._made = [], 0
        return done

    def _tensor(self, x: Tensor) -> object:
        maker = self._here.get(id(x), self._everywhere.get(id(x)))
        if maker is None:  # it is of another block, of several, or from elsewhere
            raise _NoRepetitionError
        return maker, tuple(x.shape), x.dtype, x.device, x.requires_grad, x.is_leaf

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = self.described((args, kwargs))
        result = func(*args, **kwargs)
        self._kept.append(result)
        for x in tensors_of(result):
            if id(x) not in self._here and id(x) not in self._everywhere:
                self._here[id(x)] = self._made
                self._made += 1
        self.calls.append((func, given, self.described(result), torch.is_grad_enabled()))
        return result
