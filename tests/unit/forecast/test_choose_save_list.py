"""The chosen list is the fastest within its budget: against every assignment of selections to blocks."""

from dataclasses import replace
from itertools import chain, combinations, pairwise, product
from pathlib import Path

import pytest

from tests.support.measured import MEASURED_CONFIGS
from tests.support.needs import slow
from titanlite import recipes
from titanlite.activation_checkpoint.rules import BLOCK
from titanlite.config.recipe_schema import SaveList
from titanlite.config.write import to_toml
from titanlite.errors import RecipeError
from titanlite.forecast.activation_cost import BlockCost, block_costs, check_matches
from titanlite.forecast.choose_save_list import RecomputeTimes, choose, expensive, in_words
from titanlite.forecast.memory import GIB, MARGIN, MemoryModel, usable
from titanlite.preflight.checked_run import checked_run

LAYOUTS = [(), ("--parallelism.tensor_parallel_degree", "2")]
LAYOUTS += [(*LAYOUTS[1], "--parallelism.async_tensor_parallel"), ("--compile.enable=false",)]


def model_of(*flags: str) -> MemoryModel:
    config = str(MEASURED_CONFIGS / "llama3_8b.toml")
    run = checked_run(["--config", config, *flags], world_size=4)
    return MemoryModel(run.config, run.dims, run.float8, run.optimizer, 4)


def times_of(model: MemoryModel) -> RecomputeTimes:
    """As an H200 might have them; attention costs more for its bytes than a matmul, elementwise work least."""
    listed = [a for each in expensive(model.run).values() for a in each]
    seconds = {a: a.flops / 7e14 + a.moved / 2e12 for a in listed}
    return RecomputeTimes(seconds, 6e-4)


def every_selection(model: MemoryModel, times: RecomputeTimes) -> list[list[tuple[BlockCost, float]]]:
    """Price and seconds of each block, of every set of rules that can be, the whole block too."""
    rules = list(expensive(model.run))
    found = []
    for subset in chain.from_iterable(combinations(rules, n) for n in range(len(rules) + 1)):
        try:
            blocks = block_costs(model.run, SaveList("", "recompute", subset))
        except RecipeError:
            continue
        again = [sum(times.activations.get(a, 0) for a in block.recomputed) for block in blocks]
        found.append([(block, seconds + times.elementwise) for block, seconds in zip(blocks, again, strict=True)])
    return [*found, [(block, 0.0) for block in block_costs(model.run, SaveList("", "save"))]]


WINDOWS = ("--model.name", "gemma3", "--model.flavor", "debug", "--model.dim", "1024")


@pytest.mark.parametrize("share", [0.02, 0.1, 0.2, 0.5, 0.9])
@pytest.mark.parametrize("flags", [(), WINDOWS], ids=["llama3", "gemma3"])
def test_no_list_of_two_kinds_of_blocks_is_faster(flags: tuple[str, ...], share: float) -> None:
    """Three blocks, all assignments of at most two selections: 13 of them or more, in any order. Of Gemma, the last
    block attends to all tokens."""
    model = model_of(*flags, "--model.n_layers", "3")
    times = times_of(model)
    budget = budget_within(model, share)
    chosen = choose(model, times, budget)
    fastest = min(
        sum(kind[n][1] for n, kind in enumerate(kinds))
        for kinds in product(every_selection(model, times), repeat=3)
        if len({id(kind) for kind in kinds}) <= 2
        and model.peak([kind[n][0] for n, kind in enumerate(kinds)]).total <= usable(budget)
    )
    assert chosen.seconds == pytest.approx(fastest)
    assert chosen.peak <= usable(budget)


def budget_within(model: MemoryModel, share: float) -> float:
    """GiB between the least (0) and the most (1) that a list can hold."""
    least = model.peak(block_costs(model.run, SaveList("", "recompute"))).total
    most = model.peak(block_costs(model.run, SaveList("", "save"))).total
    return (least + (most - least) * share + 1) / GIB / (1 - MARGIN)  # a byte more, for rounding


@pytest.mark.parametrize("flags", [LAYOUTS[0], *LAYOUTS[2:], *slow((LAYOUTS[1],))], ids=str)
def test_a_larger_budget_is_never_slower_and_always_kept(flags: tuple[str, ...]) -> None:
    model = model_of(*flags)
    times = times_of(model)
    budgets = [budget_within(model, share) for share in (0, 0.2, 0.5, 0.8, 1)]
    choices = [choose(model, times, budget) for budget in budgets]
    assert all(choice.peak <= usable(budget) for choice, budget in zip(choices, budgets, strict=True))
    assert all(one.seconds > other.seconds for one, other in pairwise(choices))
    least = model.peak(block_costs(model.run, SaveList("", "recompute", ()))).total
    assert choices[0].peak == least  # what the last blocks keep may cost nothing, where the peak is not in the loss
    assert [rule.op for rule in choices[-1].save_list.rules] == [BLOCK]
    assert choices[-1].seconds == 0


@pytest.mark.parametrize("flags", [LAYOUTS[0], *LAYOUTS[2:], *slow((LAYOUTS[1],))], ids=str)
def test_the_list_is_an_ordinary_one(flags: tuple[str, ...], tmp_path: Path) -> None:
    """Written, read and checked as any other, it has the price that it was chosen for."""
    model = model_of(*flags)
    for share in (0.05, 0.3, 0.6, 0.95):
        choice = choose(model, times_of(model), budget_within(model, share))
        path = tmp_path / "mine.toml"
        path.write_text(to_toml(choice.save_list))
        loaded = recipes.load("activation_checkpoint", str(path))
        assert loaded == choice.save_list
        assert model.peak(block_costs(model.run, loaded)).total == choice.peak
        assert all(rule.op in in_words(choice) for rule in loaded.rules)
        check_matches(loaded, model.run, strict=True)


def test_what_costs_nothing_again_is_not_kept() -> None:
    model = model_of()
    free = RecomputeTimes(dict.fromkeys(times_of(model).activations, 0.0), 0.0)
    assert choose(model, free, 1000).save_list.rules == ()


def test_what_costs_most_for_its_bytes_is_kept_first() -> None:
    """A budget for one more GiB: attention, with the projection that it needs, if attention is slow; else w13."""
    model = model_of()
    times = times_of(model)
    budget = budget_within(model, 0.05)

    def kept(slow: str) -> set[str]:
        slowed = {a: seconds * (100 if slow in (a.op, a.layer) else 1) for a, seconds in times.activations.items()}
        rules = choose(model, replace(times, activations=slowed), budget).save_list.rules
        return {" ".join((rule.op, *rule.module)) for rule in rules}

    attention = next(a.op for a in times.activations if not a.layer)
    assert "attention" in kept(attention)
    assert "matmul feed_forward.w13" in kept("feed_forward.w13")
    assert "attention" not in kept("feed_forward.w13")


def test_no_list_keeps_to_less_than_the_least() -> None:
    model = model_of()
    with pytest.raises(ValueError, match="no save-list keeps to 30 GiB"):
        choose(model, times_of(model), 30)
