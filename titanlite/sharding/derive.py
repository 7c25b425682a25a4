"""Derive a sharding plan: placements, the rule of each operator, and the collectives between them.

An operator takes the rule that moves the fewest bytes of its inputs and output. A sharded parameter is never moved. A
tensor that has to be moved has one `Move` for all consumers that need the same placement.

The gradient of a tensor has the tensor's placement, with one exception: an operator that computes a part of its result
from a whole input gives this input a partial gradient. Partial gradients are summed once, where the tensor enters such
operators (the f of Megatron-LM, Shoeybi et al. 2019, section 3). For tensors computed from weights alone they are
summed at the weight, so that one sum a step is enough.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence

from torch import Tensor, nn
from torch.distributed.tensor import Partial, Shard
from torch.distributed.tensor.placement_types import Placement
from torch.fx import Node

from titanlite.sharding.annotations import pin
from titanlite.sharding.check import refuse_unasked
from titanlite.sharding.graph import Graph, export, is_item, tensor_inputs, value
from titanlite.sharding.op_rules import Rule
from titanlite.sharding.plan import Kind, Move, PlacedTensor, PlacementOrigin, Plan, Step
from titanlite.sharding.propagate import Propagation
from titanlite.sharding.sent_bytes import sent_bytes

_LATENCY = 2_000_000  # of a collective, in bytes (10 µs at 200 GB/s); without it two moves could cost less than one


def plan_model(
    model: nn.Module,
    inputs: Sequence[Tensor],
    ranks: int,
    annotations: Mapping[str, str],
    sizes: Mapping[str, int] | None = None,
) -> Plan:
    """Derive the sharding plan of a model, and refuse collectives and whole weights that no annotation asks for.

    Args:
        model: parameters on the meta device, in the dtypes that the step computes in.
        inputs: on the meta device; their shapes are those of one micro-step, over all ranks.
        ranks: tensor-parallel ranks.
        annotations: which dim of which tensor is split; see `annotations.py`.
        sizes: the model's dimensions by name, for messages: {"n_kv_heads": 8}.

    Raises:
        ShardingError: an annotation is impossible; a matmul weight is sharded nowhere and annotated nowhere; a partial
            sum is all-reduced without an annotation of its consumers; or the plan would need a collective that no
            annotation asks for. All problems are in the message.
    """
    graph = export(model, inputs)
    plan = derive(graph, ranks, annotations)
    refuse_unasked(graph, plan, sizes or {})
    return plan


def derive(graph: Graph, ranks: int, annotations: Mapping[str, str]) -> Plan:
    """Derive the plan of a graph, without the checks of `refuse_unasked`.

    Raises:
        ShardingError: an annotation is impossible, or an operator has no sharding rule.
    """
    known = Propagation(graph, pin(graph, annotations, ranks), ranks)
    known.run()
    rules = {node: _choose(node, known) for node in graph.operators}
    arriving, leaving, gradients = _moves(known, rules)
    tensors: dict[str, PlacedTensor] = {}
    moves: list[Move] = []
    steps: dict[str, Step] = {}
    for node, name in graph.names.items():
        decided, tensor = known.decided.get(node), value(node)
        origin = decided.origin if decided else PlacementOrigin("default")
        shape, dtype, placement = tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), known.placement(node)
        tensors[name] = PlacedTensor(name, graph.home(node), shape, dtype, placement, origin)
        moves += [gradients[name]] if name in gradients else []
        if node in rules:
            output = _move_of(graph, node, rules[node].output, placement, partial=False)
            steps[name] = Step(tuple(arriving[node, i] for i in range(len(tensor_inputs(node)))), output)
            moves.append(output)
        moves += leaving[node]
    return Plan(ranks, tensors, tuple(moves), steps, gradients)


def _choose(node: Node, known: Propagation) -> Rule:
    """Return the rule of an operator that costs least, or the first of several that do."""
    sources, final = tensor_inputs(node), known.placement(node)
    possible = known.rules[node]
    if isinstance(node.meta["val"], tuple | list):
        possible = [rule for rule in possible if rule.output == final]
    if is_item(node):  # a list is not moved, but its pieces
        possible = [rule for rule in possible if rule.inputs[0] == known.placement(sources[0])]
    return min(possible, key=lambda rule: _cost_of_rule(node, sources, rule, known))


def _cost_of_rule(node: Node, sources: list[Node], rule: Rule, known: Propagation) -> tuple[float, int]:
    """Return (bytes sent, number of moves) of a rule.

    All-reduces of partial gradients do not count: for large weights, a rule that repeats all work on every rank would
    else cost least.
    """
    bytes_moved, n_moves, partial = 0.0, 0, _makes_partial_gradients(rule)
    needs = [(s, known.placement(s), p, partial) for s, p in zip(sources, rule.inputs, strict=True)]
    for tensor, source, target, gradient in [*needs, (node, rule.output, known.placement(node), False)]:
        if source == target:
            continue
        if tensor in known.graph.parameters and isinstance(source, Shard):
            return float("inf"), 0
        n_moves += 1
        forward, backward = _kinds(source, target, gradient)
        for kind in (forward, backward if tensor in known.graph.trained else None):
            if kind:
                bytes_moved += _LATENCY + sent_bytes(kind, value(tensor).nbytes, known.ranks)
    return bytes_moved, n_moves


def _move_of(
    graph: Graph, node: Node, source: Placement, target: Placement, partial: bool, consumers: Sequence[Node] = ()
) -> Move:
    forward, backward = _kinds(source, target, partial)
    names = tuple(graph.names[user] for user in consumers)
    back = backward if node in graph.trained else None
    return Move(graph.names[node], source, target, partial, forward, back, names)


def _kinds(source: Placement, target: Placement, partial_gradient: bool) -> tuple[Kind | None, Kind | None]:
    """Return the collectives of a move in forward and in backward; None for no collective."""
    if source == target:
        return None, "all_reduce" if partial_gradient else None
    if isinstance(source, Partial):
        return ("reduce_scatter", "all_gather") if isinstance(target, Shard) else ("all_reduce", None)
    if isinstance(source, Shard):
        if isinstance(target, Shard):
            return "all_to_all", "all_to_all"
        return "all_gather", "reduce_scatter" if partial_gradient else None
    return None, "all_gather"


def _moves(
    known: Propagation, rules: Mapping[Node, Rule]
) -> tuple[dict[tuple[Node, int], Move], dict[Node, list[Move]], dict[str, Move]]:
    """Make the moves of all tensors, last operator first, as a move depends on the gradients from its consumers.

    Returns:
        The move of each input by (operator, position); each tensor's moves to its consumers; and by name the moves of
        parameters and inputs whose gradient is a partial sum.
    """
    graph = known.graph
    given: dict[Node, list[tuple[Node, int, bool]]] = defaultdict(list)  # (user, position, is gradient partial)
    arriving: dict[tuple[Node, int], Move] = {}
    leaving: dict[Node, list[Move]] = {}
    gradients: dict[str, Move] = {}
    held = [node for node in graph.names if node.op == "placeholder"]
    of_weights = graph.made_of(node for node in held if node not in graph.inputs) & graph.trained
    for node in [*reversed(graph.operators), *held]:
        placed = known.placement(node)
        # A tensor computed from weights alone passes a partial gradient on to them if all its gradients are partial.
        all_partial = all(p and rules[user].inputs[i] == placed for user, i, p in given[node])
        hands_on = node in of_weights and bool(given[node]) and all_partial
        alike: dict[tuple[Placement, bool], list[tuple[Node, int]]] = defaultdict(list)
        for user, i, partial in given[node]:
            alike[rules[user].inputs[i], partial and not hands_on].append((user, i))
        leaving[node] = []
        for (target, partial), users in alike.items():
            move = _move_of(graph, node, placed, target, partial, [user for user, _ in users])
            arriving |= dict.fromkeys(users, move)
            leaving[node].append(move)
        if node.op == "placeholder":
            if hands_on:
                gradients[graph.names[node]] = _move_of(graph, node, placed, placed, partial=True)
            continue
        rule = rules[node]
        makes_partial = _makes_partial_gradients(rule) or hands_on
        for i, source in enumerate(tensor_inputs(node)):
            is_partial = source in graph.trained and rule.inputs[i].is_replicate() and makes_partial
            given[source].append((node, i, is_partial))
    return arriving, leaving, gradients


def _makes_partial_gradients(rule: Rule) -> bool:
    """Return whether a rule gives whole inputs a partial gradient: another input, or the output, is not whole."""
    return any(not p.is_replicate() for p in (*rule.inputs, rule.output))
