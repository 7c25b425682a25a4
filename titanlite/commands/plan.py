"""Print what a config would do, before it runs: how it is sharded, or what its save-list keeps; no GPU.

titanlite plan FILE                              the sharding plan: placements, their origins, and collectives
titanlite plan FILE --activation-checkpoint      the price of each rule of the save-list, and what every list keeps
"""

import json
import sys
from pathlib import Path

from titanlite.commands.validate import checked_run, file_and_world
from titanlite.config.check import sequences_per_step
from titanlite.errors import ConfigError, Problem, describe

_PRICES = "--activation-checkpoint"
_USAGE = f"titanlite plan FILE [--section.key VALUE ...] [--world N] [{_PRICES} | [--why TENSOR] [--json FILE]]"


def run(argv: list[str]) -> int:
    """Print a plan; `argv` is what `_USAGE` says behind the command."""
    rest, given = _take([word for word in argv if word != _PRICES], ("--why", "--json"))
    flags, world = file_and_world(rest, "titanlite plan configs/llama3_8b.toml")
    if _PRICES in argv and (odd := [name for name in ("--why", "--json") if name in given]):
        problem = Problem(
            odd[0], given[odd[0]], f"no {odd[0]} beside {_PRICES}: it is of the sharding plan", "remove one"
        )
        raise ConfigError(describe("command line", [problem]))
    checked = checked_run(flags, _USAGE, world)
    if _PRICES in argv:
        from titanlite.commands.price_list import price_list  # the other table's module imports torch

        sys.stdout.write(price_list(checked, flags[1], world))
        return 0
    config, mesh = checked.config, checked.config.parallelism
    if mesh.tensor_parallel_degree == 1:
        want = "more than 1: a plan is of the tensors that are split over tensor-parallel ranks"
        fix = f"--parallelism.tensor_parallel_degree 2, or {_PRICES} for the price of the save-list"
        raise ConfigError(describe(flags[1], [Problem("parallelism.tensor_parallel_degree", "1", want, fix)]))

    from titanlite.commands.sharding_table import sharding_plan, sharding_table, why  # imports torch

    plan = sharding_plan(checked)
    if "--why" in given:
        sys.stdout.write(why(plan, given["--why"]))
    else:
        ranks = 1 if mesh.data_parallel_shard_degree == -1 else mesh.data_parallel_shard_degree
        ranks *= mesh.data_parallel_replicate_degree
        if world:
            ranks = world // mesh.tensor_parallel_degree
        sequences = sequences_per_step(config, world) or config.training.local_batch_size
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
