"""Refuse a plan with collectives or whole weights that no annotation asks for.

Three things would silently make a plan slow or large, and are errors. First, a collective that neither reduces a
partial sum nor gathers before a sharded matmul. Second, a matmul weight that is whole on every rank without an
annotation. Third, a partial sum that is all-reduced without an annotation of its consumers.
"""

import math
import re
from collections.abc import Mapping

from torch.distributed.tensor import Partial, Shard
from torch.fx import Node

from titanlite.errors import Problem, ShardingError, describe
from titanlite.sharding.graph import Graph, tensor_inputs, value
from titanlite.sharding.op_rules import MATMULS, RESHAPES
from titanlite.sharding.plan import Move, Plan, placement_text
from titanlite.sharding.reshape import lost_shard_reason, moved_shards
from titanlite.sharding.rules import is_weight_of
from titanlite.sharding.sent_bytes import sent_bytes


def refuse_unasked(graph: Graph, plan: Plan, sizes: Mapping[str, int]) -> None:
    """Raise ShardingError, with every problem, if a plan has collectives or whole weights that no annotation asks for.

    `sizes` are the model's dimensions by name, for messages.
    """
    nodes = {name: node for node, name in graph.names.items()}
    unasked = [move for move in plan.moves if move.forward and not _is_asked(move, nodes, plan)]
    # A shard that a reshape breaks leaves later tensors undecided, and may be the cause of all other problems.
    broken = [move for move in unasked if move.consumers and nodes[move.consumers[0]].target in RESHAPES]
    problems = [_unasked(nodes, plan, move, sizes) for move in _one_of_each(broken or unasked, plan)]
    if not problems:
        problems = [*_unsharded_weights(graph, plan), *_undecided_sums(graph, plan)]
    if problems:
        raise ShardingError(describe("sharding plan", problems))


def _is_asked(move: Move, nodes: Mapping[str, Node], plan: Plan) -> bool:
    """Return whether an annotation asks for a move: it reduces a partial sum, or gathers before a sharded matmul."""
    if isinstance(move.source, Partial):
        return True
    if not move.consumers:
        return plan.tensors[move.tensor].origin.reason == "annotation"
    return move.forward == "all_gather" and all(
        nodes[user].target in MATMULS
        and not is_weight_of(nodes[user], i)
        and any(isinstance(other.target, Shard) for n, other in enumerate(inputs) if n != i)
        for user in move.consumers
        for inputs in [plan.steps[user].inputs]
        for i, arriving in enumerate(inputs)
        if arriving is move
    )


def _one_of_each(moves: list[Move], plan: Plan) -> list[Move]:
    """Keep the first of several moves that differ only in their layer's number."""
    found: dict[object, Move] = {}
    for move in moves:
        at = plan.tensors[move.consumers[0] if move.consumers else move.tensor].module
        name, shape = re.sub(r"_?\d+", "", f"{move.tensor} {at}"), plan.tensors[move.tensor].shape
        found.setdefault((name, shape, move.source, move.target), move)
    return list(found.values())


def _unasked(nodes: Mapping[str, Node], plan: Plan, move: Move, sizes: Mapping[str, int]) -> Problem:
    assert move.forward is not None  # noqa: S101
    user = nodes[move.consumers[0] if move.consumers else move.tensor]
    source = move.source
    want = f"{placement_text(source)} to go on"
    fixes: list[str] = []
    if isinstance(source, Shard) and user.target in RESHAPES:
        before, after = plan.tensors[move.tensor].shape, tuple(value(user).shape)
        if source.dim in moved_shards(before, after, plan.ranks):
            home = plan.tensors[user.name].module or user.name
            want = f"{home} to keep {placement_text(source)}, which the reshape allows"
        else:
            why = lost_shard_reason(before, after, source.dim, plan.ranks)
            want = f"a shard that lives through the reshape to [{', '.join(map(str, after))}], which {why}"
            fixes.append(_divisible(before, after, source.dim, plan.ranks, sizes))
    else:
        want = f"one placement of the tensors that {user.name} ({user.target}) computes with"
    chains = [plan.why(move.tensor)]
    if user.target not in RESHAPES:  # another annotation placed the operator's other tensors
        others = [n for n in (*tensor_inputs(user), user) if n is not nodes[move.tensor]]
        ways = [plan.why(name) for name, n in nodes.items() if n in others]
        chains += [way for way in ways if way[-1].startswith("annotation") and way[-1] != chains[0][-1]][:1]
    annotated = [way[-1].removeprefix("annotation ") for way in chains if way[-1].startswith("annotation")]
    if len(annotated) > 1:
        fixes.append(f"another placement in one of the annotations {' and '.join(annotated)}")
    else:
        pattern = annotated[0].strip('"').partition(" = ")[0] if annotated else ""
        fixes.append(f'"{pattern}" = "replicate"' if annotated else "annotate it")
    sent = sent_bytes(move.forward, value(nodes[move.tensor]).nbytes, plan.ranks)
    seen = (
        f"{placement_text(source)} on tp, needed as {placement_text(move.target)} by {user.name}: an unasked "
        f"{move.forward} of {sent / 2**20:.1f} MiB\n    because: "
        + "\n    and: ".join("\n        <- ".join(_shortened(way)) for way in chains)
    )
    return Problem(plan.shown(move.tensor), seen, want, ", or ".join(f for f in fixes if f))


def _shortened(chain: list[str]) -> list[str]:
    return [*chain[:4], f"{len(chain) - 7} more", *chain[-3:]] if len(chain) > 8 else chain


def _divisible(before: tuple[int, ...], after: tuple[int, ...], dim: int, ranks: int, sizes: Mapping[str, int]) -> str:
    """Return a fix: the tensor-parallel degree with which a reshape keeps the shard; "" if no degree does."""
    outer = moved_shards(before, after, 1)
    if dim not in outer:
        return ""
    limit = after[outer[dim]]
    known = [name for name, n in sizes.items() if n == limit]
    what = f"{' or '.join(known)} {limit}" if known else f"the dim of size {limit}"
    return f"{what} is not divisible by tensor_parallel_degree {ranks}: use {math.gcd(limit, ranks)}"


def _unsharded_weights(graph: Graph, plan: Plan) -> list[Problem]:
    """Return a problem for each weight of a matmul that is whole on every rank without an annotation."""
    problems: dict[str, Problem] = {}
    for parameter, name in graph.names.items():
        if parameter not in graph.parameters:
            continue
        uses = _matmuls(parameter) if plan.tensors[name].origin.reason == "default" else []
        if uses:
            where = plan.shown(name)
            seen = f"whole on every rank, and no annotation says so; used by {uses[0].name} ({uses[0].target})"
            want = "a sharded weight, or one that is whole on purpose"
            pattern = re.sub(r"\b\d+\b", "*", name)
            fix = f'"{pattern}" = "tp:0" (its output features), "tp:1" (its input features) or "replicate"'
            problems.setdefault(pattern, Problem(where, seen, want, fix))
    return list(problems.values())


def _matmuls(parameter: Node) -> list[Node]:
    """Return the matmuls and embedding look-ups whose matrix is this parameter, possibly cast or viewed."""
    found: list[Node] = []
    left = [parameter]
    while left:
        node = left.pop()
        for user in node.users:
            inputs = tensor_inputs(user)
            if any(source is node and is_weight_of(user, i) for i, source in enumerate(inputs)):
                found.append(user)
            elif len(inputs) == 1:
                left.append(user)
    return found


def _undecided_sums(graph: Graph, plan: Plan) -> list[Problem]:
    """Return a problem for each partial sum that is all-reduced although no annotation places its consumers."""
    problems: dict[str, Problem] = {}
    for node in graph.operators:
        placed, computed = plan.tensors[graph.names[node]], plan.steps[graph.names[node]].output.source
        if not isinstance(computed, Partial) or not placed.placement.is_replicate() or not placed.shape:
            continue
        if placed.origin.reason == "default":
            where = "@" + re.sub(r"\b\d+\b", "*", placed.module)
            size = value(node).nbytes / 2**20
            seen = f"a partial sum on tp, and nothing says where it is wanted; all-reduced, {size:.1f} MiB"
            want = "a shard, for a reduce-scatter, or whole on purpose"
            fix = f'"{where}" = "tp:0" or "replicate"'
            problems.setdefault(where, Problem(plan.shown(placed.name), seen, want, fix))
    return list(problems.values())
