"""Blocks that are alike need not all be planned: two of each kind are, and stand for the others.

Of the shipped models tests say that this is their plan; what it misses of a user's own, `parallel/parity.py` finds.
"""

import copy
import re
from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from titanlite.models.block_kinds import kind_of
from titanlite.parallel.tensor import LayerPlan
from titanlite.sharding.annotations import annotations_of
from titanlite.sharding.plan import Plan

BLOCK_NAME = re.compile(r"layers\.(\d+)\b")
"""Matches where the name of something in a block begins."""

_NUMBERS = re.compile(r"(^|\.)[\d*\[\]?-]*[\d\[?][\d*\[\]?-]*(\.|$)")
"""A part of a pattern that chooses among blocks by their numbers, which are others in a model of fewer blocks."""


@dataclass(frozen=True)
class PlannedLayers:
    """The plan of a model, of which some blocks stand for others, and what it makes of each layer.

    Attributes:
        plan: of one micro-step.
        stand_for: for each of the plan's blocks, the numbers of those that it stands for.
        layers: module name → what it does, for each module of the whole model that holds a parameter in use.
    """

    plan: Plan
    stand_for: list[list[int]]
    layers: dict[str, LayerPlan]

    def names(self, name: str) -> list[str]:
        """Give the names of everything in the model that a name in the plan stands for."""
        place = BLOCK_NAME.match(name)
        return [f"layers.{n}{name[place.end() :]}" for n in self.stand_for[int(place[1])]] if place else [name]


def representative_blocks(model: nn.Module) -> tuple[nn.Module, list[list[int]]]:
    """The same model with two blocks of each kind, which stand for the others.

    Args:
        model: has `sharding` and `layers`.

    Returns:
        The model, which shares its blocks with the one given, and for each of its blocks the numbers of those that it
        stands for. All of them by themselves, where annotations choose among blocks by number. That blocks of a kind do
        the same wherever they stand must be known, or seen.

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
    return _with_blocks(model, [blocks[numbers[0]] for numbers in chosen]), chosen


def _with_blocks(model: nn.Module, blocks: list[nn.Module]) -> nn.Module:
    """The same model with other blocks."""
    other = copy.copy(model)
    other._modules = {**model._modules, "layers": nn.ModuleList(blocks)}
    return other


def for_all(
    fewer: nn.Module, plan: Plan, layers: Mapping[str, LayerPlan], stand_for: list[list[int]]
) -> PlannedLayers | None:
    """Say what each layer does where blocks stand for others.

    Args:
        fewer: the model of `representative_blocks`.
        plan: of it.
        layers: what its modules do, by name.
        stand_for: as `representative_blocks` gives them.

    Returns:
        None, if where a block stands decides what it does.
    """
    kinds = [kind_of(block) for block in fewer.layers]  # type: ignore[union-attr]
    of_blocks = [_under(layers, f"layers.{place}.") for place in range(len(kinds))]
    if any(planned != of_blocks[kinds.index(kind)] for planned, kind in zip(of_blocks, kinds, strict=True)):
        return None
    others = {name: layer for name, layer in layers.items() if not name.startswith("layers.")}
    return PlannedLayers(
        plan,
        stand_for,
        others
        | {
            f"layers.{n}.{name}": layer
            for numbers, planned in zip(stand_for, of_blocks, strict=True)
            for n in numbers
            for name, layer in planned.items()
        },
    )


def _under(layers: Mapping[str, LayerPlan], prefix: str) -> dict[str, LayerPlan]:
    return {name.removeprefix(prefix): layer for name, layer in layers.items() if name.startswith(prefix)}
