"""List the placements with which an operator can run without communication.

Every operator has the rule "everything whole". Its other rules are those of `op_rules.py`, or DTensor's if that file
has none. Partial sums are never inputs: they are resolved where they arise.
"""

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import Partial, Shard
from torch.distributed.tensor.placement_types import Placement
from torch.fx import Node
from torch.fx.node import map_arg

from titanlite.errors import Problem, ShardingError, describe
from titanlite.parallel.calls import arguments_of
from titanlite.sharding import dtensor_rules
from titanlite.sharding.graph import is_item, modules_of, tensor_inputs, value, values
from titanlite.sharding.op_rules import MATMULS, Rule, own_rules
from titanlite.sharding.plan import REPLICATE

aten = torch.ops.aten


def rules_of(node: Node, size: int) -> list[Rule]:
    """Return the rules of one operator, "everything whole" first; sharded dims are divisible by `size` ranks.

    Raises:
        ShardingError: no rules are known for the operator, or it changes a tensor in place.
    """
    if is_item(node):
        of = value(node)
        places = [REPLICATE, *(Shard(d) for d in range(of.ndim))]
        return _checked([Rule((place,), place) for place in places], [of], [of], size)
    target = node.target
    writes = isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable
    if writes and target is not aten.detach_.default:
        want = "operators that make new tensors: one tensor has one placement"
        raise _operator_refusal(node, want, "x = x + y for x += y")
    key = (node.target, _key(node.args), _key(tuple(sorted(node.kwargs.items()))), size)
    if key not in _known:
        _known[key] = _rules(node, size)
    return _known[key]


_known: dict[object, list[Rule]] = {}


def _rules(node: Node, size: int) -> list[Rule]:
    inputs, outputs = [value(n) for n in tensor_inputs(node)], values(node)
    whole = Rule((REPLICATE,) * len(inputs), REPLICATE)
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        raise _operator_refusal(node, "an operator with a sharding rule", "write it with operators of torch")
    found = own_rules(target, inputs, outputs[0], arguments_of(node), size)
    if found is None:
        found = _dtensor_rules(node, target, size)
    return _checked([whole, *found], inputs, outputs, size)


def _checked(found: Iterable[Rule], inputs: list[Tensor], outputs: list[Tensor], size: int) -> list[Rule]:
    """Return the rules whose sharded dims are divisible by `size`, without repetitions."""

    def divides(placement: Placement, tensor: Tensor) -> bool:
        return not isinstance(placement, Shard) or tensor.shape[placement.dim] % size == 0

    kept = [
        rule
        for rule in found
        if all(divides(p, t) for p, t in zip(rule.inputs, inputs, strict=True))
        and all(divides(rule.output, t) for t in outputs)
    ]
    return list(dict.fromkeys(kept))


def _dtensor_rules(node: Node, op: torch._ops.OpOverload, size: int) -> list[Rule]:
    """Return DTensor's rules that give all outputs of an operator the same placement."""
    _require_known_rules()
    found = []
    for inputs, outputs in dtensor_rules.rules(op, *map_arg((node.args, node.kwargs), value), size):
        first = outputs[0]
        if any(o != first for o in outputs) or (isinstance(first, Partial) and first.reduce_op not in ("sum", "avg")):
            continue
        found.append(Rule(inputs, first))
    if not found and not dtensor_rules.knows(op):
        fix = "write it with other operators, or add a rule to titanlite/sharding/op_rules.py"
        raise _operator_refusal(node, "an operator with a sharding rule, titanlite's own or DTensor's", fix)
    return found


def _operator_refusal(node: Node, want: str, fix: str) -> ShardingError:
    where = (modules_of(node) or ["the model"])[-1]
    return ShardingError(describe("sharding plan", [Problem(f"{node.name} of {where}", str(node.target), want, fix)]))


@functools.lru_cache
def _require_known_rules() -> None:
    wrong = dtensor_rules.self_test()
    if wrong:
        raise ShardingError(
            f"torch {torch.__version__}: DTensor's sharding rules are not those that titanlite was tested with\n    "
            + "\n    ".join(wrong)
            + "\n    want: the rules of torch 2.11 to 2.14\n    fix:  install one of these versions"
        )


def is_weight_of(node: Node, position: int) -> bool:
    """Return whether the tensor input at a position is a matmul's right operand, or an embedding's table."""
    return (node.target in MATMULS and position == 1) or (node.target is aten.embedding.default and position == 0)


def _key(argument: Any) -> Any:
    """Return the cache key of an argument: shape, strides and dtype of a tensor, the repr of others."""
    if isinstance(argument, Node):
        tensor = value(argument)
        return tuple(tensor.shape), tensor.stride(), tensor.dtype
    if isinstance(argument, Sequence) and not isinstance(argument, str):
        return tuple(_key(a) for a in argument)
    return repr(argument)
