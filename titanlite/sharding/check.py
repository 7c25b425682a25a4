"""Refuse a plan that does what no annotation asks for.

Three things would make a plan slow or large in silence, and are errors: a collective that neither reduces a partial sum
nor gathers before a sharded matmul; a matmul weight that is whole on every rank without an annotation; a partial sum
that is all-reduced without an annotation of its consumers.
"""

import math
import re
from collections.abc import Mapping

from torch.distributed.tensor import Partial, Shard
from torch.distributed.tensor.placement_types import Placement
from torch.fx import Node

from titanlite.errors import Problem, ShardingError, describe
from titanlite.sharding.collectives import Selection
from titanlite.sharding.graph import Graph, tensor_inputs, value
from titanlite.sharding.op_rules import RESHAPES
from titanlite.sharding.plan import Collective, Plan, placement_text
from titanlite.sharding.reshape import lost_shard_reason, moved_shards
from titanlite.sharding.rules import is_weight_of


def refuse_unasked(graph: Graph, plan: Plan, selection: Selection, sizes: Mapping[str, int]) -> None:
    """Raise ShardingError, with every problem, if a plan does what no annotation asks for.

    Args:
        graph: the model.
        plan: of the model.
        selection: the rules of the plan.
        sizes: the model's dimensions by name, for messages.
    """
    nodes = {name: node for node, name in graph.names.items()}
    unasked = [c for c in plan.collectives if not c.asked and c.direction == "forward"]
    # A shard that a reshape breaks leaves what follows undecided, and may be the cause of all other problems.
    broken = [c for c in unasked if c.consumers and nodes[c.consumers[0]].target in RESHAPES]
    problems = [_unasked(nodes, plan, c, sizes) for c in _one_of_each(broken or unasked)]
    if not problems:
        problems = [*_unsharded_weights(graph, plan), *_undecided_sums(graph, plan, selection)]
    if problems:
        raise ShardingError(describe("sharding plan", problems))


def _one_of_each(collectives: list[Collective]) -> list[Collective]:
    """Keep the first of collectives that differ only in the number of their layer."""
    found: dict[object, Collective] = {}
    for c in collectives:
        found.setdefault((re.sub(r"_?\d+", "", f"{c.tensor} {c.module}"), c.axis, c.shape, c.source, c.target), c)
    return list(found.values())


def _unasked(nodes: Mapping[str, Node], plan: Plan, collective: Collective, sizes: Mapping[str, int]) -> Problem:
    axis, size = collective.axis, plan.axes[collective.axis]
    user = nodes[collective.consumers[0]] if collective.consumers else nodes[collective.tensor]
    source = collective.source
    want = f"{placement_text(source)} to go on"
    fixes: list[str] = []
    if isinstance(source, Shard) and user.target in RESHAPES:
        before, after = plan.tensors[collective.tensor].shape, tuple(value(user).shape)
        if source.dim in moved_shards(before, after, size):
            home = plan.tensors[user.name].module or user.name
            want = f"{home} to keep {placement_text(source)}, which the reshape allows"
        else:
            why = lost_shard_reason(before, after, source.dim, size)
            want = f"a shard that lives through the reshape to [{', '.join(map(str, after))}], which {why}"
            fixes.append(_divisible(before, after, source.dim, axis, size, sizes))
    else:
        want = f"one placement of the tensors that {user.name} ({user.target}) computes with"
    chains = [plan.why(collective.tensor, axis)]
    if user.target not in RESHAPES:  # another annotation placed the operator's other tensors
        others = [n for n in (*tensor_inputs(user), user) if n is not nodes[collective.tensor]]
        ways = [plan.why(name, axis) for name, n in nodes.items() if n in others]
        chains += [way for way in ways if way[-1].startswith("annotation") and way[-1] != chains[0][-1]][:1]
    annotated = [way[-1].removeprefix("annotation ") for way in chains if way[-1].startswith("annotation")]
    if len(annotated) > 1:
        fixes.append(f"another placement in one of the annotations {' and '.join(annotated)}")
    else:
        pattern = annotated[0].strip('"').partition(" = ")[0] if annotated else ""
        fixes.append(f'"{pattern}" = "replicate"' if annotated else "annotate it")
    seen = (
        f"{placement_text(source)} on {axis}, needed as {placement_text(collective.target)} by {user.name}: an unasked "
        f"{collective.kind} of {collective.wire_bytes / 2**20:.1f} MiB\n    because: "
        + "\n    and: ".join("\n        <- ".join(_shortened(way)) for way in chains)
    )
    return Problem(plan.shown(collective.tensor), seen, want, ", or ".join(f for f in fixes if f))


def _shortened(chain: list[str]) -> list[str]:
    return [*chain[:4], f"{len(chain) - 7} more", *chain[-3:]] if len(chain) > 8 else chain


def _divisible(
    before: tuple[int, ...], after: tuple[int, ...], dim: int, axis: str, size: int, sizes: Mapping[str, int]
) -> str:
    """Name the degree that a reshape allows, with the model's dimensions."""
    outer = moved_shards(before, after, 1)
    if dim not in outer:
        return ""
    limit = after[outer[dim]]
    known = [name for name, n in sizes.items() if n == limit]
    degree = "tensor_parallel_degree" if axis == "tp" else axis
    what = f"{' or '.join(known)} {limit}" if known else f"the dim of size {limit}"
    return f"{what} is not divisible by {degree} {size}: use {math.gcd(limit, size)}"


def _unsharded_weights(graph: Graph, plan: Plan) -> list[Problem]:
    """Find matrices that are whole on every rank and axis, and not annotated."""
    problems: dict[str, Problem] = {}
    for parameter, name in graph.names.items():
        if parameter not in graph.parameters:
            continue
        placed = plan.tensors[name]
        decided = any(o.reason != "default" for o in placed.origins)
        uses = [] if decided else _matmuls(parameter)
        if uses:
            where = plan.shown(name)
            axis = next(iter(plan.axes))
            seen = f"whole on every rank, and no annotation says so; used by {uses[0].name} ({uses[0].target})"
            want = "a sharded weight, or one that is whole on purpose"
            pattern = re.sub(r"\b\d+\b", "*", name)
            fix = f'"{pattern}" = "{axis}:0" (its output features), "{axis}:1" (its input features) or "replicate"'
            problems.setdefault(pattern, Problem(where, seen, want, fix))
    return list(problems.values())


def _matmuls(parameter: Node) -> list[Node]:
    """Return the matmuls and look-ups whose matrix is a parameter, through casts and views."""
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


def _undecided_sums(graph: Graph, plan: Plan, selection: Selection) -> list[Problem]:
    """Find partial sums that are made whole although no annotation places their consumers."""
    problems: dict[str, Problem] = {}
    for node in graph.operators:
        placed = plan.tensors[graph.names[node]]
        pairs: list[tuple[str, Placement, Placement]] = [
            (axis, rule.output, final)
            for axis, rule, final in zip(plan.axes, selection.rules[node], placed.placements, strict=True)
        ]
        for (axis, computed, final), origin in zip(pairs, placed.origins, strict=True):
            if not isinstance(computed, Partial) or not final.is_replicate() or not placed.shape:
                continue
            if origin.reason == "default":
                where = "@" + re.sub(r"\b\d+\b", "*", placed.module)
                size = value(node).numel() * value(node).element_size() / 2**20
                seen = f"a partial sum on {axis}, and nothing says where it is wanted; all-reduced, {size:.1f} MiB"
                want = "a shard, for a reduce-scatter, or whole on purpose"
                fix = f'"{where}" = "{axis}:0" or "replicate"'
                problems.setdefault(where, Problem(plan.shown(placed.name), seen, want, fix))
    return list(problems.values())
