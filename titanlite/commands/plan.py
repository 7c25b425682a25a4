"""Predict a run without a GPU: sharding, collectives, memory, step time.

titanlite plan FILE                              of tensor parallelism: placements, their origins, and collectives
titanlite plan FILE --world N                    also FSDP's collectives, memory by category, and the time of a step
titanlite plan FILE --world N --device h100      the same for another device; exit code 2, with what would help, if the
                                                 run needs more memory than a device has
titanlite plan FILE --world N --diff [OTHER] …   what another config, or the flags after --diff, would change
titanlite plan FILE --activation-checkpoint      the price of each rule of the save-list, and what every list keeps
"""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from titanlite.commands.arguments import Command, apart
from titanlite.commands.collective_table import alike, as_dicts, collective_rows, collective_table, sent_mib
from titanlite.commands.forecast import check_device, forecast_table, memory_rows, time_rows
from titanlite.commands.planned_run import PlannedRun, plan_run
from titanlite.config.command_line import answer_help
from titanlite.errors import ConfigError, Problem, describe
from titanlite.forecast.device_specs import DEFAULT_DEVICE, DEVICES
from titanlite.preflight.check_with_torch import check_with_torch
from titanlite.preflight.checked_run import checked_run
from titanlite.text_table import columns

_PRICES, _DIFF, _DEVICE = "--activation-checkpoint", "--diff", "--device"
_NEEDS_WORLD = "--world N as well: what a rank holds and how long it takes depends on the number of processes"
_COMMAND = Command(
    "plan",
    __doc__ or "",
    {
        "--world N": "number of processes of the run; adds FSDP's collectives, memory and step time",
        f"{_DEVICE} NAME": f"the GPU to predict for: {' or '.join(DEVICES)}; default: {DEFAULT_DEVICE}",
        "--device-gib GIB": "memory that the run must fit into, if it is not that GPU's",
        "--why TENSOR": "print only where the placement of a tensor, or of a module's output, comes from",
        "--json FILE": "also write the whole plan to this file",
        _PRICES: "print only what each rule of the save-list keeps and costs, and what every list keeps",
        f"{_DIFF} [OTHER]": "print only what another config, or the flags after it, would change",
    },
)


def run(argv: list[str]) -> int:
    """Print a plan."""
    argv = apart(argv, _DIFF)
    if _DIFF in argv:
        return _diff(argv)
    arguments = _COMMAND.read(argv)
    given, world = arguments.own, arguments.world
    odd = next((flag for flag in given if flag not in ("--world", _PRICES)), None)
    if _PRICES in given and odd:
        problem = Problem(
            odd, given[odd], f"no {odd} together with {_PRICES}: it belongs to the sharding plan", "remove one"
        )
        raise ConfigError(describe("command line", [problem]))
    device_gib = _gib(given["--device-gib"], world) if "--device-gib" in given else None
    device = _device(given, world)
    checked = checked_run(arguments.flags, world)
    if _PRICES in given:
        from titanlite.commands.price_list import price_list

        check_with_torch(checked, world)
        sys.stdout.write(price_list(checked, arguments.file, world))
        return 0
    planned = plan_run(checked, arguments.file, world, device)
    if "--json" in given:
        _write(json.dumps(_as_dict(planned, world), indent=1) + "\n", given["--json"])
    if "--why" in given:
        sys.stdout.write(_why(planned, given["--why"], arguments.file))
    else:
        sys.stdout.write(_tables(planned, device_gib).lstrip("\n"))  # a single process has no first table
    if planned.predicted is not None:
        check_device(planned.memory, planned.predicted, device_gib)
    return 0


def _tables(planned: PlannedRun, device_gib: float | None) -> str:
    """All tables of a plan, and whether it fits."""
    text = ""
    if planned.sharding is not None:
        from titanlite.commands.sharding_table import sharding_table

        text = sharding_table(planned.sharding) + "\n"
    if planned.traffic:
        text += collective_table(planned.traffic, planned.memory.micro_steps)
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
    return text + (forecast_table(planned.predicted, device_gib) if planned.predicted else "")


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


def _why(planned: PlannedRun, tensor: str, file: str) -> str:
    if planned.sharding is None:
        want = "more than 1: nothing is split over tensor-parallel ranks"
        problem = Problem("parallelism.tensor_parallel_degree", "1", want, "--parallelism.tensor_parallel_degree 2")
        raise ConfigError(describe(file, [problem]))
    from titanlite.commands.sharding_table import why

    return why(planned.sharding, tensor)


def _as_dict(planned: PlannedRun, world: int | None) -> dict[str, Any]:
    """All that is said of a run, in JSON's types."""
    said: dict[str, Any] = {"world": world, "micro_steps": planned.memory.micro_steps}
    if planned.sharding is not None:
        said |= planned.sharding.plan.as_dict() | {"stand_for": planned.sharding.stand_for}
        said["pairs"] = [pair._asdict() for pair in planned.pairs]
        said["maxima"] = [maximum._asdict() for maximum in planned.maxima]
    said["step"] = {
        "tokens": planned.tokens,
        "collectives": as_dicts(planned.traffic),
        "sent_bytes": sum(t.times * t.sent_bytes for t in planned.traffic),
        "not_listed": list(planned.notes),
    }
    return said | (planned.predicted.as_dict() if planned.predicted else {})


def _write(text: str, file: str) -> None:
    """Write the file of --json."""
    try:
        Path(file).write_text(text, encoding="utf-8")
    except OSError as error:
        want = "a file that can be written, in a folder that exists"
        problem = Problem("--json", f"{file} ({error.strerror or error})", want, "--json plan.json")
        raise ConfigError(describe("command line", [problem])) from None


def _diff(argv: list[str]) -> int:
    """Print what differs between the run in front of --diff and the one behind it."""
    at = argv.index(_DIFF)
    before, after = argv[:at], argv[at + 1 :]
    for words in (before, after):
        answer_help(words, _COMMAND.help)
    if not after or _DIFF in after:
        problem = Problem(_DIFF, "", "one other config, or flags that change this run", f"{_DIFF} configs/other.toml")
        raise ConfigError(describe("command line", [problem]))
    given = _COMMAND.read(before)
    is_other = not after[0].startswith("-") or any(word.partition("=")[0] == "--config" for word in after)
    other = _COMMAND.read(after if is_other else [*given.flags, *after])
    if odd := [flag for flag in (*given.own, *other.own) if flag not in ("--world", _DEVICE)]:
        problem = Problem(odd[0], "", f"no {odd[0]} together with {_DIFF}", "remove one")
        raise ConfigError(describe("command line", [problem]))
    plans = [
        plan_run(checked_run(one.flags, world), one.file, world, _device(own, world))
        for one, world, own in (
            (given, given.world, given.own),
            (other, other.world or given.world, {**given.own, **other.own}),
        )
    ]
    facts = [_facts(planned) for planned in plans]
    names = [given.file, other.file] if given.file != other.file else ["before", "after"]
    rows = [["", *names]]
    for what in dict.fromkeys([*facts[0], *facts[1]]):
        values = [found.get(what, "none") for found in facts]
        if values[0] != values[1]:
            rows.append([what, *values])
    sys.stdout.write(columns(*rows) if len(rows) > 1 else "nothing differs\n")
    notes = [(*planned.notes, *(planned.predicted.notes if planned.predicted else ())) for planned in plans]
    for name, own, others in zip(names, notes, reversed(notes), strict=True):
        sys.stdout.write("".join(f"\n{name}: {note}\n" for note in own if note not in others))
    if len(rows) > 1:
        sys.stdout.write("".join(f"\n{note}\n" for note in notes[0] if note in notes[1]))
    return 0


def _facts(planned: PlannedRun) -> dict[str, str]:
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
    facts["each rank sends, MiB a step"] = f"{sent_mib(planned.traffic):,.1f}"
    if planned.sharding is not None:
        for kind, direction, name, verdict in _pair_rows(planned) if planned.pairs else ():
            facts[f"{kind} {direction} {name}, with its matmul"] = verdict
        for operand, direction, name, times in _maxima_rows(planned):
            facts[f"all_reduce {direction} {name}, maximum of {operand}"] = times
    if planned.predicted is not None:
        facts |= {f"memory: {name}": value for name, value in memory_rows(planned.predicted)}
        facts |= {f"step: {name}": value for name, value in time_rows(planned.predicted)}
    return facts


def _device(given: Mapping[str, str], world: int | None) -> str:
    """Read --device."""
    name = given.get(_DEVICE, DEFAULT_DEVICE)
    if name.lower() not in DEVICES or (_DEVICE in given and world is None):
        want = f"{' or '.join(DEVICES)}: there are no rates of another" if world else _NEEDS_WORLD
        fix = f"{_DEVICE} {DEFAULT_DEVICE}, and --device-gib for its memory" if world else f"{_DEVICE} {name} --world 8"
        raise ConfigError(describe("command line", [Problem(_DEVICE, name, want, fix)]))
    return name.lower()


def _gib(value: str, world: int | None) -> float:
    """Read --device-gib."""
    try:
        gib = float(value)
    except ValueError:
        gib = 0.0
    if not 0 < gib < float("inf") or world is None:
        want = "the GiB of a device" if world else _NEEDS_WORLD
        fix = "--device-gib 80" if world else f"--device-gib {value} --world 8"
        raise ConfigError(describe("command line", [Problem("--device-gib", value, want, fix)]))
    return gib
