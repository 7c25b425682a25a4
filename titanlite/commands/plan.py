"""Predict a run without a GPU: sharding, collectives, memory, step time.

titanlite plan FILE                              tensor parallelism: placements, their origins, and collectives
titanlite plan FILE --world N                    also FSDP's collectives, memory by category, and the time of a step
titanlite plan FILE --world N --device h100      the same for another device; exit code 2, and changes that would help,
                                                 if the run needs more memory than a device has
titanlite plan FILE --world N --diff [OTHER] …   the changes that another config, or the flags after --diff, would make
titanlite plan FILE --activation-checkpoint      the price of each rule of the save-list, and the bytes every list keeps
"""

import json
import math
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from titanlite.commands.arguments import Command, number_of
from titanlite.commands.at_work import at_work
from titanlite.config.command_line import answer_help
from titanlite.errors import ConfigError
from titanlite.forecast.device_specs import DEFAULT_DEVICE, DEVICES
from titanlite.forecast.network import DEFAULT_NETWORK, networks
from titanlite.preflight.checked_run import checked_run
from titanlite.preflight.machine import NETWORK, network_of
from titanlite.preflight.output_file import require_place, writable
from titanlite.text_table import columns, folded, terminal_width

_PRICES, _DIFF, _DEVICE, _GIB = "--activation-checkpoint", "--diff", "--device", "--device-gib"
_AT_WORK = "tracing the model and pricing its layout"
_NEEDS_WORLD = "--world N as well: what a rank holds and how long it takes depends on the number of processes"
COMMAND = Command(
    "plan",
    __doc__ or "",
    {
        "--world N": "number of processes of the run; adds FSDP's collectives, memory and step time",
        f"{_DEVICE} NAME": f"the GPU to predict for: {' or '.join(DEVICES)}; default: {DEFAULT_DEVICE}",
        f"{NETWORK} NAME": f"network between hosts, one NIC a GPU: {', '.join(networks())}; default: {DEFAULT_NETWORK}",
        f"{_GIB} GIB": "memory that the run must fit into, if it is not that GPU's",
        "--why TENSOR": "print only where the placement of a tensor, or of a module's output, comes from",
        "--json FILE": "also write the whole plan to this file",
        _PRICES: "print only what each rule of the save-list keeps and costs, and what every list keeps",
        f"{_DIFF} [OTHER]": "print only what another config, or the flags after it, would change",
    },
)


def run(argv: list[str]) -> int:
    """Print a plan, the price list of a save-list, or the differences between two plans."""
    # Split "--diff=FILE": --diff takes all words after it, which may be more than one.
    argv = [word for a in argv for word in (a.split("=", 1) if a.startswith(f"{_DIFF}=") else [a])]
    if _DIFF in argv:
        return _diff(argv)
    arguments = COMMAND.read(argv)
    given, world = arguments.own, arguments.world
    odd = next((flag for flag in given if flag not in ("--world", _PRICES)), None)
    if _PRICES in given and odd:
        want = f"no {odd} together with {_PRICES}: it belongs to the sharding plan"
        raise ConfigError.of("command line", odd, given[odd], want, "remove one")
    if _GIB in given and world is None:
        raise ConfigError.of("command line", _GIB, given[_GIB], _NEEDS_WORLD, f"{_GIB} {given[_GIB]} --world 8")
    device_gib = number_of(given, _GIB, float, "the GiB of a device", f"{_GIB} 80", below=math.inf)
    device, network = _device(given, world), network_of(given, world)
    if "--json" in given:
        require_place("--json", Path(given["--json"]))
    checked = checked_run(arguments.flags, world)
    with at_work(_AT_WORK):
        # These import torch, which takes seconds. Help pages and mistakes in flags do not wait for it.
        from titanlite.commands.forecast import check_device
        from titanlite.commands.plan_tables import plan_as_dict, plan_tables, why_placed
        from titanlite.commands.planned_run import plan_run
        from titanlite.commands.price_list import price_list
        from titanlite.training.assemble import assembled

        if _PRICES in given:
            with assembled(checked, world, device) as made:
                text = price_list(made, arguments.file, world)
            sys.stdout.write(folded(text, terminal_width()))
            return 0
        # Placements do not depend on the number of processes, so --why alone needs no prediction.
        is_split = checked.config.parallelism.tensor_parallel_degree > 1
        is_for_why = "--why" in given and "--json" not in given and is_split
        asked = checked, arguments.file, None if is_for_why else world, device
        planned = plan_run(*asked, network=network, lists_collectives=not is_for_why)
        if planned.predicted is not None:
            planned = replace(planned, predicted=replace(planned.predicted, is_default=_DEVICE not in given))
        # A plan of a single process lacks the first table, and would begin with an empty line.
        text = "" if "--why" in given else plan_tables(planned, device_gib).lstrip("\n")
    if "--json" in given:
        file = Path(given["--json"])
        with writable("titanlite plan", "--json", file):
            file.write_text(json.dumps(plan_as_dict(planned, world), indent=1) + "\n", encoding="utf-8")
    if "--why" in given:
        text = why_placed(planned, given["--why"], arguments.file)
    sys.stdout.write(folded(text, terminal_width()))
    if planned.predicted is not None:
        check_device(planned.memory, planned.predicted, device_gib)
    return 0


def _diff(argv: list[str]) -> int:
    """Plan the run before --diff and the run after it, and print the facts in which the two plans differ."""
    at = argv.index(_DIFF)
    before, after = argv[:at], argv[at + 1 :]
    for words in (before, after):
        answer_help(words, COMMAND.help)
    if not after or _DIFF in after:
        want = "one other config, or flags that change this run"
        raise ConfigError.of("command line", _DIFF, "", want, f"{_DIFF} configs/other.toml")
    given = COMMAND.read(before)
    is_other = not after[0].startswith("-") or any(word.partition("=")[0] == "--config" for word in after)
    other = COMMAND.read(after if is_other else [*given.flags, *after])
    if odd := [flag for flag in (*given.own, *other.own) if flag not in ("--world", _DEVICE, NETWORK)]:
        raise ConfigError.of("command line", odd[0], "", f"no {odd[0]} together with {_DIFF}", "remove one")
    with at_work(_AT_WORK):
        from titanlite.commands.plan_tables import plan_facts
        from titanlite.commands.planned_run import plan_run

        plans = [
            plan_run(checked_run(one.flags, world), one.file, world, _device(own, world), network_of(own, world))
            for one, world, own in (
                (given, given.world, given.own),
                (other, other.world or given.world, {**given.own, **other.own}),
            )
        ]
    facts = [plan_facts(planned) for planned in plans]
    names = [given.file, other.file] if given.file != other.file else ["before", "after"]
    rows = [["", *names]]
    for what in dict.fromkeys([*facts[0], *facts[1]]):
        values = [found.get(what, "none") for found in facts]
        if values[0] != values[1]:
            rows.append([what, *values])
    text = columns(*rows) if len(rows) > 1 else "nothing differs\n"
    notes = [(*planned.notes, *(planned.predicted.notes if planned.predicted else ())) for planned in plans]
    for name, own, others in zip(names, notes, reversed(notes), strict=True):
        text += "".join(f"\n{name}: {note}\n" for note in own if note not in others)
    if len(rows) > 1:
        text += "".join(f"\n{note}\n" for note in notes[0] if note in notes[1])
    sys.stdout.write(folded(text, terminal_width()))
    return 0


def _device(given: Mapping[str, str], world: int | None) -> str:
    """Return the device of --device, or the default. Refuse an unknown one, and --device without --world."""
    name, with_world = given.get(_DEVICE, DEFAULT_DEVICE), "" if world else " --world 8"
    if name.lower() not in DEVICES:
        want = f"{' or '.join(DEVICES)}: there are no rates of another"
        fix = f"{_DEVICE} {DEFAULT_DEVICE}{with_world}, and --device-gib for its memory"
        raise ConfigError.of("command line", _DEVICE, name, want, fix)
    if _DEVICE in given and world is None:
        raise ConfigError.of("command line", _DEVICE, name, _NEEDS_WORLD, f"{_DEVICE} {name}{with_world}")
    return name.lower()
