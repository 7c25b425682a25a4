"""Read what a person says of a model's sharding: which dim of which tensor is split on which mesh axis.

    "layers.*.attention.wqkv.weight": "tp:0"     a parameter or buffer, by name
    "@tok_embeddings": "tp:0"                    what a module returns
    "tokens": "dp:0"                             an input of the model
    "*.router.weight": "replicate"               whole on all ranks; on purpose

Patterns are those of fnmatch. Two axes are "dp:0 tp:1". An axis that is not named is whole: an annotated tensor is
exactly as its annotation says.
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
from titanlite.sharding.plan import REPLICATE, Placements


class Pinned(NamedTuple):
    """An annotated tensor.

    Attributes:
        placements: one per axis.
        text: the annotation, as it was written.
        is_activation: whether it is what a module returns, or an input; else it is a parameter or buffer.
    """

    placements: Placements
    text: str
    is_activation: bool


def pin(graph: Graph, annotations: Mapping[str, str], axes: Mapping[str, int]) -> dict[Node, Pinned]:
    """Find the tensors that annotations name.

    Args:
        graph: the model.
        annotations: pattern → placement.
        axes: size of each mesh axis, by name.

    Returns:
        The annotated tensors.

    Raises:
        ShardingError: an annotation is malformed, names nothing, contradicts another one, or a dim is not divisible;
            all problems are in the message.
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
            near = difflib.get_close_matches(pattern, names, n=1, cutoff=0.0)
            want = "the name of a parameter, buffer or input, or @ and the name of a module"
            problems.append(Problem(pattern, text, want, f"did you mean {near[0]}?" if near else "remove it"))
        for name in found:
            node = names[name]
            placements = _placements(name, pattern, text, tuple(value(node).shape), axes, problems)
            if placements is None:
                continue
            is_activation = node.op != "placeholder" or node in graph.inputs
            new = Pinned(placements, f"{pattern} = {text}", is_activation)
            old = pinned.setdefault(node, new)
            if old.placements != placements:
                want = f"one placement of {name}; {old.text} gives another"
                problems.append(Problem(pattern, text, want, "remove one of the two"))
    if problems:
        raise ShardingError(describe("sharding annotations", problems))
    return pinned


def _placements(
    name: str, pattern: str, text: str, shape: tuple[int, ...], axes: Mapping[str, int], problems: list[Problem]
) -> Placements | None:
    """Read one annotation for one tensor; None, and a problem, if it cannot be so placed."""
    placed: dict[str, Placement] = dict.fromkeys(axes, REPLICATE)
    if text == "replicate":
        return tuple(placed.values())
    count = len(problems)
    dims: set[int] = set()
    parts = text.split()
    if not parts or len({part.partition(":")[0] for part in parts}) < len(parts):
        want = '"replicate", or each axis once'
        problems.append(Problem(pattern, text, want, f'"{pattern}" = "{next(iter(axes))}:0"'))
        return None
    for part in parts:
        axis, _, number = part.partition(":")
        dim = int(number) if re.fullmatch(r"-?\d+", number) else None
        if axis not in axes or dim is None:
            want = f'"replicate", or an axis of {", ".join(axes)} with a dim, as "{next(iter(axes))}:0"'
            problems.append(Problem(pattern, text, want, f'"{pattern}" = "{next(iter(axes))}:0"'))
        elif not -len(shape) <= dim < len(shape):
            fix = f"a dim from 0 to {len(shape) - 1}" if shape else "remove it"
            problems.append(Problem(pattern, text, f"a dim of {name}, which has {len(shape)}", fix))
        elif shape[dim] % axes[axis]:
            size = shape[dim]
            want = f"dim {dim} of {name}, of size {size}, to be divisible by the {axes[axis]} ranks of {axis}"
            problems.append(Problem(pattern, text, want, f"{axis} = {_largest_divisor(size, axes[axis])}"))
        elif dim % len(shape) in dims:
            want = f"each dim of {name} on one axis"
            problems.append(Problem(pattern, text, want, "another dim for one of the axes"))
        else:
            dims.add(dim % len(shape))
            placed[axis] = Shard(dim % len(shape))
    return tuple(placed.values()) if len(problems) == count else None


def _largest_divisor(size: int, at_most: int) -> int:
    """The most ranks, at most so many, that a dim divides by."""
    return next(n for n in range(at_most, 0, -1) if size % n == 0)


def annotations_of(model: nn.Module) -> Mapping[str, str]:
    """Return what a model's file says of its sharding.

    Args:
        model: may have `sharding`.

    Raises:
        ShardingError: it has not.
    """
    annotations: Mapping[str, str] | None = getattr(model, "sharding", None)
    if annotations is None:
        want = f"annotations, as a class attribute `sharding` of {type(model).__name__}: which weights are split"
        fix = 'sharding = {"layers.*.attention.wqkv.weight": "tp:0", …}, or tensor_parallel_degree = 1'
        problem = Problem(type(model).__name__, "no annotations", want, fix)
        raise ShardingError(describe("sharding plan", [problem]))
    return annotations
