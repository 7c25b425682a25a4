"""The tables of a planned run, as `titanlite plan` prints, writes and compares them."""

from collections.abc import Mapping
from typing import Any

from titanlite.byte_size import byte_size
from titanlite.commands.forecast import Forecast, forecast_table, memory_rows, time_rows
from titanlite.commands.planned_run import PlannedRun
from titanlite.commands.sharding_table import sharding_table, weight_rows, why
from titanlite.errors import ConfigError
from titanlite.forecast.update_time import UpdateTime
from titanlite.forecast.update_work import UpdateWork
from titanlite.recorder.recorder import UNKNOWN, Recorded
from titanlite.text_table import columns

_MIB = 2**20
_FEW_BYTES = 64  # of an all-reduce whose size a table shows as 0.000 MiB


def plan_tables(planned: PlannedRun, device_gib: float | None) -> str:
    """Return all tables of a plan, and whether it fits a device of `device_gib` (None: the device predicted for)."""
    text = "" if planned.sharding is None else sharding_table(planned.sharding) + "\n"
    if planned.collectives:
        header = ["collective", "pass", "at", "inside", "ranks", "times a step", "MiB each", "MiB a step"]
        n = planned.memory.micro_steps
        said = "the first rank sends" if planned.is_complete else "what a rank sends is not known; what is listed is"
        sent = f"{_sent_bytes(planned) / _MIB:,.1f} MiB a step of {n} micro-step{'s' if n > 1 else ''}"
        text += f"{columns(header, *collective_rows(_numbers_joined(planned.collectives)))}{said} {sent}\n"
    text += "".join(f"{note}\n" for note in planned.notes)
    if planned.sharding is not None:
        if planned.pairs:
            header = ("collective", "pass", "at", "times a step", "with its matmul")
            text += f"\n{columns(header, *_pair_rows(planned))}"
            if any(pair.obstacle == UNKNOWN for pair in planned.pairs):
                text += "a predicted time has all of them fused\n"
        elif not planned.memory.config.parallelism.async_tensor_parallel:
            text += "\nno collective is fused with a matmul: parallelism.async_tensor_parallel is off\n"
    if planned.predicted is None:
        return text
    return (
        text
        + forecast_table(planned.predicted, device_gib)
        + _update_table(planned.memory.optimizer, planned.predicted)
    )


def collective_rows(listed: Mapping[Recorded, int]) -> list[list[str]]:
    """Return a row for each collective: kind, pass, module, operator, ranks, calls a step, MiB each and MiB a step."""
    mib = {each: each.sent_bytes / _MIB for each in listed}
    return [
        [*each[:3], each.operator, f"{each.ranks}", f"{n}", f"{mib[each]:,.3f}", f"{n * mib[each]:,.1f}"]
        for each, n in listed.items()
    ]


def _numbers_joined(listed: Mapping[Recorded, int]) -> dict[Recorded, int]:
    """Join into one the sums of a few numbers over ranks before an update, such as of targets, norms and losses."""
    joined = dict[Recorded, int]()
    for each, n in listed.items():
        if (each.kind, each.direction, each.module) == ("all_reduce", "update", "") and each.n_bytes <= _FEW_BYTES:
            each = each._replace(module="norm, loss and the like", n_bytes=_FEW_BYTES)
        joined[each] = joined.get(each, 0) + n
    return joined


def _sent_bytes(planned: PlannedRun) -> int:
    return sum(times * each.sent_bytes for each, times in planned.collectives.items())


def _pair_rows(planned: PlannedRun) -> list[list[str]]:
    """Return a row for each pair of a collective and a matmul: kind, pass, module, calls, whether it is one kernel."""
    return [[*pair[:3], str(times), _verdict(pair.obstacle)] for pair, times in planned.pairs.items()]


def _verdict(obstacle: str | None) -> str:
    return "fused" if obstacle is None else obstacle if obstacle == UNKNOWN else f"not fused: {obstacle}"


def why_placed(planned: PlannedRun, tensor: str, file: str) -> str:
    """Return where the placement of `tensor` comes from. Refuse a plan without tensor parallelism."""
    if planned.memory.dims.experts is not None and ".experts.w" in f".{tensor}":
        shared = "each of parallelism.expert_parallel_degree ranks has whole experts of its own, whose rows FSDP splits"
        return (
            f"{tensor}: {shared} over the ranks that have the same experts\n  <- no tensor parallelism splits experts\n"
        )
    if planned.sharding is None:
        want = "more than 1, where it is possible: nothing is split over tensor-parallel ranks"
        key = "parallelism.tensor_parallel_degree"
        fix = f"--{key} 2, or leave --why out: FSDP splits each weight by rows over the ranks"
        raise ConfigError.of(file, key, "1", want, fix)
    return why(planned.sharding, tensor)


def plan_as_dict(planned: PlannedRun, world: int | None) -> dict[str, Any]:
    """Return a plan in JSON's types, as --json writes it."""
    said: dict[str, Any] = {"world": world, "micro_steps": planned.memory.micro_steps}
    if planned.sharding is not None:
        said |= planned.sharding.plan.as_dict() | {"stand_for": planned.sharding.stand_for}
        said["pairs"] = [{**pair._asdict(), "times": times} for pair, times in planned.pairs.items()]
    said["step"] = {
        "tokens": planned.tokens,
        "collectives": [
            {**each._asdict(), "times": n, "sent_bytes": each.sent_bytes} for each, n in planned.collectives.items()
        ],
        "sent_bytes": _sent_bytes(planned) if planned.is_complete else None,
        "not_listed": list(planned.notes),
    }
    if planned.predicted is not None:
        said |= planned.predicted.as_dict()
        work, time = planned.memory.optimizer, planned.predicted.update
        said["optimizer"] = {
            "groups": {name: vars(group) for name, group in work.groups().items()},
            "buffer_bytes": work.buffers,
            "flops": sum(shared.flops for _, shared in work.shared),
            "update_ms": time and {**_update_parts(work, time), "total": time.total},
        }
    return said


def plan_facts(planned: PlannedRun) -> dict[str, str]:
    """Return the facts of a plan that --diff compares, as text by name."""
    facts: dict[str, str] = {}
    if planned.sharding is not None:
        for name, shape, placed, _ in weight_rows(planned.sharding):
            facts[f"weight {name}"] = f"{shape} {placed}"
    for kind, direction, name, inside, ranks, times, mib, _ in collective_rows(planned.collectives):
        what = " ".join(filter(None, (kind, direction, name, inside)))  # reductions before the update have no module
        seen = f"{times} of {mib} MiB over {ranks} ranks"
        facts[what] = f"{facts[what]}; {seen}" if what in facts else seen
    sent = f"{_sent_bytes(planned) / _MIB:,.1f}" if planned.is_complete else "not known"
    facts["the first rank sends, MiB a step"] = sent
    for kind, direction, name, _, verdict in _pair_rows(planned):
        facts[f"{kind} {direction} {name}, with its matmul"] = verdict
    if planned.predicted is not None:
        facts |= {f"memory: {name}": value for name, value in memory_rows(planned.predicted)}
        facts |= {f"step: {name}": value for name, value in time_rows(planned.predicted)}
        facts |= {f"between hosts: {name}": f"{ms:,.1f} ms" for name, ms in planned.predicted.between_hosts.items()}
        for name, (rule, elements, state) in _update_groups(planned.memory.optimizer).items():
            facts[f"optimizer: {name}"] = f"{f'{rule}, ' * bool(rule)}{elements} elements, {state}"
    return facts


def _update_table(work: UpdateWork, predicted: Forecast) -> str:
    """Return the table of the optimizer's groups and the update's share of a step; "" if AdamW updates everything."""
    groups = work.groups()
    if len(groups) == 1 and {group.rule for group in groups.values()} == {"adamw"}:
        return ""
    rows = [(name, *cells) for name, cells in _update_groups(work).items()]
    text = f"\noptimizer\n{columns(('group', 'rule', 'elements', 'state of a rank'), *rows)}"
    if work.buffers:
        text += f"the update itself needs {byte_size(work.buffers)} of a rank, when activations are freed\n"
    if predicted.step is None or predicted.update is None:
        return text
    parts = ", ".join(f"{ms:,.1f} {name}" for name, ms in _update_parts(work, predicted.update).items())
    share = predicted.update.total / predicted.step.total
    return text + f"the update takes {share:.1%} of the step, ms: {parts}\n"


def _update_groups(work: UpdateWork) -> dict[str, tuple[str, str, str]]:
    """Return by group of the optimizer its update rule, number of elements, and bytes of state per rank, as text."""
    return {
        name: (group.rule, f"{group.elements:,}", byte_size(group.state, beside=work.state))
        for name, group in work.groups().items()
    }


def _update_parts(work: UpdateWork, time: UpdateTime) -> dict[str, float]:
    """Return the milliseconds of an update: each rule's passes over memory, orthogonalisation, exposed exchanges."""
    parts = {f"{rule} over memory": ms for rule, ms in time.passes.items()}
    if work.shared:
        parts["orthogonalisation"] = time.orthogonalisation
        parts["exchanges that nothing hides"] = time.exchanges
    return parts
