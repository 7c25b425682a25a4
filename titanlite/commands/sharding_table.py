"""The sharding plan of a config as text: weights, and every collective with its bytes per step and rank.

Layers whose rows are equal are one row, as layers.0-31; where a layer differs, it has its own.
"""

import dataclasses
import difflib
import re
from collections import Counter
from collections.abc import Iterable
from itertools import combinations
from typing import TypeVar

import torch

from titanlite.commands.columns import columns
from titanlite.commands.validate import CheckedRun
from titanlite.errors import ConfigError, Problem, describe
from titanlite.models.find import build_model
from titanlite.parallel.sharding.layers import plan_tensor_parallel, stand_ins
from titanlite.parallel.sharding.plan import Plan, show

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Planned:
    """A plan whose blocks stand for others.

    Attributes:
        plan: of one micro-step.
        stand_for: for each of its blocks, the numbers of those that it stands for.
    """

    plan: Plan
    stand_for: list[list[int]]

    def names(self, name: str) -> list[str]:
        """Give the names of everything in the model that a name in the plan stands for."""
        place = _PLACE.match(name)
        return [f"layers.{n}{name[place.end() :]}" for n in self.stand_for[int(place[1])]] if place else [name]


_PLACE = re.compile(r"layers\.(\d+)\b")


def sharding_plan(checked: CheckedRun, every_block: bool) -> Planned:
    """Derive the tensor-parallel plan of a config, on the meta device.

    Args:
        checked: the config, with its model's dimensions.
        every_block: also blocks that are alike: half a minute for 405B, not a second.

    Returns:
        The plan of one micro-step.

    Raises:
        ShardingError: there is none.
    """
    config, sizes = checked.config, checked.dimensions
    model = build_model(config.model, sizes, config.training.seq_len)
    tokens = config.training.local_batch_size * config.training.seq_len
    stand_for = [[n] for n in range(sizes.n_layers)]
    if not every_block:
        model, stand_for = stand_ins(model)
    for parameter in model.parameters():  # in the dtype that the step computes in; the rotary table stays float32
        parameter.data = parameter.data.to(getattr(torch, config.training.mixed_precision_param))
    widths = {k: v for k, v in dataclasses.asdict(sizes).items() if type(v) is int and k != "n_layers"}
    degree = config.parallelism.tensor_parallel_degree
    planned = Planned(plan_tensor_parallel(model, tokens, degree, widths)[0], stand_for)
    if not every_block and not _is_uniform(planned):  # where a block stands decides how it is split
        return sharding_plan(checked, every_block=True)
    return planned


def _is_uniform(planned: Planned) -> bool:
    """Whether blocks of equal parameters are split alike, so that one may stand for another."""
    parameters, moves = (tuple(Counter[object]() for _ in planned.stand_for) for _ in range(2))
    for t in planned.plan.tensors.values():
        if (place := _PLACE.match(t.name)) is not None:
            parameters[int(place[1])][t.name[place.end() :], t.shape] += 1
            moves[int(place[1])][t.name[place.end() :], t.placements] += 1
    for c in planned.plan.collectives:
        if (place := _PLACE.match(c.module)) is not None:
            moves[int(place[1])][c.module[place.end() :], c.kind, c.direction, c.shape, c.source, c.target] += 1
    return all(moves[n] == moves[m] for n, m in combinations(range(len(moves)), 2) if parameters[n] == parameters[m])


def weight_rows(planned: Planned) -> list[list[str]]:
    """Say of each weight how it is placed.

    Returns:
        Rows of name, shape, placement and its reason; layers that are alike are one.
    """
    held = [t for t in planned.plan.tensors.values() if t.name.endswith((".weight", ".bias"))]
    rows = ((n, (t.shape, t.placements, t.origins[0].reason), t) for t in held for n in planned.names(t.name))
    return [
        [name, "×".join(map(str, t.shape)), show(t.placements[0]), t.origins[0].reason] for name, _, t in alike(rows)
    ]


def collective_rows(planned: Planned, micro_steps: int) -> tuple[list[list[str]], float]:
    """Say of each collective what it moves.

    Args:
        planned: of one micro-step.
        micro_steps: of one step; gradients of whole weights are summed once a step.

    Returns:
        Rows of kind, pass, module, shape, move, count, MiB each and MiB a step; and the sum of the last.
    """
    rows, total = [], 0.0
    plan = planned.plan
    listed = (
        (name, (c.kind, c.direction, c.shape, c.source, c.target), c)
        for c in plan.collectives
        for name in planned.names(c.module)
    )
    for name, count, c in alike(listed):
        is_gradient = c.tensor in plan.gradients
        times, mib = count * (1 if is_gradient else micro_steps), c.wire_bytes / 2**20
        total += times * mib
        moves = "sum of gradients" if is_gradient else f"{show(c.source)} → {show(c.target)}"
        row = [c.kind, c.direction, name, "×".join(map(str, c.shape)), moves]
        rows.append([*row, str(times), f"{mib:,.3f}", f"{times * mib:,.1f}"])
    return rows, total


def sharding_table(planned: Planned, micro_steps: int) -> str:
    """Format a plan.

    Args:
        planned: of one micro-step.
        micro_steps: of one step.

    Returns:
        Two tables and a line of totals.
    """
    axis, degree = next(iter(planned.plan.axes.items()))
    weights = [["weight", "shape", "placed", "why"], *weight_rows(planned)]
    header = ["collective", "pass", "at", "whole", "moves", "times a step", "MiB each", "MiB a step"]
    rows, total = collective_rows(planned, micro_steps)
    steps = f"{micro_steps} micro-step{'s' if micro_steps > 1 else ''}"
    return (
        f"tensor parallelism over {degree} ranks: S(d) is split along dim d over {axis}, R whole, P a partial sum\n\n"
        f"{columns(*weights)}\n{columns(header, *rows)}\neach rank sends {total:,.1f} MiB a step of {steps}\n"
    )


def why(plan: Plan, tensor: str) -> str:
    """Format where a tensor's placement came from.

    Args:
        plan: the plan.
        tensor: a name in it, or that of a module, for what it returns.

    Returns:
        A line per link, back to the annotation.

    Raises:
        ConfigError: there is no such tensor.
    """
    inside = [t.name for t in plan.tensors.values() if t.module == tensor and t.name in plan.steps]
    name = tensor if tensor in plan.tensors else (inside or [""])[-1]
    if not name:
        known = [*plan.tensors, *dict.fromkeys(t.module for t in plan.tensors.values() if t.module)]
        near = difflib.get_close_matches(tensor, known, n=1, cutoff=0.0)
        problem = Problem("--why", tensor, "a parameter, a tensor of the plan, or a module", f"--why {near[0]}")
        raise ConfigError(describe("command line", [problem]))
    return "\n  <- ".join(plan.why(name, next(iter(plan.axes)))) + "\n"


def alike(rows: Iterable[tuple[str, object, T]]) -> list[tuple[str, int, T]]:
    """Rows that differ only in the number of their layer, as one: its name with the range of numbers, and how many."""
    groups: dict[object, list[tuple[str, T]]] = {}
    for name, content, item in rows:
        groups.setdefault((re.sub(r"\b\d+\b", "*", name), content), []).append((name, item))
    found: list[tuple[str, int, T]] = []
    for same in groups.values():
        numbers = sorted({int(n) for name, _ in same for n in re.findall(r"\b\d+\b", name)[:1]})
        span = f"{numbers[0]}-{numbers[-1]}" if len(numbers) > 1 else "".join(map(str, numbers))
        if len(numbers) > 1 and numbers != list(range(numbers[0], numbers[-1] + 1)):
            span = ",".join(map(str, numbers))
        found.append((re.sub(r"\b\d+\b", span, same[0][0], count=1), len(same), same[0][1]))
    return found
