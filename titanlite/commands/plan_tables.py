"""The tables of a planned run, as `titanlite plan` prints, writes and compares them."""

from typing import Any

from titanlite.commands.collective_table import collective_rows, collective_table, sent_mib
from titanlite.commands.forecast import forecast_table, memory_rows, time_rows
from titanlite.commands.planned_run import PlannedRun, only_tensor_parallel_degree
from titanlite.commands.update_table import update_as_dict, update_facts, update_table
from titanlite.errors import ConfigError
from titanlite.recorder.recorder import UNKNOWN
from titanlite.text_table import columns


def plan_tables(planned: PlannedRun, device_gib: float | None) -> str:
    """Return all tables of a plan, and whether it fits."""
    text = ""
    if planned.sharding is not None:
        from titanlite.commands.sharding_table import sharding_table

        text = sharding_table(planned.sharding) + "\n"
    if planned.collectives:
        text += collective_table(planned.collectives, planned.memory.micro_steps, planned.is_complete)
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
        text + forecast_table(planned.predicted, device_gib) + update_table(planned.memory.optimizer, planned.predicted)
    )


def _pair_rows(planned: PlannedRun) -> list[list[str]]:
    """Return rows of collective, pass, module, count, and whether it is one kernel with its matmul."""
    return [[*pair[:3], str(times), _verdict(pair.obstacle)] for pair, times in planned.pairs.items()]


def _verdict(obstacle: str | None) -> str:
    return "fused" if obstacle is None else obstacle if obstacle == UNKNOWN else f"not fused: {obstacle}"


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
        raise ConfigError.of("command line", "--why", tensor, want, fix)
    if planned.sharding is None:
        want = "more than 1: nothing is split over tensor-parallel ranks"
        raise ConfigError.of(file, key, "1", want, f"--{key} 2")
    from titanlite.commands.sharding_table import why

    return why(planned.sharding, tensor)


def plan_as_dict(planned: PlannedRun, world: int | None) -> dict[str, Any]:
    """Return a plan in JSON's types."""
    said: dict[str, Any] = {"world": world, "micro_steps": planned.memory.micro_steps}
    if planned.sharding is not None:
        said |= planned.sharding.plan.as_dict() | {"stand_for": planned.sharding.stand_for}
        said["pairs"] = [{**pair._asdict(), "times": times} for pair, times in planned.pairs.items()]
    sent = sum(n * each.sent_bytes for each, n in planned.collectives.items())
    said["step"] = {
        "tokens": planned.tokens,
        "collectives": [
            {**each._asdict(), "times": n, "sent_bytes": each.sent_bytes} for each, n in planned.collectives.items()
        ],
        "sent_bytes": sent if planned.is_complete else None,
        "not_listed": list(planned.notes),
    }
    if planned.predicted is not None:
        said |= planned.predicted.as_dict()
        said["optimizer"] = update_as_dict(planned.memory.optimizer, planned.predicted)
    return said


def plan_facts(planned: PlannedRun) -> dict[str, str]:
    """Return each fact of a plan under its name."""
    facts: dict[str, str] = {}
    if planned.sharding is not None:
        from titanlite.commands.sharding_table import weight_rows

        for name, shape, placed, _ in weight_rows(planned.sharding):
            facts[f"weight {name}"] = f"{shape} {placed}"
    for kind, direction, name, inside, ranks, times, mib, _ in collective_rows(planned.collectives):
        what = " ".join(filter(None, (kind, direction, name, inside)))  # what is reduced before the update is at none
        seen = f"{times} of {mib} MiB over {ranks} ranks"
        facts[what] = f"{facts[what]}; {seen}" if what in facts else seen
    sent = f"{sent_mib(planned.collectives):,.1f}" if planned.is_complete else "not known"
    facts["the first rank sends, MiB a step"] = sent
    for kind, direction, name, _, verdict in _pair_rows(planned):
        facts[f"{kind} {direction} {name}, with its matmul"] = verdict
    if planned.predicted is not None:
        facts |= {f"memory: {name}": value for name, value in memory_rows(planned.predicted)}
        facts |= {f"step: {name}": value for name, value in time_rows(planned.predicted)}
        facts |= update_facts(planned.memory.optimizer)
    return facts
