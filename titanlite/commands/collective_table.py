"""Every collective of a step with its bytes, as text and for programs; no torch.

Layers whose rows are equal are one row, as layers.0-31; where a layer differs, it has its own.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from titanlite.forecast.comm_volume import Traffic
from titanlite.text_table import columns

T = TypeVar("T")
_MIB = 2**20


def together(listed: Sequence[Traffic]) -> list[Traffic]:
    """Make those one that differ in nothing but the number of their layer; their times add up."""
    rows = ((t.module, replace(t, module=""), t) for t in listed)
    return [replace(t, module=name, times=t.times * count) for name, count, t in alike(rows)]


def collective_rows(listed: Sequence[Traffic]) -> list[list[str]]:
    """Rows of kind, pass, module, shape, move, ranks, count, MiB each and MiB a step."""
    rows: list[list[str]] = []
    for t in together(listed):
        mib = t.sent_bytes / _MIB
        row = [t.kind, t.direction, t.module, "×".join(map(str, t.shape)), t.moves, str(t.ranks), str(t.times)]
        rows.append([*row, f"{mib:,.3f}", f"{t.times * mib:,.1f}"])
    return rows


def sent_mib(listed: Sequence[Traffic]) -> float:
    """Return what a rank sends in a step, MiB."""
    return sum(t.times * t.sent_bytes for t in listed) / _MIB


def collective_table(listed: Sequence[Traffic], micro_steps: int, is_complete: bool = True) -> str:
    """Format a list of collectives.

    Args:
        listed: of a step.
        micro_steps: of it.
        is_complete: whether these are all; their sum is not called the step's otherwise.
    """
    header = ["collective", "pass", "at", "whole", "moves", "ranks", "times a step", "MiB each", "MiB a step"]
    steps = f"{micro_steps} micro-step{'s' if micro_steps > 1 else ''}"
    total = f"{sent_mib(listed):,.1f} MiB a step of {steps}\n"
    said = "each rank sends" if is_complete else "what each rank sends is not known; what is listed is"
    return (columns(header, *collective_rows(listed)) if listed else "") + f"{said} {total}"


def as_dicts(listed: Sequence[Traffic]) -> list[dict[str, Any]]:
    """The same in JSON's types."""
    return [{**vars(t), "shape": list(t.shape), "sent_bytes": t.sent_bytes} for t in together(listed)]


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
