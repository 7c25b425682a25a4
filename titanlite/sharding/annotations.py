"""Read a model's annotations: which dim of which tensor is split over the tensor-parallel ranks.

    "layers.*.attention.wqkv.weight": "tp:0"     a parameter or buffer, by name
    "@tok_embeddings": "tp:0"                    what a module returns
    "tokens": "tp:0"                             an input of the model
    "*.router.weight": "replicate"               whole on all ranks, on purpose

Patterns are those of fnmatch.
"""

import difflib
import re
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import NamedTuple

from torch import nn
from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import Placement
from torch.fx import Node

from titanlite.errors import Problem, ShardingError, describe
from titanlite.sharding.graph import Graph, value
from titanlite.sharding.plan import REPLICATE


class Pinned(NamedTuple):
    """The placement of an annotated tensor."""

    placement: Placement
    text: str  # the annotation as it was written
    is_activation: bool  # whether it is a module's result or an input, not a parameter or buffer


def pin(graph: Graph, annotations: Mapping[str, str], ranks: int) -> dict[Node, Pinned]:
    """Find the tensors that annotations match; return their placements.

    Raises:
        ShardingError: an annotation is malformed, names nothing or contradicts another, or a dim is not divisible; all
            problems are in the message.
    """
    problems: list[Problem] = []
    pinned: dict[Node, Pinned] = {}
    held = {name: node for node, name in graph.names.items() if node.op == "placeholder"}
    names = {**held, **graph.aliases, **{f"@{name}": node for name, node in graph.calls.items()}}
    if not isinstance(annotations, Mapping) or not all(isinstance(text, str) for text in annotations.values()):
        want = 'a dict of pattern → placement, as {"layers.*.wqkv.weight": "tp:0"}'
        raise ShardingError(
            describe("sharding annotations", [Problem("sharding", repr(annotations), want, "write one")])
        )
    for pattern, text in annotations.items():
        found = [name for name in names if fnmatchcase(name, pattern)]
        if not found:
            # A pattern stands for all blocks, and so does what is suggested for it.
            meant = [re.sub(r"\b\d+\b", "*", name, count=1) for name in names] if "*" in pattern else names
            near = difflib.get_close_matches(pattern, meant, n=1, cutoff=0.0)
            want = "the name of a parameter, buffer or input, or @ and the name of a module"
            problems.append(Problem(pattern, text, want, f"did you mean {near[0]}?" if near else "remove it"))
        for name in found:
            node = names[name]
            read = _placement_of(name, pattern, text, tuple(value(node).shape), ranks)
            if not isinstance(read, Placement):
                problems.append(Problem(pattern, text, *read))
                continue
            new = Pinned(read, f"{pattern} = {text}", node.op != "placeholder" or node in graph.inputs)
            old = pinned.setdefault(node, new)
            if old.placement != read:
                want = f"one placement of {name}; {old.text} gives another"
                problems.append(Problem(pattern, text, want, "remove one of the two"))
    if problems:
        raise ShardingError(describe("sharding annotations", problems))
    return pinned


def _placement_of(
    name: str, pattern: str, text: str, shape: tuple[int, ...], ranks: int
) -> Placement | tuple[str, str]:
    """Return the placement that an annotation gives a tensor; if it is impossible, (what is wanted, fix) in words."""
    if text == "replicate":
        return REPLICATE
    if not shape:
        return f'"replicate": {name} has no dims', "remove it"
    written = re.fullmatch(r"tp:(-?\d+)", text.strip())
    dim = int(written[1]) if written else len(shape)
    if not -len(shape) <= dim < len(shape):
        want = f'"replicate", or tp with one of the {len(shape)} dims of {name}, as "tp:0"'
        return want, f'"{pattern}" = "tp:0"'
    if (size := shape[dim]) % ranks:
        fitting = next(n for n in range(ranks, 0, -1) if size % n == 0)
        want = f"dim {dim % len(shape)} of {name}, of size {size}, to be divisible by the {ranks} ranks of tp"
        return want, f"tp = {fitting}"
    return Shard(dim % len(shape))


def annotations_of(model: nn.Module) -> Mapping[str, str]:
    """Return the annotations of a model, its attribute `sharding`; raise ShardingError if it has no such attribute."""
    annotations: Mapping[str, str] | None = getattr(model, "sharding", None)
    if annotations is None:
        want = f"annotations, as a class attribute `sharding` of {type(model).__name__}: which weights are split"
        fix = 'sharding = {"layers.*.attention.wqkv.weight": "tp:0", …}, or tensor_parallel_degree = 1'
        problem = Problem(type(model).__name__, "no annotations", want, fix)
        raise ShardingError(describe("sharding plan", [problem]))
    return annotations
