"""Every collective of a step with its bytes, as text."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from titanlite.text_table import columns

if TYPE_CHECKING:
    from titanlite.recorder.recorder import Recorded

_MIB = 2**20


def collective_rows(listed: "Mapping[Recorded, int]") -> list[list[str]]:
    """Return rows of kind, pass, module, operator, ranks, count, MiB each and MiB a step."""
    rows: list[list[str]] = []
    for each, times in listed.items():
        mib = each.sent_bytes / _MIB
        row = [each.kind, each.direction, each.module, each.operator, str(each.ranks), str(times)]
        rows.append([*row, f"{mib:,.3f}", f"{times * mib:,.1f}"])
    return rows


def sent_mib(listed: "Mapping[Recorded, int]") -> float:
    """Return the MiB that a rank sends in a step."""
    return sum(times * each.sent_bytes for each, times in listed.items()) / _MIB


def collective_table(listed: "Mapping[Recorded, int]", micro_steps: int, is_complete: bool = True) -> str:
    """Format the collectives of a step, by how often each is called; their sum is the step's if they are all."""
    header = ["collective", "pass", "at", "inside", "ranks", "times a step", "MiB each", "MiB a step"]
    steps = f"{micro_steps} micro-step{'s' if micro_steps > 1 else ''}"
    total = f"{sent_mib(listed):,.1f} MiB a step of {steps}\n"
    said = "the first rank sends" if is_complete else "what a rank sends is not known; what is listed is"
    return (columns(header, *collective_rows(listed)) if listed else "") + f"{said} {total}"
