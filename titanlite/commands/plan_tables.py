"""The tables of a planned run, as `titanlite plan` prints, writes and compares them."""

from typing import Any

from titanlite.commands.collective_table import alike, as_dicts, collective_rows, collective_table, sent_mib
from titanlite.commands.forecast import forecast_table, memory_rows, time_rows
from titanlite.commands.planned_run import PlannedRun, only_tensor_parallel_degree
from titanlite.commands.update_table import update_as_dict, update_facts, update_table
from titanlite.errors import ConfigError, Problem, describe
from titanlite.text_table import columns


def plan_tables(planned: PlannedRun, device_gib: float | None) -> str:
    """All tables of a plan, and whether it fits."""
    text = ""
    if planned.sharding is not None:
        from titanlite.commands.sharding_table import sharding_table

        text = sharding_table(planned.sharding) + "\n"
    if planned.traffic:
        text += collective_table(planned.traffic, planned.memory.micro_steps, planned.is_complete)
    text += "".join(f"{note}\n" for note in planned.notes)
    if planned.sharding is not None:
        if planned.pairs:
            rows = _pair_rows(planned)
            text += f"\n{columns(('collective', 'pass', 'at', 'with its matmul'), *rows)}"
        else:
            text += "\nno collective is fused with a matmul: parallelism.async_tensor_parallel is off\n"
        if planned.maxima:
            header = ("all_reduce of the maximum of", "pass", "at", "times a step")
            text += f"\n{columns(header, *_maxima_rows(planned))}"
            text += "one number each; those of forward are repeated where it is recomputed, and all weights share one\n"
    if planned.predicted is None:
        return text
    return (
        text + forecast_table(planned.predicted, device_gib) + update_table(planned.memory.optimizer, planned.predicted)
    )


def _pair_rows(planned: PlannedRun) -> list[list[str]]:
    """Rows of collective, pass, module, and whether it is fused; layers that are alike are one."""
    from titanlite.commands.fused_pairs import NOT_ASKED

    rows = ((pair.module, (pair.kind, pair.direction, pair.obstacle), pair) for pair in planned.pairs)
    verdicts = {None: "fused", NOT_ASKED: "not known"}
    return [
        [pair.kind, pair.direction, name, verdicts.get(pair.obstacle, f"not fused: it {pair.obstacle}")]
        for name, _, pair in alike(rows)
    ]


def _maxima_rows(planned: PlannedRun) -> list[list[str]]:
    """Rows of operand, pass, module and count; layers that are alike are one."""
    rows = ((m.layer, (m.operand, m.direction), m) for m in planned.maxima)
    return [[m.operand, m.direction, name, str(count * planned.memory.micro_steps)] for name, count, m in alike(rows)]


def why_placed(planned: PlannedRun, tensor: str, file: str) -> str:
    """Explain the placement of a tensor."""
    config, dims, key = planned.memory.config, planned.memory.dims, "parallelism.tensor_parallel_degree"
    if dims.experts is not None and ".experts.w" in f".{tensor}":
        shared = "each of parallelism.expert_parallel_degree ranks has whole experts of its own, whose rows FSDP splits"
        return (
            f"{tensor}: {shared} over the ranks that have the same experts\n  <- no tensor parallelism splits experts\n"
        )
    if planned.sharding is None and (only := only_tensor_parallel_degree(config, dims)) is not None:
        want = f"a tensor that is split by {key}, which must be {only}"
        fix = "leave --why out: FSDP splits each weight by rows over the ranks"
        raise ConfigError(describe("command line", [Problem("--why", tensor, want, fix)]))
    if planned.sharding is None:
        want = "more than 1: nothing is split over tensor-parallel ranks"
        raise ConfigError(describe(file, [Problem(key, "1", want, f"--{key} 2")]))
    from titanlite.commands.sharding_table import why

    return why(planned.sharding, tensor)


def plan_as_dict(planned: PlannedRun, world: int | None) -> dict[str, Any]:
    """All that is said of a run, in JSON's types."""
    said: dict[str, Any] = {"world": world, "micro_steps": planned.memory.micro_steps}
    if planned.sharding is not None:
        said |= planned.sharding.plan.as_dict() | {"stand_for": planned.sharding.stand_for}
        said["pairs"] = [pair._asdict() for pair in planned.pairs]
        said["maxima"] = [maximum._asdict() for maximum in planned.maxima]
    said["step"] = {
        "tokens": planned.tokens,
        "collectives": as_dicts(planned.traffic),
        "sent_bytes": sum(t.times * t.sent_bytes for t in planned.traffic) if planned.is_complete else None,
        "not_listed": list(planned.notes),
    }
    if planned.predicted is not None:
        said |= planned.predicted.as_dict()
        said["optimizer"] = update_as_dict(planned.memory.optimizer, planned.predicted)
    return said


def plan_facts(planned: PlannedRun) -> dict[str, str]:
    """All that a plan says, each under its name."""
    facts: dict[str, str] = {}
    if planned.sharding is not None:
        from titanlite.commands.sharding_table import weight_rows

        for name, shape, placed, _ in weight_rows(planned.sharding):
            facts[f"weight {name}"] = f"{shape} {placed}"
    for kind, direction, name, _, moves, ranks, times, mib, _ in collective_rows(planned.traffic):
        at = f"{kind} {direction} {name}".strip()  # what is reduced before the update is at no module
        what, seen = f"{at}, {moves}", f"{times} of {mib} MiB over {ranks} ranks"
        facts[what] = f"{facts[what]}; {seen}" if what in facts else seen
    facts["each rank sends, MiB a step"] = f"{sent_mib(planned.traffic):,.1f}" if planned.is_complete else "not known"
    if planned.sharding is not None:
        for kind, direction, name, verdict in _pair_rows(planned) if planned.pairs else ():
            facts[f"{kind} {direction} {name}, with its matmul"] = verdict
        for operand, direction, name, times in _maxima_rows(planned):
            facts[f"all_reduce {direction} {name}, maximum of {operand}"] = times
    if planned.predicted is not None:
        facts |= {f"memory: {name}": value for name, value in memory_rows(planned.predicted)}
        facts |= {f"step: {name}": value for name, value in time_rows(planned.predicted)}
        facts |= update_facts(planned.memory.optimizer)
    return facts
