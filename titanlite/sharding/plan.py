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
    """A placement in a few letters: R, S(0), P."""
    if isinstance(placement, Shard):
        return f"S({placement.dim})"
    return "R" if placement.is_replicate() else "P"


@dataclass(frozen=True)
class PlacementOrigin:
    """The reason why a tensor has its placement on one axis.

    Attributes:
        reason: in words: "annotation", "forward", "backward", "inferred" (a weight that follows an activation), or
            "default" (nothing reached it; it is whole).
        source: the tensor that it came from; for an annotation, its text; for a default, empty.
    """

    reason: Literal["annotation", "forward", "backward", "inferred", "default"]
    source: str = ""


@dataclass(frozen=True)
class PlacedTensor:
    """A tensor of the plan.

    Attributes:
        name: of a parameter or buffer, its name in the model; of any other tensor, that of its node in the graph.
        module: the innermost module that computes it, or holds it.
        shape: of the whole tensor.
        dtype: as "bfloat16".
        placements: one per axis.
        origins: one per axis.
    """

    name: str
    module: str
    shape: tuple[int, ...]
    dtype: str
    placements: Placements
    origins: tuple[PlacementOrigin, ...]


def local_shape(shape: tuple[int, ...], placements: Placements, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of one rank's part of a tensor.

    Args:
        shape: of the whole tensor.
        placements: one per axis.
        sizes: ranks along each axis.
    """
    local = list(shape)
    for placement, size in zip(placements, sizes, strict=True):
        if isinstance(placement, Shard):
            local[placement.dim] //= size
    return tuple(local)


@dataclass(frozen=True)
class Collective:
    """One collective of a step.

    Attributes:
        kind: what it does.
        axis: of the mesh.
        tensor: what it moves; in backward, the gradient of that tensor.
        module: whose boundary it stands at.
        shape: of the tensor before it is scattered or after it is gathered, as one rank of the other axes sees it.
        dtype: as "bfloat16".
        wire_bytes: sent by each rank, in the fewest steps that a ring takes.
        direction: of the pass that it belongs to.
        source: placement before, and `target` after, of what is moved.
        target: see above.
        consumers: what needs the result; empty if the tensor itself is so placed.
        asked: whether an annotation asks for it: a reduction of a partial sum, a gather in front of a matmul whose
            weight is sharded, and their counterparts in backward. Anything else is a mistake of the annotations.
    """

    kind: Kind
    axis: str
    tensor: str
    module: str
    shape: tuple[int, ...]
    dtype: str
    wire_bytes: int
    direction: Literal["forward", "backward"]
    source: Placement
    target: Placement
    consumers: tuple[str, ...] = ()
    asked: bool = True


@dataclass(frozen=True)
class Move:
    """The way of a tensor from where it is to where it is needed, one axis after the other.

    Attributes:
        tensor: name of the tensor.
        source: its placements.
        target: those needed.
        partial_gradient: per axis, whether the gradient that comes back is a partial sum, for a target that is whole.
    """

    tensor: str
    source: Placements
    target: Placements
    partial_gradient: tuple[bool, ...]


@dataclass(frozen=True)
class Step:
    """The placements with which one operator of the graph runs.

    Attributes:
        inputs: one per tensor among its arguments, in order; moves of the same tensor that are equal are one.
        computed: placements of what it computes from them.
        output: the move from those to the placements of its tensor.
    """

    inputs: tuple[Move, ...]
    computed: Placements
    output: Move


@dataclass(frozen=True)
class Plan:
    """A sharding plan.

    Attributes:
        axes: size of each mesh axis, by name.
        tensors: by name, in the order in which they are computed.
        collectives: of one forward and one backward, in that order; gradients of parameters once.
        steps: by name of the tensor that the operator computes.
        gradients: parameters and inputs whose gradient is a partial sum, as moves to themselves.
    """

    axes: Mapping[str, int]
    tensors: Mapping[str, PlacedTensor]
    collectives: tuple[Collective, ...]
    steps: Mapping[str, Step] = field(repr=False)
    gradients: Mapping[str, Move] = field(repr=False)

    def shown(self, tensor: str) -> str:
        """A tensor as a person finds it, with its shape: by its module, where it has no name in the model.

        Args:
            tensor: its name.
        """
        placed = self.tensors[tensor]
        named = tensor if "." in tensor or not placed.module else f"{tensor} of {placed.module}"
        return f"{named} [{', '.join(map(str, placed.shape))}]"

    def why(self, tensor: str, axis: str) -> list[str]:
        """The chain from a tensor back to the annotation that placed it.

        Args:
            tensor: its name.
            axis: of the mesh.

        Returns:
            One line per link: the tensor itself first, the annotation last.
        """
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
        """All that the plan says, in JSON's types."""
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
