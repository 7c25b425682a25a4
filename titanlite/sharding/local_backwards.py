"""Whether a user's own code in backward computes on a rank what it does in one process.

A graph of the model holds its forward. Backward of torch's operators follows from that; an `autograd.Function`, a hook
or an operator of the user's own has code there, which may read a size off a tensor as forward may (`local_sizes.py`),
and trains another model in silence. Therefore the model is run on the meta device, forward and backward, on whole
tensors and on the parts of a rank: what such code calls in backward must be the same operators with the same numbers.
Sizes of results may differ: autograd compares the shape of each gradient with that of its tensor. So may what only
rearranges. With which tensors operators are called is not compared.

The same call on a part may still give no part of what it gives of the whole: under `g / g.norm(dim=-1)` a rank divides
by the norm of its own features. How a tensor is split is seen by its shapes in both places; what is computed of it must
follow a rule of its operator, as in forward (`rules.py`). A sum over what is split is a partial sum, and so is the
gradient of what every rank has whole. The trainer adds those up behind all of backward, so until then they may be
scaled or added to each other, and nothing else. And whatever such code gives as the gradient of something whole must be
one, or zero: what a rank makes of weights alone, as `0.01 * w`, would be added once for each rank.
"""

import copy
from collections.abc import Mapping
from inspect import getfile
from itertools import zip_longest
from math import prod

import torch
from torch import Tensor, fx, nn
from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import Placement
from torch.utils import _pytree as pytree

from titanlite.errors import Problem, ShardingError, describe
from titanlite.parallel.tensor import LayerPlan
from titanlite.sharding.backward_calls import Call, Given, Recorded, backward_of
from titanlite.sharding.graph import tensors_of
from titanlite.sharding.local_sizes import FIX, on_a_rank
from titanlite.sharding.outside_reads import no_outside_reads
from titanlite.sharding.plan import PARTIAL, REPLICATE, show
from titanlite.sharding.rules import rules_of

aten = torch.ops.aten
_ANY = 0
"""Runs of a tensor that a rank may have in any: it is whole, or the same everywhere, as zeros."""
_ZEROS = {aten.zeros, aten.zeros_like, aten.new_zeros}
_SCALES = {"mul", "div", "neg", "_to_copy", "detach", "sum", "expand"}
_ADDS = {"add", "sub"}
"""Operators, in place or not, that give of partial sums partial sums."""


def backward_in_one_process(model: nn.Module, tokens: int) -> Recorded:
    """Run a model forward and backward on the meta device, as it is.

    Args:
        model: on the meta device; as it was.
        tokens: M of a micro-step.

    Raises:
        ShardingError: it cannot be run there; or its forward computes with a weight outside of the layer that holds it.
    """
    model, file = copy.deepcopy(model), getfile(type(model))
    want = "code that runs, also on tensors without values (the meta device), forward and backward"
    with no_outside_reads(model):
        return backward_of(
            model, tokens, file, want, "change that line: no item(), no numpy; or tensor_parallel_degree = 1"
        )


def check_local_backwards(
    one: Recorded, model: nn.Module, tokens: int, layers: Mapping[str, LayerPlan], ranks: int
) -> None:
    """Refuse a model with code in backward that depends on sizes that are others on a rank.

    Args:
        one: what it does in one process.
        model: on the meta device; as it was.
        tokens: M of a micro-step.
        layers: what its modules do on a rank.
        ranks: tensor-parallel ones.

    Raises:
        ShardingError: each line that computes with other numbers, or of parts no parts, is in the message, up to the
            first from which on operators are others; or a backward cannot be run on the meta device.
    """
    file = getfile(type(model))
    part, want = copy.deepcopy(model), f"code that runs on the part of each tensor that one of {ranks} ranks has"
    with on_a_rank(part, layers, ranks, every_block=True):
        here = backward_of(part, tokens, file, want, FIX)
    problems: dict[object, Problem] = {}
    parts = _Parts(one, here, ranks)
    for call, own in zip_longest(one.calls, here.calls):
        found = _difference(call, own, ranks) or parts.problem(call, own)
        if found is not None:
            problems.setdefault((found.line, found.where), found)
        if call is None or own is None or call.operator != own.operator:
            break
    else:
        for given, own_given in zip_longest(one.given, here.given):
            found = parts.given(given, own_given)
            if found is not None:
                problems.setdefault((found.line, found.where), found)
    if problems:
        raise ShardingError(describe(file, list(problems.values())))


def _difference(one: Call | None, here: Call | None, ranks: int) -> Problem | None:
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


class _Parts:
    """How the tensors of backward are placed: by their shapes in one process and on a rank, and which are partial sums.

    Args:
        one: what backward calls in one process.
        here: on a rank.
        ranks: tensor-parallel ones.
    """

    def __init__(self, one: Recorded, here: Recorded, ranks: int) -> None:
        self._one, self._here, self._ranks = one, here, ranks
        self._partial: set[Tensor] = set()
        self._zeros: set[int] = set()
        self._runs: dict[Tensor, int] = {}

    def problem(self, call: Call, own: Call) -> Problem | None:
        """What an operator gives on a rank, if that is no part of what it gives in one process."""
        writes = call.operator._schema.is_mutable
        if writes:
            self._zeros -= {_memory(x) for x in tensors_of(call.given)[:1]}
        elif call.operator.overloadpacket in _ZEROS:
            self._zeros |= {_memory(x) for x in tensors_of(call.result)}
        placed = self._placements(call.given, own.given)
        given, results = [p for p, _ in placed], [p for p, _ in self._placements(call.result, own.result)]
        if all(p == REPLICATE for p in (*given, *results)):
            return None
        runs = {n for _, n in placed if n != _ANY}
        if len(runs) > 1 or (writes and placed[0][1] not in runs):  # elements of other tokens or features would meet
            given = [None if n > 1 else p for p, n in placed]
        if not writes:
            self._runs |= dict.fromkeys(tensors_of(call.result), max(runs, default=_ANY))
        if call.operator == aten.expand.default and given == [REPLICATE]:  # a scalar, say, to as much as a rank has
            return None
        outputs = _of_partial_sums(call.operator, given) if PARTIAL in given else _of_parts(call, given, self._ranks)
        if any(all(p == output for p in results) for output in outputs):
            return None
        if PARTIAL in outputs and all(p == REPLICATE for p in results):
            self._partial |= {self._one.root(x) for x in tensors_of(call.result)}
            return None
        shown = ", ".join(show(p) if p else "no part" for p in given)
        shapes = [" and ".join(str(list(x.shape)) for x in tensors_of(each)) for each in (own.given, own.result)]
        saw = f"{own.operator} of {shapes[0]}, which are {shown}, gives {shapes[1]} on one of {self._ranks} ranks"
        want = "a part of what it gives in one process"
        fix = "change that line: compute over dims that are not split, as a head's width; or tensor_parallel_degree = 1"
        return Problem(own.where, saw, want, fix, own.line)

    def given(self, one: Given | None, here: Given | None) -> Problem | None:
        """A gradient on a rank, if that is no part of what it is in one process, or would be added once per rank."""
        place = here or one
        assert place is not None  # noqa: S101  # one of both is there
        placed, runs = self._placement(one.tensor, here.tensor) if one and here else (None, _ANY)
        is_zero = one is not None and _memory(one.tensor) in self._zeros
        if placed == PARTIAL or is_zero or (isinstance(placed, Shard) and runs in (_ANY, 1)):
            return None
        shapes = [str(list(each.tensor.shape)) if each else "nothing" for each in (here, one)]
        if placed == REPLICATE:
            saw = f"a gradient {shapes[0]} that each of {self._ranks} ranks gives whole, and that is added up over them"
            want = "a sum over what a rank has of the incoming gradient, as (g * x).sum(0): each rank adds its part"
            fix = "leave to the optimizer what is of weights alone, as weight decay; or tensor_parallel_degree = 1"
        else:
            saw = f"a gradient {shapes[0]} on one of {self._ranks} ranks"
            want, fix = f"a part of {shapes[1]}, the gradient in one process", FIX
        return Problem(place.where, saw, want, fix, place.line)

    def _placements(self, whole: object, part: object) -> list[tuple[Placement | None, int]]:
        """Of each tensor."""
        return [
            self._placement(x, y) if x is not None and y is not None else (None, _ANY)
            for x, y in zip_longest(tensors_of(whole), tensors_of(part))
        ]

    def _placement(self, whole: Tensor, part: Tensor) -> tuple[Placement | None, int]:
        """None for a tensor that is no part; and in how many equal runs a rank has the split dim, `_ANY` if it is alike
        everywhere or not split."""
        root = self._one.root(whole)
        placed = _by_shape(whole, part, self._ranks)
        if placed == REPLICATE:
            return PARTIAL if root in self._partial or root in self._one.gradients else REPLICATE, _ANY
        split, runs = _by_shape(root, self._here.root(part), self._ranks), self._runs.get(root, 1)
        for call in self._one.rearranged(whole):  # a view may be of halves of two rows
            moved = _moved(call, split.dim, max(runs, 1), self._ranks) if isinstance(split, Shard) else None
            if moved is None:
                return None, _ANY
            split, runs = Shard(moved[0]), runs and moved[1]
        return (placed, runs) if placed == split else (None, _ANY)


def _memory(x: Tensor) -> int:
    return x.untyped_storage()._cdata


def _by_shape(whole: Tensor, part: Tensor, ranks: int) -> Placement | None:
    split = [d for d, (n, own) in enumerate(zip(whole.shape, part.shape, strict=False)) if n != own]
    if whole.ndim != part.ndim or len(split) > 1:
        return None
    if not split:
        return REPLICATE
    return Shard(split[0]) if whole.shape[split[0]] == part.shape[split[0]] * ranks else None


def _moved(call: Call, dim: int, runs: int, ranks: int) -> tuple[int, int] | None:
    """Which dim is split of a tensor that is rearranged, and in how many runs a rank has it.

    Unlike in forward the parts need not be contiguous: in [M, H, E] → [M·H, E] a rank has some of each token's rows, M
    runs of H / ranks. It has the elements whose index, in a row-major order, is its number when divided by `step`,
    modulo the ranks; a view leaves that order as it is.
    """
    if call.operator.overloadpacket == aten.permute:
        return next((after, runs) for after, d in enumerate(call.given[0][1]) if d % call.result.ndim == dim)
    if call.operator.overloadpacket == aten.as_strided:
        return None
    before, after = call.given[0][0].shape, call.result.shape
    step = prod(before[dim:]) // (runs * ranks)
    for d in range(len(after)):
        inner, outer = prod(after[d + 1 :]), prod(after[d:])
        if step % inner == 0 and outer % (step * ranks) == 0:
            return d, outer // (step * ranks)
    return None


def _of_parts(call: Call, given: list[Placement | None], ranks: int) -> list[Placement]:
    """Where an operator's results may be by its rules."""
    graph = fx.Graph()

    def node_of(x: Tensor) -> fx.Node:
        node = graph.placeholder("x")
        node.meta["val"] = x
        return node

    node = graph.call_function(call.operator, *pytree.tree_map_only(Tensor, node_of, call.given))
    node.meta["val"] = call.result
    try:
        return [rule.output for rule in rules_of(node, ranks, may_write=True) if list(rule.inputs) == given]
    except ShardingError:  # there are none
        return []


def _of_partial_sums(operator: torch._ops.OpOverload, given: list[Placement | None]) -> list[Placement]:
    is_rounded = operator.overloadpacket in (aten.div, aten.div_) and "mode" in operator._overloadname
    name = "" if is_rounded else operator.overloadpacket.__name__.removesuffix("_")
    others = [p for i, p in enumerate(given) if p != PARTIAL or i != given.index(PARTIAL)]
    is_scaled = name in _SCALES and all(p == REPLICATE for p in others) and (given[0] == PARTIAL or name == "mul")
    return [PARTIAL] if is_scaled or (name in _ADDS and given == [PARTIAL, PARTIAL]) else []
