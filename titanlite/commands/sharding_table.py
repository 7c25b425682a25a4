"""The sharding plan of a config as text: weights, and every collective with its bytes per step and rank.

Layers whose rows are equal are one row, as layers.0-31; where a layer differs, it has its own.
"""

import difflib
import re
from collections.abc import Iterable
from typing import TypeVar

import torch

from titanlite.commands.columns import columns
from titanlite.commands.validate import CheckedRun
from titanlite.errors import ConfigError, Problem, describe
from titanlite.models.find import build_model
from titanlite.parallel.sharding.layers import BLOCK_NAME, PlannedLayers, derive_layers
from titanlite.parallel.sharding.plan import show

T = TypeVar("T")


def sharding_plan(checked: CheckedRun) -> PlannedLayers:
    """Derive the tensor-parallel plan of a config, on the meta device, as the trainer does.

    Args:
        checked: the config, with its model's dimensions.

    Returns:
        The plan of one micro-step.

    Raises:
        ShardingError: there is none.
    """
    training, sizes = checked.config.training, checked.dimensions
    model = build_model(checked.config.model, sizes, training.seq_len)
    tokens, dtype = training.local_batch_size * training.seq_len, getattr(torch, training.mixed_precision_param)
    return derive_layers(model, tokens, checked.config.parallelism.tensor_parallel_degree, dtype, sizes.widths)


def weight_rows(planned: PlannedLayers) -> list[list[str]]:
    """Say of each weight how it is placed.

    Returns:
        Rows of name, shape, placement and its reason; layers that are alike are one.
    """
    held = [t for t in planned.plan.tensors.values() if t.name.endswith((".weight", ".bias"))]
    rows = ((n, (t.shape, t.placements, t.origins[0].reason), t) for t in held for n in planned.names(t.name))
    return [
        [name, "×".join(map(str, t.shape)), show(t.placements[0]), t.origins[0].reason] for name, _, t in alike(rows)
    ]


def collective_rows(planned: PlannedLayers, micro_steps: int) -> tuple[list[list[str]], float]:
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


def sharding_table(planned: PlannedLayers, micro_steps: int) -> str:
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


def why(planned: PlannedLayers, tensor: str) -> str:
    """Format where a tensor's placement came from.

    Args:
        planned: the plan.
        tensor: a name in it, or that of a module, with or without @, for what it returns.

    Returns:
        A line per link, back to the annotation; and which block was looked at, if it stands for the tensor's own.

    Raises:
        ConfigError: there is no such tensor.
    """
    plan, returned = planned.plan, dict[str, str]()
    for t in plan.tensors.values():
        if t.name in plan.steps:  # in the order in which they are computed
            parts = t.module.split(".")
            returned |= {".".join(parts[:n]): t.name for n in range(1, len(parts) + 1) if t.module}
    asked = tensor.removeprefix("@")
    in_plan = {name: name for name in plan.tensors} | returned
    known = {name: (at, found) for at, found in in_plan.items() for name in planned.names(at)}
    if asked not in known or (asked != tensor and asked not in {n for at in returned for n in planned.names(at)}):
        near = difflib.get_close_matches(asked, known, n=3, cutoff=0.0)
        want = "a parameter, a tensor of the plan, or a module"
        raise ConfigError(
            describe("command line", [Problem("--why", tensor, want, " or ".join(f"--why {name}" for name in near))])
        )
    at, name = known[asked]
    place = BLOCK_NAME.match(at)
    note = "" if at == asked or not place else f"{place[0]} was planned for this block too: they are alike\n"
    return "\n  <- ".join(plan.why(name, next(iter(plan.axes)))) + "\n" + note


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
