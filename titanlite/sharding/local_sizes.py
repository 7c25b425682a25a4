"""Whether a model's own code computes on a rank what the plan says: a size read off a tensor is another one there.

The plan is made of a graph in which every number that the code read off a shape stands as it is in one process. On a
rank the same code runs on parts, so `y / h.shape[-1]` divides by another number, and trains another model. Therefore
the code is run once more on the shapes of a rank, and must call the same operators on the same tensors with the same
numbers. What differs is an error, but for the sizes that an operator gives its result (`view`, `expand`, `zeros`):
these may differ if the result is the part that is planned.

No process takes part. Parameters are cut, layers that move tokens give shapes as they will, and of blocks that are
alike, and called alike, one is run. Each run is of a copy: a model may keep what it reads off a tensor.

What an `autograd.Function` of a user's own does in backward is in no graph: `local_backwards.py` runs it.
"""

import contextlib
import copy
import inspect
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.fx import Node
from torch.utils import _pytree as pytree

from titanlite.errors import Problem, ShardingError, describe
from titanlite.models.mistakes import mistake
from titanlite.parallel.calls import arguments_of, draws
from titanlite.parallel.tensor import LayerPlan
from titanlite.sharding.graph import Graph, export, kind_of, line_of, modules_of, tensor_inputs, values
from titanlite.sharding.plan import REPLICATE, Plan, local_shape

_SIZES = {"size", "shape", "sizes"}
"""Arguments that say nothing but the shape of an operator's result."""

FIX = (
    "take sizes from the model's dimensions, as self.width = sizes.ffn_dim in __init__, not from a tensor's shape or "
    "len(); or tensor_parallel_degree = 1"
)

_FIX_DRAWS = "no dropout or other random numbers for what is split; or tensor_parallel_degree = 1"


def check_local_sizes(
    model: nn.Module, tokens: int, graph: Graph, plan: Plan, layers: Mapping[str, LayerPlan], whole: set[Node]
) -> None:
    """Refuse a model whose code depends on sizes that are others on a rank.

    Args:
        model: on the meta device; as it was.
        tokens: M of a micro-step.
        graph: of the model.
        plan: of it, on one axis.
        layers: what its modules do on a rank.
        whole: nodes that every rank computes whole, wherever the plan puts them.

    Raises:
        ShardingError: each line that computes with other numbers is in the message, up to the first from which on
            tensors or operators are others.
    """
    # Blocks may hand on what they are given, or leave something to others: before it is refused all of them are run.
    if all(_problems(model, tokens, graph, plan, layers, whole, graph, every_block=every) for every in (False, True)):
        inputs = [torch.empty(tokens, dtype=torch.long, device="meta")]
        # Lines take their time, and are needed here only.
        traced = export(copy.deepcopy(model), inputs, stack_traces=True)
        problems = _problems(model, tokens, graph, plan, layers, whole, traced, every_block=True)
        raise ShardingError(describe(inspect.getfile(type(model)), problems))


def _problems(
    model: nn.Module,
    tokens: int,
    graph: Graph,
    plan: Plan,
    layers: Mapping[str, LayerPlan],
    whole: set[Node],
    traced: Graph,
    every_block: bool,
) -> list[Problem]:
    """As `check_local_sizes`, with the lines of a graph that may have them; of blocks that are alike one may be run."""
    model, (ranks,) = copy.deepcopy(model), plan.axes.values()
    file = inspect.getfile(type(model))
    with on_a_rank(model, layers, ranks, every_block) as skipped:
        try:
            inputs = [torch.empty(tokens, dtype=torch.long, device="meta")]
            local = export(model, inputs, stack_traces=traced is not graph)
        except ShardingError as error:
            cause = error.__cause__ if isinstance(error.__cause__, Exception) else error
            want = f"code that runs on the part of each tensor that one of {ranks} ranks has, as it does on the whole"
            return [mistake(cause, file, want, FIX)]
    one, here, lines = (_Operators(g, skipped) for g in (graph, local, traced))
    problems: dict[object, Problem] = {}
    for node, own, line in zip_longest(one.compared, here.compared, lines.compared):
        found = _difference(one, node, here, own)
        if found is None and node and own:
            placements = (REPLICATE,) if node in whole else plan.tensors[graph.names[node]].placements
            planned = [local_shape(tuple(v.shape), placements, (ranks,)) for v in values(node)]
            shapes = [tuple(v.shape) for v in values(own)]
            if shapes != planned:
                gives, want = (", ".join(str(list(shape)) for shape in each) for each in (shapes, planned))
                found = _Difference(f"{own.target} gives {gives}", f"{want}, the planned part", True)
            elif draws(node.target, node.args, node.kwargs) and not placements[0].is_replicate():
                want = "others for each part"
                found = _Difference(f"{own.target} draws the same numbers for all parts", want, False, _FIX_DRAWS)
        if found:
            problem = _problem(file, [n for n in (own, line) if n], found, ranks)
            problems.setdefault((problem.line, problem.where), problem)
            if found.is_last:
                break
    else:
        for name, read in one.read.items():
            if not read <= here.read[name]:
                want = "the tensors that it is called with in one process"
                problems[name] = Problem(name, f"called with other tensors on one of {ranks} ranks", want, FIX)
    return list(problems.values())


class _Difference(NamedTuple):
    """What an operator does on a rank, and in one process.

    Attributes:
        here: on a rank.
        one: in one process.
        is_last: whether later operators differ for this reason alone.
        fix: what to change.
    """

    here: str
    one: str
    is_last: bool
    fix: str = FIX


class _Operators:
    """The operators of one of the two graphs.

    Args:
        graph: either.
        skipped: names of modules in which the graphs may differ.

    Attributes:
        compared: those in no such module, in order.
        read: per such module, the results of other operators that it computes with.
    """

    def __init__(self, graph: Graph, skipped: set[str]) -> None:
        self.compared: list[Node] = []
        self.read: dict[str, set[object]] = defaultdict(set)
        self._constants = graph.constants
        self._keys: dict[Node, object] = {n: None if n in graph.constants else name for n, name in graph.names.items()}
        for node in graph.operators:
            home = next((name for name in modules_of(node) if name in skipped), None)
            self._keys[node] = len(self.compared) if home is None else f"@{home}"
            if home is None:
                self.compared.append(node)
            else:
                inputs = {self._keys[source] for source in tensor_inputs(node) if source.op != "placeholder"}
                self.read[home] |= inputs - {f"@{home}"}

    def tensors(self, node: Node) -> list[object]:
        """What an operator computes with, by what is the same in both graphs."""
        return [self._keys[source] for source in tensor_inputs(node)]

    def numbers(self, node: Node) -> dict[str, str]:
        """All arguments but tensors and sizes of the result; and what constants hold."""
        given = arguments_of(node).items()
        found = {k: str(fx.map_arg(value, lambda _: None)) for k, value in given if k not in _SIZES}
        held = [self._constants[source] for source in tensor_inputs(node) if source in self._constants]
        return found | {f"constant {i}": str(tensor.tolist()) for i, tensor in enumerate(held) if not tensor.is_meta}


def _difference(one: _Operators, node: Node | None, here: _Operators, own: Node | None) -> _Difference | None:
    """What is other of an operator, but for the shape of its result; it may be missing in either place."""
    if node is None or own is None or node.target != own.target:
        calls = [f"calls {n.target}" if n else "calls nothing more" for n in (own, node)]
        return _Difference(calls[0], calls[1], True)
    if one.tensors(node) != here.tensors(own):
        return _Difference(f"calls {own.target} with other tensors", "calls it with those of the plan", True)
    numbers, wanted = here.numbers(own), one.numbers(node)
    if numbers == wanted:
        return None
    names = [name for name in {**wanted, **numbers} if numbers.get(name) != wanted.get(name)]
    shown = [", ".join(f"{k} = {given.get(k)}" for k in names) for given in (numbers, wanted)]
    return _Difference(f"{own.target} with {shown[0]}", shown[1], False)


def _problem(file: str, nodes: list[Node], difference: _Difference, ranks: int) -> Problem:
    """A difference, with the line of the model's file that one of these operators is of."""
    node, line = next(((n, found) for n in nodes if (found := line_of(n, file))), (nodes[0], None))
    where = re.sub(r"\b\d+\b", "*", (modules_of(node) or ["the model"])[-1])
    where, number = (f"{where}: {line.code}", line.number) if line else (where, None)
    saw, want = f"{difference.here} on one of {ranks} ranks", f"{difference.one}, as in one process"
    return Problem(where, saw, want, difference.fix, number)


@contextlib.contextmanager
def on_a_rank(model: nn.Module, layers: Mapping[str, LayerPlan], ranks: int, every_block: bool) -> Iterator[set[str]]:
    """Cut a model's parameters and let its layers take and give a rank's tokens, for a while.

    Args:
        model: on the meta device.
        layers: what its modules do on a rank.
        ranks: tensor-parallel ones.
        every_block: not only one of those that are alike, and called alike.

    Returns:
        The names of modules whose graphs are others than in one process by that.
    """
    parts: dict[nn.Parameter, nn.Parameter] = {}
    skipped = {name for name, layer in layers.items() if layer.gathers or layer.scatters or layer.takes_rows}
    alike = _Alike(skipped)
    forwards: dict[str, Callable[..., Any]] = {name: _moving(model, name, layers[name], ranks) for name in skipped}
    for n, block in enumerate(() if every_block else model.layers):  # type: ignore[arg-type]
        below = {k.removeprefix(f"layers.{n}."): v for k, v in layers.items() if k.startswith(f"layers.{n}.")}
        forwards[f"layers.{n}"] = alike.once(f"layers.{n}", block.forward, (kind_of(block), repr(below)))
    with contextlib.ExitStack() as changed:
        for name, layer in layers.items():
            held = model.get_submodule(name)._parameters
            for own, placement in layer.placements.items():
                whole = held[own]
                assert whole is not None  # noqa: S101  # it was exported
                if whole not in parts:
                    shape = local_shape(tuple(whole.shape), (placement,), (ranks,))
                    part = nn.Parameter(whole.new_empty(shape), whole.requires_grad)
                    parts |= {whole: part, part: part}  # a module may have two names
                changed.enter_context(put(held, own, parts[whole]))
        for name, forward in forwards.items():
            changed.enter_context(put(vars(model.get_submodule(name)), "forward", forward))
        yield skipped


@contextlib.contextmanager
def put(into: dict[str, Any], key: str, value: object) -> Iterator[None]:
    """An entry of a dict, for a while."""
    before = {key: into[key]} if key in into else {}
    into[key] = value
    try:
        yield
    finally:
        del into[key]
        into.update(before)


def _moving(model: nn.Module, name: str, layer: LayerPlan, ranks: int) -> Callable[[Tensor], Tensor]:
    """A layer's forward with tokens as on a rank; their values are of no interest."""
    forward = model.get_submodule(name).forward

    def moving(x: Tensor) -> Tensor:
        x = torch.cat([x] * ranks) if layer.gathers else x.chunk(ranks)[0] if layer.takes_rows else x
        return forward(x).chunk(ranks)[0] if layer.scatters else forward(x)

    return moving


class _Alike:
    """Blocks of which one is run for all that are alike, and are called with alike arguments.

    Args:
        skipped: takes the names of the others.
    """

    def __init__(self, skipped: set[str]) -> None:
        self._skipped = skipped
        self._results: dict[object, Any] = {}

    def once(self, name: str, forward: Callable[..., Any], kind: object) -> Callable[..., Any]:
        """Give a block's forward, which runs it if it is the first of its kind."""

        def called(*args: Any, **kwargs: Any) -> Any:
            leaves = pytree.tree_leaves((args, kwargs))
            tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
            given = [(tuple(x.shape), x.dtype) if isinstance(x, Tensor) else repr(x) for x in leaves]
            key = kind, repr(given)
            if key not in self._results or not tensors:
                self._results[key] = forward(*args, **kwargs)
                return self._results[key]
            self._skipped.add(name)
            x, *others = tensors
            for other in others:
                other.new_empty(0)  # that it is read is compared
            made = lambda result: x.new_empty(result.shape, dtype=result.dtype)  # noqa: E731
            return pytree.tree_map_only(Tensor, made, self._results[key])

        return called
