"""The sharding plan of a config as text: weights, and every collective with its bytes per step and rank.

Layers whose rows are equal are one row, as layers.0-31; where a layer differs, it has its own.
"""

import dataclasses
import difflib
import re
from collections.abc import Iterable
from typing import TypeVar

import torch

from titanlite.commands.validate import CheckedRun
from titanlite.errors import ConfigError, Problem, describe
from titanlite.models.find import model_class
from titanlite.parallel.sharding.derive import plan_model
from titanlite.parallel.sharding.layers import annotations_of
from titanlite.parallel.sharding.plan import Plan, show

T = TypeVar("T")


def sharding_plan(checked: CheckedRun) -> Plan:
    """Derive the tensor-parallel plan of a config, on the meta device.

    Args:
        checked: the config, with its model's dimensions.

    Returns:
        The plan of one micro-step.

    Raises:
        ShardingError: there is none.
    """
    config, sizes = checked.config, checked.dimensions
    with torch.device("meta"):
        model = model_class(config.model)(sizes, config.training.seq_len)
        tokens = torch.empty(config.training.local_batch_size * config.training.seq_len, dtype=torch.long)
    for parameter in model.parameters():  # in the dtype that the step computes in; the rotary table stays float32
        parameter.data = parameter.data.to(getattr(torch, config.training.mixed_precision_param))
    widths = {k: v for k, v in dataclasses.asdict(sizes).items() if type(v) is int and k != "n_layers"}
    degree = config.parallelism.tensor_parallel_degree
    return plan_model(model, [tokens], {"tp": degree}, annotations_of(model), widths)


def sharding_table(plan: Plan, micro_steps: int) -> str:
    """Format a plan.

    Args:
        plan: of one micro-step.
        micro_steps: of one step; gradients of whole weights are summed once a step.

    Returns:
        Two tables and a line of totals.
    """
    axis, degree = next(iter(plan.axes.items()))
    held = [t for t in plan.tensors.values() if t.name.endswith((".weight", ".bias"))]
    weights = [["weight", "shape", "placed", "why"]]
    for name, _, t in _alike((t.name, (t.shape, t.placements, t.origins[0].reason), t) for t in held):
        weights.append([name, "×".join(map(str, t.shape)), show(t.placements[0]), t.origins[0].reason])
    collectives = [["collective", "pass", "at", "whole", "moves", "times a step", "MiB each", "MiB a step"]]
    total = 0.0
    for name, count, c in _alike(
        (c.module, (c.kind, c.direction, c.shape, c.source, c.target), c) for c in plan.collectives
    ):
        is_gradient = c.tensor in plan.gradients
        times, mib = count * (1 if is_gradient else micro_steps), c.wire_bytes / 2**20
        total += times * mib
        moves = "sum of gradients" if is_gradient else f"{show(c.source)} → {show(c.target)}"
        row = [c.kind, c.direction, name, "×".join(map(str, c.shape)), moves]
        collectives.append([*row, str(times), f"{mib:,.3f}", f"{times * mib:,.1f}"])
    steps = f"{micro_steps} micro-step{'s' if micro_steps > 1 else ''}"
    return (
        f"tensor parallelism over {degree} ranks: S(d) is split along dim d over {axis}, R whole, P a partial sum\n\n"
        f"{_columns(weights)}\n{_columns(collectives)}\neach rank sends {total:,.1f} MiB a step of {steps}\n"
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


def _alike(rows: Iterable[tuple[str, object, T]]) -> list[tuple[str, int, T]]:
    """Rows that differ only in the number of their layer, as one: its name with the range of numbers, and how many."""
    groups: dict[object, list[tuple[str, T]]] = {}
    for name, content, item in rows:
        groups.setdefault((re.sub(r"\b\d+\b", "*", name), content), []).append((name, item))
    found: list[tuple[str, int, T]] = []
    for same in groups.values():
        numbers = sorted(int(n) for name, _ in same for n in re.findall(r"\b\d+\b", name)[:1])
        span = f"{numbers[0]}-{numbers[-1]}" if len(numbers) > 1 else "".join(map(str, numbers))
        if len(numbers) > 1 and numbers != list(range(numbers[0], numbers[-1] + 1)):
            span = ",".join(map(str, numbers))
        found.append((re.sub(r"\b\d+\b", span, same[0][0], count=1), len(same), same[0][1]))
    return found


def _columns(rows: list[list[str]]) -> str:
    """Left-aligned text, right-aligned numbers."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    numbers = [all(re.fullmatch(r"[\d,.]+", cell) for cell in column[1:]) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [c.rjust(w) if n else c.ljust(w) for c, w, n in zip(row, widths, numbers, strict=True)]
        lines.append("  ".join(cells).rstrip() + "\n")
    return "".join(lines)
