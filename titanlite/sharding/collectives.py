"""Select a rule for each operator, and derive the collectives, from known placements.

An operator takes the rule that moves the fewest bytes of its inputs and output; a sharded parameter is never moved. A
tensor that has to be moved has one `Move` for all consumers that need the same.

The gradient of a tensor is placed as the tensor is, with one exception: an operator that computes parts from a whole
input gives it a partial gradient. It is summed where the tensor enters such operators, once for all of them (the f of
Megatron-LM, Shoeybi et al. 2019, section 3); for tensors computed from weights alone, at the weight, so that all such
gradients are summed together, once a step.
"""

from collections import defaultdict
from collections.abc import Iterator
from typing import Literal, NamedTuple

import torch
from torch.distributed.tensor import Partial, Shard
from torch.distributed.tensor.placement_types import Placement
from torch.fx import Node

from titanlite.sharding.graph import is_item, modules_of, tensor_inputs, value
from titanlite.sharding.op_rules import MATMULS, Rule
from titanlite.sharding.plan import PARTIAL, REPLICATE, Collective, Kind, Move, Placements, Step, local_shape
from titanlite.sharding.propagate import Propagation
from titanlite.sharding.rules import is_weight_of
from titanlite.sharding.sent_bytes import sent_bytes

_LATENCY = 2_000_000  # of a collective, in bytes: 10 µs at 200 GB/s; without it two cheap moves would beat one


class Hop(NamedTuple):
    """One step of a move, on one axis."""

    axis: int
    source: Placement
    target: Placement
    forward: Kind | None  # the collective; None: it needs none
    backward: Kind | None  # the gradient's collective
    gradient: Placement  # of the gradient that comes back
    shape: tuple[int, ...]  # of the whole on this axis, on one rank of the other axes


_Pass = tuple[Literal["forward", "backward"], Kind | None, Placement, Placement]


def hops(move: Move, shape: tuple[int, ...], sizes: tuple[int, ...]) -> Iterator[Hop]:
    """Yield the steps of a move in order: gathers and reductions before splits.

    Args:
        move: of a tensor.
        shape: of the whole tensor.
        sizes: ranks along each axis.
    """
    at = list(move.source)

    def hop(axis: int, target: Placement, partial: bool) -> Hop:
        others = tuple(REPLICATE if i == axis else p for i, p in enumerate(at))
        source, at[axis] = at[axis], target
        kinds, gradient = _kinds(source, target, partial), _gradient_placement(target, partial)
        return Hop(axis, source, target, *kinds, gradient, local_shape(shape, others, sizes))

    left = [a for a in range(len(sizes)) if at[a] != move.target[a] or move.partial_gradient[a]]
    left.sort(key=lambda axis: isinstance(move.target[axis], Shard))
    while left:
        # A dim that another axis still splits must wait: parts of parts would be in another order.
        free = [a for a in left if not any(isinstance(p, Shard) and p == move.target[a] for p in at)]
        if free:
            yield hop(free[0], move.target[free[0]], move.partial_gradient[free[0]])
            left.remove(free[0])
        else:
            yield hop(next(a for a in left if isinstance(at[a], Shard)), REPLICATE, False)


def _gradient_placement(placement: Placement, is_partial: bool) -> Placement:
    """Return the placement of a tensor's gradient: its shard; else partial if `is_partial`, or whole."""
    if isinstance(placement, Shard):
        return placement
    return PARTIAL if is_partial else REPLICATE


def _kinds(source: Placement, target: Placement, partial_gradient: bool) -> tuple[Kind | None, Kind | None]:
    """Return the collectives of one hop, forward and backward."""
    if isinstance(source, Partial):
        return ("reduce_scatter", "all_gather") if isinstance(target, Shard) else ("all_reduce", None)
    if isinstance(source, Shard):
        if isinstance(target, Shard):
            return "all_to_all", "all_to_all"
        return "all_gather", "reduce_scatter" if partial_gradient else None
    if isinstance(target, Shard):
        return None, "all_gather"
    return None, "all_reduce"


class Selection:
    """The rules and moves of a graph, after propagation.

    Attributes:
        rules: operator → one rule per axis.
        steps: by name of the operator's tensor.
        gradients: moves of parameters and inputs whose gradient is a partial sum, by name.
        consumers: of each move: (operator, position of the tensor among its inputs).
    """

    def __init__(self, propagation: Propagation) -> None:
        self._known, self.graph = propagation, propagation.graph
        self._axes = list(propagation.axes)
        self._sizes = tuple(propagation.axes.values())
        self.rules = {node: self._choose(node) for node in self.graph.operators}
        self.consumers: dict[Move, list[tuple[Node, int]]] = defaultdict(list)
        self.gradients: dict[str, Move] = {}
        self.steps: dict[str, Step] = {}
        self._place()

    def placements(self, node: Node) -> Placements:
        """Return a tensor's placements."""
        return tuple(self._known.placement(node, axis) for axis in self._axes)

    def _choose(self, node: Node) -> tuple[Rule, ...]:
        """Choose one rule per axis; a dim of a tensor is split on one axis only."""
        sources = tensor_inputs(node)
        has_several = isinstance(node.meta["val"], tuple | list)
        chosen: list[Rule] = []
        for axis in self._axes:
            final = self._known.placement(node, axis)
            best: tuple[tuple[float, int], Rule] | None = None
            for rule in self._known.rules[node][axis]:
                if any(_share_a_dim(rule, other) for other in chosen) or (has_several and rule.output != final):
                    continue
                if is_item(node) and rule.inputs[0] != self._known.placement(sources[0], axis):
                    continue  # pieces are moved one by one
                cost = self._cost(node, sources, rule, axis, final)
                if best is None or cost < best[0]:
                    best = cost, rule
            assert best is not None  # noqa: S101  # the rule with everything whole is always there
            chosen.append(best[1])
        return tuple(chosen)

    def _cost(self, node: Node, sources: list[Node], rule: Rule, axis: str, final: Placement) -> tuple[float, int]:
        """Return (bytes sent, number of hops), to be minimised.

        Sums of partial gradients do not count: for large weights they would make ranks repeat each other's work.
        """
        bytes_moved, n_hops = 0.0, 0
        partial = _makes_partial_gradients(rule)
        needs = [(s, self._known.placement(s, axis), p, partial) for s, p in zip(sources, rule.inputs, strict=True)]
        for tensor, source, target, gradient in [*needs, (node, rule.output, final, False)]:
            if source == target:
                continue
            if tensor in self.graph.parameters and isinstance(source, Shard):
                return float("inf"), 0
            n_hops += 1
            forward, backward = _kinds(source, target, gradient)
            for kind in (forward, backward if tensor in self.graph.trained else None):
                if kind:
                    whole = value(tensor).numel() * value(tensor).element_size()
                    bytes_moved += _LATENCY + sent_bytes(kind, whole, self._known.axes[axis])
        return bytes_moved, n_hops

    def _place(self) -> None:
        """Make the moves, last operator first, so that the gradients that come back are known."""
        names, count = self.graph.names, range(len(self._axes))
        # Consumers of a tensor and, per axis, whether the gradient that they give it is a partial sum.
        given: dict[Node, list[tuple[Node, int, tuple[bool, ...]]]] = defaultdict(list)
        partial_at: dict[Node, tuple[bool, ...]] = {}
        inputs: dict[Node, list[Move | None]] = {}
        for node in [*reversed(self.graph.operators), *(n for n in names if n.op == "placeholder")]:
            placed = self.placements(node)
            # A tensor that is computed from weights alone hands a partial gradient on, if all its gradients are.
            of_weights = node in self.graph.of_weights and node in self.graph.trained
            handed_on = tuple(
                of_weights
                and bool(given[node])
                and all(p[a] and self.rules[user][a].inputs[i] == placed[a] for user, i, p in given[node])
                for a in count
            )
            partial_at[node] = handed_on
            for user, i, partial in given[node]:
                target = tuple(rule.inputs[i] for rule in self.rules[user])
                own = tuple(p and not h for p, h in zip(partial, handed_on, strict=True))
                move = Move(names[node], placed, target, own)
                inputs[user][i] = move
                self.consumers[move].append((user, i))
            if node.op == "placeholder":
                if any(handed_on):
                    self.gradients[names[node]] = Move(names[node], placed, placed, handed_on)
                continue
            rules, sources = self.rules[node], tensor_inputs(node)
            inputs[node] = [None] * len(sources)
            for i, source in enumerate(sources):
                partial = tuple(
                    source in self.graph.trained
                    and rules[a].inputs[i].is_replicate()
                    and (_makes_partial_gradients(rules[a]) or handed_on[a])
                    for a in count
                )
                given[source].append((node, i, partial))
        for node in self.graph.operators:
            computed = tuple(rule.output for rule in self.rules[node])
            output = Move(names[node], computed, self.placements(node), (False,) * len(self._axes))
            self.steps[names[node]] = Step(tuple(m for m in inputs[node] if m), computed, output)

    def collectives(self) -> list[Collective]:
        """Return all collectives of one forward and one backward, in order of their tensors."""
        nodes = {name: node for node, name in self.graph.names.items()}
        after: dict[Node, list[Move]] = defaultdict(list)
        for move in self.consumers:
            after[nodes[move.tensor]].append(move)
        found: list[Collective] = []
        for node, name in self.graph.names.items():
            if name in self.gradients:
                found += self._of_move(node, self.gradients[name], [])
            if name in self.steps:
                found += self._statistics(node)
                found += self._of_move(node, self.steps[name].output, [])
            for move in after[node]:
                found += self._of_move(node, move, self.consumers[move])
        backward = [c for c in reversed(found) if c.direction == "backward"]
        return [*(c for c in found if c.direction == "forward"), *backward]

    def _of_move(self, node: Node, move: Move, consumers: list[tuple[Node, int]]) -> Iterator[Collective]:
        tensor = value(node)
        for hop in hops(move, tuple(tensor.shape), self._sizes):
            there, back = (hop.source, hop.target), (hop.gradient, _gradient_placement(hop.source, False))
            passes: list[_Pass] = [("forward", hop.forward, *there)]
            if node in self.graph.trained:
                passes.append(("backward", hop.backward, *back))
            for direction, kind, source, target in passes:
                if kind is None:
                    continue
                size = torch.Size(hop.shape).numel() * tensor.element_size()
                yield Collective(
                    kind=kind,
                    axis=self._axes[hop.axis],
                    tensor=move.tensor,
                    module=self._boundary(node, [user for user, _ in consumers]),
                    shape=hop.shape,
                    dtype=str(tensor.dtype).removeprefix("torch."),
                    wire_bytes=sent_bytes(kind, size, self._sizes[hop.axis]),
                    direction=direction,
                    source=source,
                    target=target,
                    consumers=tuple(self.graph.names[user] for user, _ in consumers),
                    asked=self._is_asked(node, hop, consumers),
                )

    def _statistics(self, node: Node) -> Iterator[Collective]:
        """Yield the exchange of statistics inside an operator."""
        for axis, rule in zip(self._axes, self.rules[node], strict=True):
            if rule.statistics:
                size = self._known.axes[axis]
                shape = (size, rule.statistics, value(tensor_inputs(node)[0]).shape[0])
                sent = sent_bytes("all_gather", 4 * torch.Size(shape).numel(), size)
                name, module = self.graph.names[node], self.graph.home(node)
                places = Shard(0), REPLICATE
                yield Collective("all_gather", axis, name, module, shape, "float32", sent, "forward", *places)

    def _boundary(self, node: Node, consumers: list[Node]) -> str:
        """Return the innermost module of all consumers; without any, the tensor's."""
        if not consumers:
            return self.graph.home(node)
        common = [m for m in modules_of(consumers[0]) if all(m in modules_of(other) for other in consumers)]
        return (common or [""])[-1]

    def _is_asked(self, node: Node, hop: Hop, consumers: list[tuple[Node, int]]) -> bool:
        """Return whether an annotation asks for a collective: see `Collective.asked`."""
        if hop.forward is None or isinstance(hop.source, Partial):
            return True
        if not consumers:
            return node in self._known.pinned
        return hop.forward == "all_gather" and all(
            user.target in MATMULS and not is_weight_of(user, i) and _shards_another(self.rules[user][hop.axis], i)
            for user, i in consumers
        )


def _makes_partial_gradients(rule: Rule) -> bool:
    """Return whether a whole input gets a partial gradient: the operator has another tensor that is not whole."""
    return any(not p.is_replicate() for p in (*rule.inputs, rule.output))


def _share_a_dim(rule: Rule, other: Rule) -> bool:
    pairs = zip((*rule.inputs, rule.output), (*other.inputs, other.output), strict=True)
    return any(isinstance(a, Shard) and a == b for a, b in pairs)


def _shards_another(rule: Rule, position: int) -> bool:
    return any(isinstance(p, Shard) for i, p in enumerate(rule.inputs) if i != position)
