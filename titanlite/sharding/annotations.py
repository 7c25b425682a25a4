"""Read a model's annotations: which dim of which tensor is split on which mesh axis.

    "layers.*.attention.wqkv.weight": "tp:0"     a parameter or buffer, by name
    "@tok_embeddings": "tp:0"                    what a module returns
    "tokens": "dp:0"                             an input of the model
    "*.router.weight": "replicate"               whole on all ranks; on purpose

Patterns are those of fnmatch. Two axes are "dp:0 tp:1". On an axis that is not named the tensor is whole.
"""

import difflib
import re
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import NamedTuple

from torch import nn
from torch.distributed.tensor import Shard
from torch.fx import Node

from titanlite.errors import Problem, ShardingError, describe
from titanlite.sharding.graph import Graph, value
from titanlite.sharding.plan import REPLICATE, Placements


class Pinned(NamedTuple):
    """The annotation of a tensor."""

    placements: Placements
    text: str  # as it was written
    is_activation: bool  # of a module's result or an input; else of a parameter or buffer


def pin(graph: Graph, annotations: Mapping[str, str], axes: Mapping[str, int]) -> dict[Node, Pinned]:
    """Return the annotated tensors.

    Args:
        graph: the model.
        annotations: pattern → placement.
        axes: size of each mesh axis, by name.

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
    """Read one annotation for one tensor; None, with problems, if it is impossible."""
    count = len(problems)
    parts = [] if text == "replicate" else [part.partition(":") for part in text.split()]
    numbers = {axis: int(n) for axis, _, n in parts if axis in axes and re.fullmatch(r"-?\d+", n)}
    dims = {axis: n % len(shape) for axis, n in numbers.items() if -len(shape) <= n < len(shape)}
    if not (text == "replicate" or parts) or len({*dims.values()}) < len(parts):
        example = f"{next(iter(axes))}:0"
        want = f'"replicate", or an axis of {", ".join(axes)} with one of the {len(shape)} dims of {name}, each once'
        want, fix = f'{want}, as "{example}"', f'"{pattern}" = "{example}"'
        if not shape:
            want, fix = f'"replicate": {name} has no dims', "remove it"
        problems.append(Problem(pattern, text, want, fix))
    for axis, dim in dims.items():
        if (size := shape[dim]) % axes[axis]:
            want = f"dim {dim} of {name}, of size {size}, to be divisible by the {axes[axis]} ranks of {axis}"
            problems.append(Problem(pattern, text, want, f"{axis} = {_largest_divisor(size, axes[axis])}"))
    if len(problems) > count:
        return None
    return tuple(Shard(dims[axis]) if axis in dims else REPLICATE for axis in axes)


def _largest_divisor(size: int, at_most: int) -> int:
    """Return the largest divisor of a dim's size up to a limit."""
    return next(n for n in range(at_most, 0, -1) if size % n == 0)


def annotations_of(model: nn.Module) -> Mapping[str, str]:
    """Return the annotations of a model, its attribute `sharding`; raise ShardingError without one."""
    annotations: Mapping[str, str] | None = getattr(model, "sharding", None)
    if annotations is None:
        want = f"annotations, as a class attribute `sharding` of {type(model).__name__}: which weights are split"
        fix = 'sharding = {"layers.*.attention.wqkv.weight": "tp:0", …}, or tensor_parallel_degree = 1'
        problem = Problem(type(model).__name__, "no annotations", want, fix)
        raise ShardingError(describe("sharding plan", [problem]))
    return annotations
