"""A sharding plan: the placement of every tensor, the reason for it, and the moves between placements.

Placements are those of `torch.distributed.tensor` over the tensor-parallel ranks:

    R       whole on every rank
    S(d)    split along dim d into equal parts; rank i has part i
    P       every rank has a partial sum (or mean) of the whole
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

Kind = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all"]

REPLICATE = Replicate()
PARTIAL = Partial("sum")


def placement_text(placement: Placement) -> str:
    """Write a placement as R, S(0) or P."""
    if isinstance(placement, Shard):
        return f"S({placement.dim})"
    return "R" if placement.is_replicate() else "P"


@dataclass(frozen=True)
class PlacementOrigin:
    """The reason for a tensor's placement."""

    # "inferred": a weight that follows an activation; "default": nothing reached the tensor, which is whole
    reason: Literal["annotation", "forward", "backward", "inferred", "default"]
    source: str = ""  # the tensor that determined the placement, or the annotation's text


@dataclass(frozen=True)
class PlacedTensor:
    """A tensor of the plan, with its placement."""

    name: str  # of a parameter or buffer: its name in the model; else the name of its node in the graph
    module: str  # the innermost module that computes or holds it
    shape: tuple[int, ...]  # of the whole tensor
    dtype: str  # as "bfloat16"
    placement: Placement
    origin: PlacementOrigin


@dataclass(frozen=True)
class Move:
    """The change of a tensor's placement, and the collectives that make it."""

    tensor: str  # name of the tensor that is moved
    source: Placement
    target: Placement
    partial_gradient: bool  # whether the gradient of a whole target is a partial sum
    forward: Kind | None
    backward: Kind | None  # of the gradient
    consumers: tuple[str, ...] = ()  # tensors whose operators need the target, last first; () if `tensor` gets it


@dataclass(frozen=True)
class Step:
    """The moves of the inputs and of the output of one operator."""

    inputs: tuple[Move, ...]  # one per tensor among its arguments, in order; equal moves of a tensor are one object
    output: Move  # from the placement of the operator's result to the tensor's


@dataclass(frozen=True)
class Plan:
    """The placement of each tensor of a graph, and the moves between placements."""

    ranks: int  # number of tensor-parallel ranks
    tensors: Mapping[str, PlacedTensor]  # by name, in the order in which they are computed
    moves: tuple[Move, ...]  # in the order of their tensors, including moves without a collective
    steps: Mapping[str, Step] = field(repr=False)  # by name of the tensor that the operator computes
    gradients: Mapping[str, Move] = field(repr=False)  # of parameters and inputs whose gradient is a partial sum

    def shown(self, tensor: str) -> str:
        """Return a tensor's name and shape in words, with its module if this is not part of the name."""
        placed = self.tensors[tensor]
        named = tensor if "." in tensor or not placed.module else f"{tensor} of {placed.module}"
        return f"{named} [{', '.join(map(str, placed.shape))}]"

    def why(self, tensor: str) -> list[str]:
        """Return the chain from a tensor to the annotation that placed it, one line per link."""
        lines = []
        while True:
            placed = self.tensors[tensor]
            where = "" if placed.name.startswith(placed.module + ".") else f" of {placed.module or 'the model'}"
            lines.append(f"{placed.name}{where}: {placement_text(placed.placement)}")
            if placed.origin.reason == "annotation":
                return [*lines, f'annotation "{placed.origin.source}"']
            if placed.origin.reason == "default":
                return [*lines, "nothing reached it"]
            tensor = placed.origin.source

    def as_dict(self) -> dict[str, Any]:
        """Return the plan as a dict of JSON's types."""
        tensors = [
            {"name": t.name, "module": t.module, "shape": list(t.shape), "dtype": t.dtype}
            | {"placements": {"tp": placement_text(t.placement)}, "origins": {"tp": vars(t.origin)}}
            for t in self.tensors.values()
        ]
        collectives = [
            {**vars(m), "source": placement_text(m.source), "target": placement_text(m.target)}
            for m in self.moves
            if m.forward or m.backward
        ]
        return {"axes": {"tp": self.ranks}, "tensors": tensors, "collectives": collectives}
