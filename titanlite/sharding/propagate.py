"""Spread placements from annotated tensors to all others, forward and backward, until nothing changes.

There are three rounds. In the first, placements spread only from annotated weights; in the second, also from annotated
activations and inputs. In a single round, the token shards of a sequence-parallel residual stream would also reach
attention, which should be split by heads. The third round spreads "replicate", which changes no placement, but records
that an annotation decided it.

A placement is set once and never changed, so the rounds end, and

- an annotated tensor keeps its placement;
- earlier rounds win over later ones. Within a sweep, the first sharded input of an operator wins: the weight of a
  matmul, then the inputs in order.

Partial sums are not spread. A matmul over a sharded dim gives its output no placement, so that a consumer may give it a
shard: this turns an all-reduce into a reduce-scatter, without a special case.
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
    """A placement, its origin, and the round from which on it spreads."""

    placement: Placement
    origin: PlacementOrigin
    since: int = WEIGHTS


class Propagation:
    """Spreads the placements of annotated tensors over a graph.

    Attributes:
        decided: the decision for each tensor; a tensor without one is whole.
        rules: the sharding rules of each operator.
    """

    def __init__(self, graph: Graph, pinned: Mapping[Node, Pinned], ranks: int) -> None:
        self.graph, self.pinned, self.ranks = graph, pinned, ranks
        self.rules = {n: rules_of(n, ranks) for n in graph.operators}
        self._inputs = {n: tensor_inputs(n) for n in graph.operators}
        self._round = WEIGHTS
        default = PlacementDecision(REPLICATE, PlacementOrigin("default"))
        self.decided = {n: default for n in graph.names if n.op == "placeholder" and n not in graph.parameters}
        for node, (placement, text, is_activation) in pinned.items():
            since = ACTIVATIONS if is_activation else WEIGHTS
            self.decided[node] = PlacementDecision(placement, PlacementOrigin("annotation", text), since)

    def run(self) -> None:
        """Spread placements, round by round, until nothing changes."""
        for self._round in (WEIGHTS, ACTIVATIONS):
            changed = True
            while changed:
                placed = [self._forward(node) for node in self.graph.operators]
                placed += [self._backward(node) for node in reversed(self.graph.operators)]
                changed = any(placed)
        self._spread_replicate()

    def placement(self, node: Node) -> Placement:
        """Return the placement of a tensor, replicated by default."""
        known = self.decided.get(node)
        return known.placement if known else REPLICATE

    def _shard(self, node: Node) -> Shard | None:
        """Return the shard of a tensor if it spreads in this round, else None."""
        known = self.decided.get(node)
        visible = known and known.since <= self._round and isinstance(known.placement, Shard)
        return known.placement if visible else None  # type: ignore[return-value,union-attr]

    def _decide(self, node: Node, placement: Placement, origin: PlacementOrigin) -> bool:
        """Give a tensor a placement; return False if it already has one, or if this one is impossible."""
        if node in self.decided or not self._is_possible(node, placement):
            return False
        self.decided[node] = PlacementDecision(placement, origin)
        return True

    def _is_possible(self, node: Node, placement: Placement) -> bool:
        """Return whether a tensor can have a placement. For an operator with several outputs, a rule must have it."""
        if isinstance(node.meta["val"], tuple | list):
            return any(rule.output == placement for rule in self.rules[node])
        return not isinstance(placement, Shard) or value(node).shape[placement.dim] % self.ranks == 0

    def _misplaced(self, node: Node, rule: Rule) -> int:
        """Return the number of inputs that a rule would move; 1000 with a sharded parameter, which must not move."""
        count = 0
        for source, needed in zip(self._inputs[node], rule.inputs, strict=True):
            known = self.decided.get(source)
            if known and known.placement != needed:
                if source in self.graph.parameters and isinstance(known.placement, Shard):
                    return 1000
                count += 1
        return count

    def _best(self, node: Node, rules: list[Rule]) -> Rule | None:
        """Return the rule that moves the fewest inputs and no sharded parameter, or None."""
        counts = [self._misplaced(node, rule) for rule in rules]
        return rules[counts.index(min(counts))] if counts and min(counts) < 1000 else None

    def _forward(self, node: Node) -> bool:
        """Place an operator's output, or its weight, to match a sharded input; return whether anything changed."""
        changed = False
        sources = self._inputs[node]
        order = range(len(sources))
        for i in [1, 0, *order[2:]] if node.target in MATMULS else order:
            shard = self._shard(sources[i])
            if shard is None:
                continue
            fitting = [rule for rule in self.rules[node] if rule.inputs[i] == shard]
            if node not in self.decided:
                rule = self._best(node, [r for r in fitting if isinstance(r.output, Shard)])
                if rule:
                    changed |= self._decide(node, rule.output, PlacementOrigin("forward", self.graph.names[sources[i]]))
            for rule in fitting:  # place a weight whose input is split along the contracted dim
                if isinstance(rule.output, Partial):
                    changed |= self._infer(node, rule, sources[i])
        return changed

    def _infer(self, node: Node, rule: Rule, source: Node) -> bool:
        origin = PlacementOrigin("inferred", self.graph.names[source])
        changed = False
        for parameter, needed in zip(self._inputs[node], rule.inputs, strict=True):
            if parameter in self.graph.parameters and isinstance(needed, Shard):
                changed |= self._decide(parameter, needed, origin)
        return changed

    def _backward(self, node: Node) -> bool:
        """Place an operator's inputs to match its sharded output; return whether anything changed."""
        shard = self._shard(node)
        rule = shard and self._best(node, [r for r in self.rules[node] if r.output == shard])
        changed = False
        for source, needed in zip(self._inputs[node], rule.inputs, strict=True) if rule else ():
            if isinstance(needed, Shard):
                reason = "inferred" if source in self.graph.parameters else "backward"
                changed |= self._decide(source, needed, PlacementOrigin(reason, self.graph.names[node]))
        return changed

    def _spread_replicate(self) -> None:
        """Record an activation annotated as whole as the origin of undecided tensors that are computed with it."""
        left = [n for n, known in self.pinned.items() if known.is_activation and known.placement.is_replicate()]
        while left:
            node = left.pop()
            name = self.graph.names[node]
            near = [(user, PlacementOrigin("forward", name)) for user in node.users]
            near += [(source, PlacementOrigin("backward", name)) for source in self._inputs.get(node, ())]
            for other, origin in near:
                if other in self.rules and other not in self.decided:
                    self.decided[other] = PlacementDecision(REPLICATE, origin, REPLICATED)
                    left.append(other)
