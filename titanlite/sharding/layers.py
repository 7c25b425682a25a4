"""Derive the plan of each layer from a model's sharding plan: placements of its parameters, and its collectives.

The trainer runs a model's code on local tensors, so a collective can only be at the boundary of a layer that holds a
parameter (`parallel/tensor.py`). Each move of the plan is assigned to such a layer. A move that no layer can make is an
error, as results would be wrong without it.

    gathers      a linear layer whose output features are split: all ranks' tokens are gathered as its input
    scatters     a linear layer whose input features are split, or an embedding whose rows are split: the partial sums
                 of its output are reduced, and each rank gets its tokens
    takes_rows   an embedding that receives the indices of all tokens, and computes this rank's tokens only

Tensors computed from inputs and buffers alone are whole on every rank. Among blocks that are alike, only two are
planned, and stand for all (`representative_blocks.py`).
"""

import copy
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import nn
from torch.distributed.tensor import Partial, Shard
from torch.fx import Node

from titanlite.errors import Problem, ShardingError, describe
from titanlite.models.mistakes import is_own
from titanlite.parallel.tensor import LayerPlan
from titanlite.sharding.annotations import annotations_of
from titanlite.sharding.check import refuse_unasked
from titanlite.sharding.derive import derive
from titanlite.sharding.graph import Graph, export, tensor_inputs
from titanlite.sharding.plan import REPLICATE, Plan, placement_text
from titanlite.sharding.representative_blocks import PlannedLayers, for_all, representative_blocks
from titanlite.sharding.rules import is_weight_of
from titanlite.sharding.suggest_annotation import suggest_annotation

aten = torch.ops.aten
_TOKENS = Shard(0)


def planned_layers(
    graph: Graph, annotations: Mapping[str, str], ranks: int, sizes: Mapping[str, int]
) -> tuple[Plan, dict[str, LayerPlan]]:
    """Plan a graph from token ids to logits. Return its plan, and the plans by name of modules with a parameter in use.

    `sizes` are the model's dimensions by name, for messages.

    Raises:
        ShardingError: there is no plan, or no layer can make one of its moves. The message lists the problems.
    """
    plan = derive(graph, ranks, annotations)
    refuse_unasked(graph, plan, sizes)
    return plan, _Layers(graph, plan).found()


def plan_layers(
    model: nn.Module,
    tokens: int,
    ranks: int,
    dtype: torch.dtype | None = None,
    sizes: Mapping[str, int] | None = None,
) -> PlannedLayers:
    """Plan a model and each of its layers from its annotations.

    Args:
        model: on the meta device; has `sharding` and `layers`, and takes [M] int64 token ids.
        tokens: M of a micro-step.
        ranks: tensor-parallel ranks.
        dtype: in which the step computes; None: the dtype of the parameters.
        sizes: the model's dimensions by name, for messages.

    Raises:
        ShardingError: as `planned_layers`; the message also names changes of annotations that would help.
    """
    annotations, (fewer, stand_for) = annotations_of(model), representative_blocks(model)
    graphs: list[Graph] = []

    def planned(blocks: nn.Module, suggests: bool) -> tuple[Plan, dict[str, LayerPlan]]:
        graphs.append(_exported(blocks, tokens, dtype))
        try:
            return planned_layers(graphs[-1], annotations, ranks, sizes or {})
        except ShardingError as error:
            if not suggests:
                raise
            fixes = suggest_annotation(graphs, annotations, lambda graph, new: planned_layers(graph, new, ranks, {}))
            raise ShardingError(f"{error}{fixes}") from error

    if fewer is not model:
        try:
            found = for_all(fewer, *planned(fewer, suggests=not is_own(model)), stand_for)
        except ShardingError:
            if not is_own(model):
                raise
            found = None  # a user's code may refer to blocks by number
        if found:
            return found
    return PlannedLayers(*planned(model, suggests=True), [[n] for n in range(len(model.layers))])  # type: ignore[arg-type]


def _exported(model: nn.Module, tokens: int, dtype: torch.dtype | None) -> Graph:
    copied = copy.deepcopy(model)  # `model` must not change, and its code may store tensors
    for parameter in copied.parameters() if dtype is not None else ():
        parameter.data = parameter.data.to(dtype)
    return export(copied, [torch.empty(tokens, dtype=torch.long, device="meta")])


class _Layers:
    """Assigns the moves of one plan to the model's layers, and collects the moves that no layer can make."""

    def __init__(self, graph: Graph, plan: Plan) -> None:
        self.graph, self.plan = graph, plan
        self.problems: dict[str, Problem] = {}
        self.layers: dict[str, LayerPlan] = {}
        held = {node: name for node, name in graph.names.items() if node in graph.parameters and node.users}
        tied = {name: node for name, node in graph.aliases.items() if node in graph.parameters}
        for name, node in [*((name, node) for node, name in held.items()), *tied.items()]:
            module, _, own = name.rpartition(".")
            layer = self.layers.setdefault(module, LayerPlan({}))
            placements = {**layer.placements, own: plan.tensors[graph.names[node]].placement}
            self.layers[module] = replace(layer, placements=placements)
        given = (node for node in graph.names if node.op == "placeholder" and node not in graph.parameters)
        self.whole = graph.made_of(given)  # made of inputs, buffers and constants alone

    def found(self) -> dict[str, LayerPlan]:
        for node in self.graph.operators:
            if node not in self.whole:
                self._enter(node)
                self._leave(node)
        self._gradients()
        self._returned()
        for name, layer in self.layers.items():
            if layer.gathers and layer.scatters:
                want = "one of the two: its input features are split, or its output features"
                self._refuse(f"{name}.weight", "gathers its tokens and scatters them", want, "annotate its weight")
        if self.problems:
            raise ShardingError(describe("tensor-parallel layers", list(self.problems.values())))
        return self.layers

    def _enter(self, node: Node) -> None:
        """Assign the moves of an operator's inputs to its layer."""
        step = self.plan.steps[self.graph.names[node]]
        for i, (source, move) in enumerate(zip(tensor_inputs(node), step.inputs, strict=True)):
            at = REPLICATE if source in self.whole else move.source
            need, is_partial = move.target, move.partial_gradient
            if at == need and not is_partial:
                continue
            layer = self._layer(node)
            if at == _TOKENS and need == REPLICATE and is_partial and layer and node.target is aten.linear.default:
                homes = list(dict.fromkeys(self.plan.tensors[user].module for user in reversed(move.consumers)))
                if len(move.consumers) == 1:
                    self.layers[layer] = replace(self.layers[layer], gathers=True)
                    continue
                want = "one linear layer that gathers it; each would gather by itself"
                fix = f"one Linear with all parts of {', '.join(home.rpartition('.')[2] for home in homes)}"
                self._refuse(self._name(source), f"gathered for {', '.join(homes)}", want, fix)
            elif source in self.whole and need == _TOKENS and layer and node.target is aten.embedding.default and i:
                self.layers[layer] = replace(self.layers[layer], takes_rows=True)
            else:
                backward = ", with a gradient that is summed over the ranks" if is_partial else ""
                seen = (
                    f"{placement_text(at)}, needed as {placement_text(need)} by {node.name} ({node.target}){backward}"
                )
                self._refuse(self._name(source), seen, _MOVES, "annotate another dim, or tensor_parallel_degree = 1")

    def _leave(self, node: Node) -> None:
        """Assign the move of an operator's result to its layer."""
        name = self.graph.names[node]
        step = self.plan.steps[name]
        computed, final = step.output.source, step.output.target
        layer = self._layer(node)
        if node.target is aten.cross_entropy_loss.default and step.inputs[0].target == Shard(1):
            want = "a model that ends with its logits: the loss is the trainer's"
            self._refuse(self._name(node), "a loss", want, "return the logits")
        elif computed == final:
            return
        elif isinstance(computed, Partial) and final == _TOKENS and layer:
            self.layers[layer] = replace(self.layers[layer], scatters=True)
        else:
            seen = f"computed as {placement_text(computed)}, needed as {placement_text(final)}"
            self._refuse(self._name(node), seen, _MOVES, '"@module" = "tp:0" for the module that returns it')

    def _gradients(self) -> None:
        """Refuse a whole weight without a partial gradient: the trainer sums the gradients of all whole weights."""
        for node, name in self.graph.names.items():
            if node not in self.graph.parameters or node not in self.graph.trained:
                continue
            if not node.users and self.plan.tensors[name].placement != REPLICATE:
                want = "no annotation: nothing that is planned reads it; weights of experts are split by FSDP"
                self._refuse(name, "split by an annotation", want, "remove that")
            if node.users and self.plan.tensors[name].placement == REPLICATE and name not in self.plan.gradients:
                want = "a weight that is split, or one that each rank uses for a part of the work"
                self._refuse(name, "whole, and so is its gradient", want, f'"{name}" = "tp:0"')

    def _returned(self) -> None:
        """Refuse logits that are not split by vocabulary, as the loss takes them."""
        for node in self.graph.outputs:
            placed = self.plan.tensors[self.graph.names[node]].placement
            if placed != Shard(1):
                want = "logits [M, V] that are split by vocabulary, S(1), as the loss takes them"
                self._refuse(
                    self._name(node), f"returned as {placement_text(placed)}", want, '"output.weight" = "tp:0"'
                )

    def _layer(self, node: Node) -> str | None:
        """Return the name of the module whose parameter is the matrix of an operator that it runs, or None."""
        home = self.graph.home(node)
        own = {self.graph.aliases.get(f"{home}.{name}") for name in self.layers.get(home, LayerPlan({})).placements}
        for i, source in enumerate(tensor_inputs(node)):
            if is_weight_of(node, i) and (source in own or self.graph.names[source].rpartition(".")[0] == home):
                return home if source in self.graph.parameters else None
        return None

    def _name(self, node: Node) -> str:
        return self.plan.shown(self.graph.names[node])

    def _refuse(self, where: str, saw: str, want: str, fix: str) -> None:
        self.problems.setdefault(where, Problem(where, saw, want, fix))


_MOVES = (
    "what a layer can do: gather tokens before a linear layer, reduce and scatter them after a linear layer or an "
    "embedding; all by dim 0"
)
