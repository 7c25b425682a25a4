"""Print the sharding plan of a config: placements, their origins, and collectives with their bytes; no GPU."""

import json
import sys
from pathlib import Path

from titanlite.commands.validate import checked_run
from titanlite.config.check import sequences_per_step
from titanlite.errors import ConfigError, Problem, describe

_USAGE = "titanlite plan FILE [--section.key VALUE ...] [--world N] [--why TENSOR] [--json FILE]"


def run(argv: list[str]) -> int:
    """Derive and print a plan; `argv` is FILE [--section.key VALUE ...] [--world N] [--why TENSOR] [--json FILE]."""
    flags, given = _take(argv, ("--world", "--why", "--json"))
    if flags and not flags[0].startswith("-"):
        flags = ["--config", *flags]
    elif not {"-h", "--help"} & set(flags):
        fix = "titanlite plan configs/llama3_8b.toml"
        raise ConfigError(describe("command line", [Problem("FILE", "", "a config, as the first argument", fix)]))
    world = given.get("--world")
    if world is not None and (not world.isdecimal() or int(world) < 1):
        problem = Problem("--world", world, "a number of processes, at least 1", "--world 8")
        raise ConfigError(describe("command line", [problem]))
    checked = checked_run(flags, _USAGE, int(world) if world else None)
    config, mesh = checked.config, checked.config.parallelism
    if mesh.tensor_parallel_degree == 1:
        want = "more than 1: a plan is of the tensors that are split over tensor-parallel ranks"
        fix = "--parallelism.tensor_parallel_degree 2"
        raise ConfigError(describe(flags[1], [Problem("parallelism.tensor_parallel_degree", "1", want, fix)]))

    from titanlite.commands.sharding_table import sharding_plan, sharding_table, why  # imports torch

    plan = sharding_plan(checked)
    if "--why" in given:
        sys.stdout.write(why(plan, given["--why"]))
    else:
        ranks = 1 if mesh.data_parallel_shard_degree == -1 else mesh.data_parallel_shard_degree
        ranks *= mesh.data_parallel_replicate_degree
        if world:
            ranks = int(world) // mesh.tensor_parallel_degree
        sequences = sequences_per_step(config, int(world) if world else None) or config.training.local_batch_size
        sys.stdout.write(sharding_table(plan, max(1, sequences // (config.training.local_batch_size * ranks))))
    if "--json" in given:
        Path(given["--json"]).write_text(json.dumps(plan.as_dict(), indent=1) + "\n", encoding="utf-8")
    return 0


def _take(argv: list[str], names: tuple[str, ...]) -> tuple[list[str], dict[str, str]]:
    """Split the command's own flags off: they are no keys of the config."""
    rest, given = [], {}
    left = list(argv)
    while left:
        name, has_value, value = left.pop(0).partition("=")
        if name not in names:
            rest.append(name + has_value + value)
            continue
        if not has_value:
            value = left.pop(0) if left else ""
        if not value:
            raise ConfigError(describe("command line", [Problem(name, "", "a value", _USAGE)]))
        given[name] = value
    return rest, given
