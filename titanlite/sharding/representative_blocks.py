"""Plan only two blocks of each kind, which stand for the others.

For the shipped models, tests compare this plan with that of all blocks. For a user's model, `parallel/parity.py`
compares the results of the split model with those of the whole one.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from titanlite.models.block_kinds import kind_of, with_blocks
from titanlite.parallel.tensor import LayerPlan
from titanlite.sharding.annotations import annotations_of
from titanlite.sharding.plan import Plan

BLOCK_NAME = re.compile(r"layers\.(\d+)\b")  # the beginning of a name in a block
_NUMBERS = re.compile(r"(^|\.)[\d*\[\]?-]*[\d\[?][\d*\[\]?-]*(\.|$)")  # part of a pattern that names blocks by number


@dataclass(frozen=True)
class PlannedLayers:
    """The plan of a model in which some blocks stand for others."""

    plan: Plan  # of one micro-step
    layers: dict[str, LayerPlan]  # of each module of the whole model that holds a parameter in use, by name
    stand_for: list[list[int]]  # for each block of the plan, the numbers of the blocks that it stands for

    def names(self, name: str) -> list[str]:
        """Return all names in the model that a name in the plan stands for."""
        place = BLOCK_NAME.match(name)
        return [f"layers.{n}{name[place.end() :]}" for n in self.stand_for[int(place[1])]] if place else [name]


def representative_blocks(model: nn.Module) -> tuple[nn.Module, list[list[int]]]:
    """Keep two blocks of each kind: the first stands for itself, the second for all others.

    Returns:
        A model with these blocks alone, and for each block the numbers of those that it stands for; `model` itself if
        annotations choose blocks by number. It is not checked that all blocks of a kind compute the same.

    Raises:
        ShardingError: the model has no annotations.
    """
    blocks: list[nn.Module] = list(model.layers)  # type: ignore[arg-type]
    of_kind: dict[str, list[int]] = {}
    for n, block in enumerate(blocks):
        of_kind.setdefault(kind_of(block), []).append(n)
    chosen = sorted(part for numbers in of_kind.values() for part in (numbers[:1], numbers[1:]) if part)
    if len(chosen) == len(blocks) or any(_NUMBERS.search(pattern) for pattern in annotations_of(model)):
        return model, [[n] for n in range(len(blocks))]
    return with_blocks(model, [blocks[numbers[0]] for numbers in chosen]), chosen


def for_all(
    fewer: nn.Module, plan: Plan, layers: Mapping[str, LayerPlan], stand_for: list[list[int]]
) -> PlannedLayers | None:
    """Extend the plan of a model with fewer blocks to all blocks; None if two blocks of a kind have different plans."""
    kinds = [kind_of(block) for block in fewer.layers]  # type: ignore[union-attr]
    prefixes = [f"layers.{place}." for place in range(len(kinds))]
    of_blocks = [{n.removeprefix(p): layer for n, layer in layers.items() if n.startswith(p)} for p in prefixes]
    if any(planned != of_blocks[kinds.index(kind)] for planned, kind in zip(of_blocks, kinds, strict=True)):
        return None
    found = {name: layer for name, layer in layers.items() if not name.startswith("layers.")}
    for numbers, planned in zip(stand_for, of_blocks, strict=True):
        found |= {f"layers.{n}.{name}": layer for n in numbers for name, layer in planned.items()}
    return PlannedLayers(plan, found, stand_for)
