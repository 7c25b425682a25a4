"""The optimizer of a planned run, as `titanlite plan` prints, writes and compares it."""

from typing import Any

from titanlite.byte_size import byte_size
from titanlite.commands.forecast import Forecast
from titanlite.forecast.update_time import UpdateTime
from titanlite.forecast.update_work import UpdateWork
from titanlite.text_table import columns


def update_table(work: UpdateWork, predicted: Forecast) -> str:
    """Return what updates each group, and the update's share of a step; "" where AdamW takes all."""
    groups = work.groups()
    if len(groups) == 1 and {group.rule for group in groups.values()} == {"adamw"}:
        return ""
    rows = [(name, *cells) for name, cells in _cells(work).items()]
    text = f"\noptimizer\n{columns(('group', 'rule', 'elements', 'state of a rank'), *rows)}"
    if work.buffers:
        text += f"the update itself needs {byte_size(work.buffers)} of a rank, when activations are freed\n"
    if predicted.step is None or predicted.update is None:
        return text
    parts = ", ".join(f"{ms:,.1f} {name}" for name, ms in _parts(work, predicted.update).items())
    share = predicted.update.total / predicted.step.total
    return text + f"the update takes {share:.1%} of the step, ms: {parts}\n"


def update_facts(work: UpdateWork) -> dict[str, str]:
    """Return the rule, elements and state of each group under its name."""
    return {
        f"optimizer: {name}": f"{f'{rule}, ' * bool(rule)}{elements} elements, {state}"
        for name, (rule, elements, state) in _cells(work).items()
    }


def update_as_dict(work: UpdateWork, predicted: Forecast) -> dict[str, Any]:
    """Return the same in JSON's types."""
    time = predicted.update
    return {
        "groups": {name: vars(group) for name, group in work.groups().items()},
        "buffer_bytes": work.buffers,
        "flops": sum(shared.flops for _, shared in work.shared),
        "update_ms": time and {**_parts(work, time), "total": time.total},
    }


def _cells(work: UpdateWork) -> dict[str, tuple[str, str, str]]:
    return {
        name: (group.rule, f"{group.elements:,}", byte_size(group.state, beside=work.state))
        for name, group in work.groups().items()
    }


def _parts(work: UpdateWork, time: UpdateTime) -> dict[str, float]:
    """Return the milliseconds of each rule's passes over memory, and of all else."""
    parts = {f"{rule} over memory": ms for rule, ms in time.passes.items()}
    if work.shared:
        parts["orthogonalisation"] = time.orthogonalisation
        parts["exchanges that nothing hides"] = time.exchanges
    return parts
