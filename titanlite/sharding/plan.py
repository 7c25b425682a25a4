"""A sharding plan: the placement of every tensor, where it came from, and every collective.

Placements are those of `torch.distributed.tensor`, one per mesh axis:

    R       whole on every rank
    S(d)    dim d in equal parts, rank i has the i-th
    P       every rank has a partial sum (or mean) of the whole
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

Placements = tuple[Placement, ...]
"""One per mesh axis, in the order of the mesh."""

Kind = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all"]


def placement_text(placement: Placement) -> str:
    """Write a placement as R, S(0) or P."""
    if isinstance(placement, Shard):
        return f"S({placement.dim})"
    return "R" if placement.is_replicate() else "P"


@dataclass(frozen=True)
class PlacementOrigin:
    """The reason for a tensor's placement on one axis."""

    # "inferred": a weight that follows an activation; "default": nothing reached the tensor, which is whole
    reason: Literal["annotation", "forward", "backward", "inferred", "default"]
    source: str = ""  # the tensor that it came from, or the annotation's text


@dataclass(frozen=True)
class PlacedTensor:
    """A tensor of the plan."""

    name: str  # of a parameter or buffer in the model; of another tensor, its node's in the graph
    module: str  # the innermost one that computes or holds it
    shape: tuple[int, ...]  # of the whole tensor
    dtype: str  # as "bfloat16"
    placements: Placements
    origins: tuple[PlacementOrigin, ...]  # one per axis


def local_shape(shape: tuple[int, ...], placements: Placements, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of one rank's part of a tensor; `sizes` are the ranks along each axis."""
    local = list(shape)
    for placement, size in zip(placements, sizes, strict=True):
        if isinstance(placement, Shard):
            local[placement.dim] //= size
    return tuple(local)


@dataclass(frozen=True)
class Collective:
    """One collective of a step."""

    kind: Kind
    axis: str
    tensor: str  # that is moved; in backward, its gradient is
    module: str  # at whose boundary it is
    shape: tuple[int, ...]  # before it is scattered or after it is gathered, on one rank of the other axes
    dtype: str  # as "bfloat16"
    wire_bytes: int  # sent by each rank, in the fewest steps that a ring takes
    direction: Literal["forward", "backward"]
    source: Placement  # before
    target: Placement  # after
    consumers: tuple[str, ...] = ()  # that need the result; none if the tensor itself has the target placement
    asked: bool = (
        True  # by an annotation: a reduction of a partial sum, a gather before a sharded matmul, or backward's
    )


@dataclass(frozen=True)
class Move:
    """The change of a tensor's placements, one axis after another."""

    tensor: str  # its name
    source: Placements
    target: Placements
    partial_gradient: tuple[bool, ...]  # per axis, whether the gradient of a whole target is a partial sum


@dataclass(frozen=True)
class Step:
    """The placements with which one operator of the graph runs."""

    inputs: tuple[Move, ...]  # one per tensor among its arguments, in order; equal moves of a tensor are one object
    computed: Placements  # of its result
    output: Move  # from these to the placements of its tensor


@dataclass(frozen=True)
class Plan:
    """A sharding plan."""

    axes: Mapping[str, int]  # size of each mesh axis, by name
    tensors: Mapping[str, PlacedTensor]  # by name, in the order in which they are computed
    collectives: tuple[Collective, ...]  # of one forward and one backward, in order; gradients of parameters once
    steps: Mapping[str, Step] = field(repr=False)  # by name of the tensor that the operator computes
    gradients: Mapping[str, Move] = field(repr=False)  # of parameters and inputs whose gradient is a partial sum

    def shown(self, tensor: str) -> str:
        """Name a tensor with its module, if it is not named after it, and its shape."""
        placed = self.tensors[tensor]
        named = tensor if "." in tensor or not placed.module else f"{tensor} of {placed.module}"
        return f"{named} [{', '.join(map(str, placed.shape))}]"

    def why(self, tensor: str, axis: str) -> list[str]:
        """Return the chain from a tensor to the annotation that placed it on an axis, one line per link."""
        index, lines = list(self.axes).index(axis), []
        while True:
            placed = self.tensors[tensor]
            origin = placed.origins[index]
            where = "" if placed.name.startswith(placed.module + ".") else f" of {placed.module or 'the model'}"
            lines.append(f"{placed.name}{where}: {placement_text(placed.placements[index])}")
            if origin.reason == "annotation":
                return [*lines, f'annotation "{origin.source}"']
            if origin.reason == "default":
                return [*lines, "nothing reached it"]
            tensor = origin.source

    def as_dict(self) -> dict[str, Any]:
        """Return the plan in JSON's types."""
        tensors = [
            {
                **vars(t),
                "shape": list(t.shape),
                "placements": dict(zip(self.axes, map(placement_text, t.placements), strict=True)),
                "origins": dict(zip(self.axes, map(vars, t.origins), strict=True)),
            }
            for t in self.tensors.values()
        ]
        collectives = [
            {
                **vars(c),
                "shape": list(c.shape),
                "source": placement_text(c.source),
                "target": placement_text(c.target),
                "consumers": list(c.consumers),
            }
            for c in self.collectives
        ]
        return {"axes": dict(self.axes), "tensors": tensors, "collectives": collectives}


REPLICATE = Replicate()
PARTIAL = Partial("sum")
