"""Spread placements from annotated tensors to all others, forward and backward, until nothing changes.

There are three rounds. In the first only weights are sources; in the second annotated activations and inputs join. In
one round, the token shards of a sequence-parallel residual stream would flood the heads of attention. The third spreads
"replicate", which changes no placement, but records that an annotation decided it.

A placement is set once and never changed, so the rounds end, and

- an annotated tensor is never touched;
- earlier rounds win over later ones, and within a sweep the first reference of an operator: of a matmul its weight, of
  others the input that is split on most axes; then the inputs in order;
- an axis is on one dim of a tensor, and a dim that has an axis takes no second one.

Partial sums are not spread. A matmul over a sharded dim gives its output no placement, so that a consumer may give it a
shard: this makes a reduce-scatter of an all-reduce, without a special case.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from torch.distributed.tensor import Partial, Shard
from torch.distributed.tensor.placement_types import Placement
from torch.fx import Node

from titanlite.sharding.annotations import Pinned
from titanlite.sharding.graph import Graph, tensor_inputs, value
from titanlite.sharding.op_rules import MATMULS, Rule
from titanlite.sharding.plan import REPLICATE, PlacementOrigin
from titanlite.sharding.rules import rules_of

WEIGHTS, ACTIVATIONS, REPLICATED = range(3)


@dataclass(frozen=True)
class PlacementDecision:
    """A placement, its origin, and the round from which it is a source."""

    placement: Placement
    origin: PlacementOrigin
    since: int = WEIGHTS


class Propagation:
    """The placements of a graph's tensors.

    Args:
        graph: the model.
        pinned: annotated tensors.
        axes: size of each mesh axis, by name.

    Attributes:
        decided: node → axis → placement; what is missing is whole.
        rules: node → axis → the rules of its operator.
    """

    def __init__(self, graph: Graph, pinned: Mapping[Node, Pinned], axes: Mapping[str, int]) -> None:
        self.graph, self.axes = graph, axes
        self.pinned = pinned
        self.decided: dict[Node, dict[str, PlacementDecision]] = {node: {} for node in graph.names}
        self.rules = {n: {a: rules_of(n, size) for a, size in axes.items()} for n in graph.operators}
        self._inputs = {n: tensor_inputs(n) for n in graph.operators}
        self._round = WEIGHTS
        for node, known in self.decided.items():
            if node in pinned:
                placements, text, is_activation = pinned[node]
                since = ACTIVATIONS if is_activation else WEIGHTS
                for axis, placement in zip(axes, placements, strict=True):
                    known[axis] = PlacementDecision(placement, PlacementOrigin("annotation", text), since)
            elif node.op == "placeholder" and node not in graph.parameters:
                known.update(dict.fromkeys(axes, PlacementDecision(REPLICATE, PlacementOrigin("default"))))

    def run(self) -> None:
        """Spread until nothing changes."""
        for self._round in (WEIGHTS, ACTIVATIONS):
            changed = True
            while changed:
                placed = [self._forward(node) for node in self.graph.operators]
                placed += [self._backward(node) for node in reversed(self.graph.operators)]
                changed = any(placed)
        self._spread_replicate()

    def placement(self, node: Node, axis: str) -> Placement:
        """Return the placement of a tensor, replicated by default."""
        known = self.decided[node].get(axis)
        return known.placement if known else REPLICATE

    def _shard(self, node: Node, axis: str) -> Shard | None:
        """Return the shard of a tensor that is a source in this round."""
        known = self.decided[node].get(axis)
        visible = known and known.since <= self._round and isinstance(known.placement, Shard)
        return known.placement if visible else None  # type: ignore[return-value,union-attr]

    def _decide(self, node: Node, axis: str, placement: Placement, origin: PlacementOrigin) -> bool:
        """Give a tensor a shard, unless it has a placement on the axis, a shard of the dim, or cannot have it."""
        known = self.decided[node]
        if axis in known or any(other.placement == placement for other in known.values()):
            return False
        if not self._is_possible(node, axis, placement):
            return False
        known[axis] = PlacementDecision(placement, origin)
        return True

    def _is_possible(self, node: Node, axis: str, placement: Placement) -> bool:
        """Return whether a tensor can have a placement; of several outputs a rule must have it."""
        if isinstance(node.meta["val"], tuple | list):
            return any(rule.output == placement for rule in self.rules[node][axis])
        return not isinstance(placement, Shard) or value(node).shape[placement.dim] % self.axes[axis] == 0

    def _references(self, node: Node) -> list[int]:
        """Return the positions of an operator's inputs in order of precedence."""
        sources = self._inputs[node]
        if node.target in MATMULS:
            return [1, 0, *range(2, len(sources))]
        axes = [sum(self._shard(source, axis) is not None for axis in self.axes) for source in sources]
        return sorted(range(len(sources)), key=lambda i: -axes[i])

    def _misplaced(self, node: Node, axis: str, rule: Rule) -> int:
        """Count the inputs that a rule would move; 1000 for a sharded parameter, which cannot be moved."""
        count = 0
        for source, needed in zip(self._inputs[node], rule.inputs, strict=True):
            known = self.decided[source].get(axis)
            if known and known.placement != needed:
                if source in self.graph.parameters and isinstance(known.placement, Shard):
                    return 1000
                count += 1
        return count

    def _best(self, node: Node, axis: str, rules: list[Rule]) -> Rule | None:
        """Return the rule that moves the fewest inputs and no sharded parameter."""
        counts = [self._misplaced(node, axis, rule) for rule in rules]
        return rules[counts.index(min(counts))] if counts and min(counts) < 1000 else None

    def _forward(self, node: Node) -> bool:
        """Place an operator's output, or its weight, as an input says."""
        changed = False
        sources = self._inputs[node]
        for i in self._references(node):
            for axis in self.axes:
                shard = self._shard(sources[i], axis)
                if shard is None:
                    continue
                fitting = [rule for rule in self.rules[node][axis] if rule.inputs[i] == shard]
                origin = PlacementOrigin("forward", self.graph.names[sources[i]])
                if axis not in self.decided[node]:
                    rule = self._best(node, axis, [r for r in fitting if isinstance(r.output, Shard)])
                    if rule:
                        changed |= self._decide(node, axis, rule.output, origin)
                for rule in fitting:  # a weight whose input is split along the contracted dim
                    if isinstance(rule.output, Partial):
                        changed |= self._infer(node, axis, rule, sources[i])
        return changed

    def _infer(self, node: Node, axis: str, rule: Rule, source: Node) -> bool:
        origin = PlacementOrigin("inferred", self.graph.names[source])
        changed = False
        for parameter, needed in zip(self._inputs[node], rule.inputs, strict=True):
            if parameter in self.graph.parameters and isinstance(needed, Shard):
                changed |= self._decide(parameter, axis, needed, origin)
        return changed

    def _backward(self, node: Node) -> bool:
        """Place an operator's inputs as its output says."""
        changed = False
        for axis in self.axes:
            shard = self._shard(node, axis)
            if shard is None:
                continue
            rule = self._best(node, axis, [r for r in self.rules[node][axis] if r.output == shard])
            if rule is None:
                continue
            for source, needed in zip(self._inputs[node], rule.inputs, strict=True):
                if isinstance(needed, Shard):
                    reason = "inferred" if source in self.graph.parameters else "backward"
                    changed |= self._decide(source, axis, needed, PlacementOrigin(reason, self.graph.names[node]))
        return changed

    def _spread_replicate(self) -> None:
        """Mark undecided tensors that are computed with an activation that is annotated as whole."""
        for axis in self.axes:
            left = [
                node
                for node, known in self.pinned.items()
                if known.is_activation and self.placement(node, axis).is_replicate()
            ]
            while left:
                node = left.pop()
                name = self.graph.names[node]
                near = [(user, PlacementOrigin("forward", name)) for user in node.users]
                near += [(source, PlacementOrigin("backward", name)) for source in self._inputs.get(node, ())]
                for other, origin in near:
                    if other in self.rules and axis not in self.decided[other]:
                        self.decided[other][axis] = PlacementDecision(REPLICATE, origin, REPLICATED)
                        left.append(other)
