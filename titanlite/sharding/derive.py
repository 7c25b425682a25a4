"""Derive a sharding plan from a model, its annotations and a mesh."""

from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from titanlite.sharding.annotations import pin
from titanlite.sharding.check import refuse_unasked
from titanlite.sharding.collectives import Selection
from titanlite.sharding.graph import Graph, export, value
from titanlite.sharding.plan import PlacedTensor, PlacementOrigin, Plan
from titanlite.sharding.propagate import Propagation


def plan_model(
    model: nn.Module,
    inputs: Sequence[Tensor],
    axes: Mapping[str, int],
    annotations: Mapping[str, str],
    sizes: Mapping[str, int] | None = None,
) -> Plan:
    """Derive the sharding plan of a model, and refuse what its annotations do not ask for.

    Args:
        model: parameters on the meta device, in the dtypes that the step computes in.
        inputs: on the meta device; their shapes are those of one micro-step, over all ranks of `axes`.
        axes: size of each mesh axis, by name, as {"tp": 8}.
        annotations: which dim of which tensor is split on which axis; see `annotations`.
        sizes: the model's dimensions by name, for messages: {"n_kv_heads": 8}.

    Returns:
        The plan.

    Raises:
        ShardingError: an annotation is impossible; a matmul weight is sharded nowhere and annotated nowhere; a partial
            sum is left whole without an annotation that says so; or the plan would need a collective that no
            annotation asks for. All problems are in the message.
    """
    graph = export(model, inputs)
    plan, selection = derive(graph, axes, annotations)
    refuse_unasked(graph, plan, selection, sizes or {})
    return plan


def derive(graph: Graph, axes: Mapping[str, int], annotations: Mapping[str, str]) -> tuple[Plan, Selection]:
    """Derive the plan of a graph, whatever it needs.

    Args:
        graph: the model.
        axes: size of each mesh axis, by name.
        annotations: which dim of which tensor is split on which axis.

    Returns:
        The plan, and how its rules were selected.

    Raises:
        ShardingError: an annotation is impossible, or nothing is known of an operator.
    """
    pinned = pin(graph, annotations, axes)
    propagation = Propagation(graph, pinned, axes)
    propagation.run()
    selection = Selection(propagation)
    tensors: dict[str, PlacedTensor] = {}
    for node, name in graph.names.items():
        known = propagation.decided[node]
        origins = tuple(known[a].origin if a in known else PlacementOrigin("default") for a in axes)
        shape, dtype = tuple(value(node).shape), str(value(node).dtype).removeprefix("torch.")
        tensors[name] = PlacedTensor(name, graph.home(node), shape, dtype, selection.placements(node), origins)
    collectives = tuple(selection.collectives())
    return Plan(dict(axes), tensors, collectives, selection.steps, selection.gradients), selection
