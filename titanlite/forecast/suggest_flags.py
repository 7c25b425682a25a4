"""Find which change of a config would bring its peak under a limit: for who ran out of memory, or asks for too little.

Each change is a flag of train.py, checked as a config would be, and priced by `memory.py`.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from titanlite import recipes
from titanlite.byte_size import byte_size
from titanlite.config.check import check_config, sequences_per_step
from titanlite.config.problems import Origin, Problems
from titanlite.config.recipe_schema import SaveList
from titanlite.config.schema import Config
from titanlite.errors import ConfigError, RecipeError
from titanlite.forecast.activation_cost import block_costs
from titanlite.forecast.attended import AttendedShare
from titanlite.forecast.choose_save_list import choose
from titanlite.forecast.device_specs import Rates, no_rates_reason
from titanlite.forecast.memory import GIB, MARGIN, MemoryModel, usable
from titanlite.forecast.step_time import StepTimeModel

LEAST = SaveList("", "recompute")
"""The list that keeps least: nothing but the input of each block."""

_SHOWN = 3


@dataclass(frozen=True)
class Override:
    """One change of a config.

    Attributes:
        flag: to paste behind the command.
        peak: predicted with it, in bytes.
        frees: bytes less than without it, with those of symmetric memory where the limit is a device's.
        config: with it.
        save_list: with it; None: chosen by `auto` within the budget of `config`.
        tokens_per_second: predicted by GPU; 0: not known.
    """

    flag: str
    peak: int
    frees: int
    config: Config = field(repr=False, compare=False)
    save_list: SaveList | None = field(repr=False, compare=False)
    tokens_per_second: float = 0.0

    def __str__(self) -> str:
        said = f"{self.flag:<44}  frees {byte_size(self.frees)}, peak {byte_size(self.peak)}"
        return said + (f", {self.tokens_per_second:,.0f} tok/s/GPU" if self.tokens_per_second else "")


def overrides_that_fit(
    model: MemoryModel,
    save_list: SaveList,
    limit: float,
    of_device: bool = True,
    rates: Rates | None = None,
    attended: AttendedShare | None = None,
) -> list[Override]:
    """List changes with which a run would fit.

    Another save-list or layout leaves what is trained as it is, a smaller batch may not, so they come in this order; of
    each, what is fastest first, or else what keeps most, of the lists the one that `auto` would choose for the limit.
    With a layout comes the global batch that keeps the step what it was. Three at most, of every kind one before a
    second. If none is enough alone, two together. Where rates are known, the three are put by their speed.

    Args:
        model: of the run.
        save_list: of the run; it has a price.
        limit: bytes of the peak and of symmetric memory.
        of_device: whether it is a device's; False: `budget_gib`, which is of the peak alone.
        rates: of the device, if the speed of each change is to be predicted.
        attended: as of `StepTimeModel`.
    """
    pushed = model.symmetric_memory * of_device
    config, now = model.config, model.peak_under(save_list).total + pushed

    def timed(override: Override) -> Override:
        return replace(override, tokens_per_second=_speed(model, override, rates, attended) if rates else 0.0)

    def fitting(changes: "Iterable[_Change]", unknown: float) -> list[Override]:
        found: list[Override] = []
        for change in changes:
            priced = _priced(model, change.config, model.world, change.save_list or save_list)
            if priced is None:
                continue
            peak, symmetric = priced
            needed = peak + symmetric * of_device
            if needed <= limit and needed < now:
                with_list = change.save_list or save_list
                found.append(timed(Override(change.flag, peak, now - needed, change.config, with_list)))
        return _fastest_first(sorted(found, key=lambda override: -override.peak), unknown)

    as_now = timed(Override("", now, 0, config, save_list)).tokens_per_second
    lists = fitting(_save_lists(config), as_now)
    budget = math.floor((limit - pushed) / GIB * 10) / 10
    if limit < now and model.peak_under(LEAST).total <= usable(budget):
        peak, is_auto = int(budget * GIB), config.activation_checkpoint.budget_gib is not None
        to_auto = "" if is_auto else "--activation_checkpoint.recipe auto "
        flag = f"{to_auto}--activation_checkpoint.budget_gib {budget}"
        chosen = replace(config.activation_checkpoint, recipe=recipes.AUTO, budget_gib=budget)
        by_auto = replace(config, activation_checkpoint=chosen)
        lists = [timed(Override(flag, peak, now - pushed - peak, by_auto, None)), *lists]
    sequences, has_experts = sequences_per_step(config, model.world), model.dims.experts is not None
    layouts = fitting(_layouts(config, sequences, has_experts), 0.0)
    batches = fitting(_batches(config), as_now)
    if not (lists or layouts or batches):
        pairs = (
            replace(second, flag=f"{first.flag} {second.flag}")
            for first in (*_layouts(config, sequences, has_experts), *_batches(config))
            for second in (*_save_lists(first.config), *_batches(first.config))
        )
        lists = fitting(pairs, 0.0)
    kinds = lists, layouts, batches
    shown = [kind[n] for n in range(_SHOWN) for kind in kinds if n < len(kind)][:_SHOWN]
    shown = sorted(shown, key=lambda override: next(i for i, kind in enumerate(kinds) if override in kind))
    # What changes the sequences of a step, and so what is trained, comes behind what does not.
    return sorted(
        _fastest_first(shown, 0.0) if rates else shown,
        key=lambda override: bool(rates) and sequences_per_step(override.config, model.world) != sequences,
    )


def _fastest_first(overrides: list[Override], unknown: float) -> list[Override]:
    """Put what is fastest first; those within a percent stay as they came: forecasts are no more exact than that.

    Args:
        overrides: in another order.
        unknown: tokens a second of one whose speed is not known.
    """
    speeds = [override.tokens_per_second or unknown for override in overrides]
    fastest = max(speeds, default=0.0) or 1.0
    return sorted(overrides, key=lambda override: -round(100 * (override.tokens_per_second or unknown) / fastest))


def _speed(model: MemoryModel, override: Override, rates: Rates, attended: AttendedShare | None) -> float:
    """Tokens a second and GPU with a change; 0 if it is not known, as what copy engines save is not."""
    memory = MemoryModel(override.config, model.dims, model.float8, model.rules, model.world, host=model.host)
    if memory.copy_engines != model.copy_engines or no_rates_reason(memory) is not None:
        return 0.0
    time, save_list = StepTimeModel(memory, rates, attended), override.save_list
    if save_list is None:
        save_list = choose(memory, time.times(), override.config.activation_checkpoint.budget_gib or 0.0).save_list
    return time.tokens_per_second(time.step(block_costs(memory.run, save_list)))


def processes_that_fit(model: MemoryModel, save_list: SaveList, limit: float, and_changes: bool = False) -> str | None:
    """Double the processes until the run fits. Returns the flags, or None if a thousand times as many are not enough.

    Takes what `overrides_that_fit` takes.

    Args:
        model: of the run.
        save_list: of the run.
        limit: bytes of the peak and of symmetric memory.
        and_changes: whether to try with each number a list that keeps less, too, then one sequence at a time, then both
            and other layouts.
    """
    for more in (model.world << n for n in range(1, 11)):
        own = _over_the_others(_Change(f"--world {more}", model.config))
        for change in (own, *(_with_less(own, model.dims.experts is not None) if and_changes else ())):
            priced = _priced(model, change.config, more, change.save_list or save_list)
            if priced is not None and sum(priced) <= limit:
                return change.flag
    return None


def _with_less(run: "_Change", has_experts: bool) -> "Iterator[_Change]":
    """A run that keeps nothing, of one sequence at a time, or both, and these in other layouts."""
    config, none = run.config, _changed(run.config, "activation_checkpoint", "recipe", "full")
    keeping = [] if config.activation_checkpoint.budget_gib else [replace(none, save_list=LEAST)]
    at_a_time = [next(_batches(config))] if config.training.local_batch_size > 1 else []
    both = [_behind(first, "activation_checkpoint", "recipe", "full") for first in at_a_time if keeping]
    both = [replace(change, save_list=LEAST) for change in both]
    for change in (*keeping, *at_a_time, *both):
        yield replace(change, flag=f"{run.flag} {change.flag}")
    for last in (both or keeping or at_a_time)[:1]:
        for layout in _layouts(last.config, None, has_experts):
            yield replace(layout, flag=f"{run.flag} {last.flag} {layout.flag}", save_list=last.save_list)


def _behind(first: "_Change", section: str, key: str, value: Any) -> "_Change":
    """A second change behind a first."""
    second = _changed(first.config, section, key, value)
    return replace(second, flag=f"{first.flag} {second.flag}")


def _priced(model: MemoryModel, config: Config, world: int, save_list: SaveList) -> tuple[int, int] | None:
    """The predicted peak of a run with a config that has not been checked, and its symmetric memory.

    None if it cannot be, or has no price.
    """
    try:
        check_config(config, model.dims, world)
        other = MemoryModel(config, model.dims, model.float8, model.rules, world, host=model.host)
        return other.peak_under(save_list).total, other.symmetric_memory
    except ConfigError:
        return None


def check_budget(model: MemoryModel, origin: Origin) -> None:
    """Refuse a budget that no save-list keeps to.

    Args:
        model: of the run.
        origin: where each key was given.

    Raises:
        ConfigError: the run would hold more although it computed everything again.
    """
    budget = model.config.activation_checkpoint.budget_gib
    if budget is None:
        return
    least = model.peak_under(LEAST).total
    if least <= usable(budget):
        return
    flags = overrides_that_fit(model, LEAST, usable(budget), of_device=False)
    enough = math.ceil(least / usable(1) * 10) / 10
    raised = f"--activation_checkpoint.budget_gib {enough}"
    want = (
        f"at least {enough}: {least / GIB:.1f} are predicted when blocks keep only their input, and "
        f"{MARGIN:.1%} stay free as a margin for the prediction"
    )
    fix = f"{raised}, or" + "".join(f"\n          {flag}" for flag in flags) if flags else raised
    problems = Problems(origin)
    problems.add("activation_checkpoint.budget_gib", f"{budget:g}", want, fix)
    problems.raise_all()


@dataclass(frozen=True)
class _Change:
    """A config that differs in a key, and in what keeps the step as it was."""

    flag: str
    config: Config
    save_list: SaveList | None = None  # the run's own


def _save_lists(config: Config) -> Iterator[_Change]:
    """Every other list there is; where the list is chosen to keep to a budget, none."""
    if config.activation_checkpoint.budget_gib is not None:
        return
    for name in recipes.names("activation_checkpoint", config.job.recipe_dirs):
        try:
            other = recipes.load("activation_checkpoint", name, config.job.recipe_dirs)
        except RecipeError:  # of a list that the run does not use
            continue
        yield replace(_changed(config, "activation_checkpoint", "recipe", name), save_list=other)


def _layouts(config: Config, sequences: int | None, has_experts: bool) -> Iterator[_Change]:
    """NCCL for blocks; more ranks to a layer, or to a sequence, with as many sequences a step; fewer replicas; weights
    that are freed; and experts shared out over more or fewer ranks."""
    mesh = config.parallelism
    if mesh.fsdp_copy_engines != "never":
        yield _changed(config, "parallelism", "fsdp_copy_engines", "never")
    for degree in range(mesh.tensor_parallel_degree + 1, 9):  # a host has eight GPUs at most
        change = _changed(config, "parallelism", "tensor_parallel_degree", degree)
        yield _over_the_others(_with_sequences(change, sequences))
    for degree in (2, 4, 8) if config.training.local_batch_size == 1 else ():  # else fewer sequences at a time do it
        if degree > mesh.context_parallel_degree:
            change = _changed(config, "parallelism", "context_parallel_degree", degree)
            yield _over_the_others(_with_sequences(change, sequences))
    for degree in range(1, mesh.data_parallel_replicate_degree):
        yield _over_the_others(_changed(config, "parallelism", "data_parallel_replicate_degree", degree))
    yield _changed(config, "parallelism", "fsdp_reshard_after_forward", "always")
    for degree in (1, 2, 4, 8) if has_experts else ():
        if degree != mesh.expert_parallel_degree:
            yield _changed(config, "parallelism", "expert_parallel_degree", degree)


def _with_sequences(change: _Change, sequences: int | None) -> _Change:
    """Train as many sequences a step as before, where a config leaves that to its layout."""
    if not sequences or change.config.training.global_batch_size:
        return change
    training = replace(change.config.training, global_batch_size=sequences)
    flag = f"{change.flag} --training.global_batch_size {sequences}"
    return replace(change, flag=flag, config=replace(change.config, training=training))


def _over_the_others(change: _Change) -> _Change:
    """Shard weights over all ranks that other axes leave, as is the default, if a config gives their number."""
    mesh = change.config.parallelism
    if mesh.data_parallel_shard_degree == -1:
        return change
    mesh = replace(mesh, data_parallel_shard_degree=-1)
    flag = f"{change.flag} --parallelism.data_parallel_shard_degree -1"
    return replace(change, flag=flag, config=replace(change.config, parallelism=mesh))


def _batches(config: Config) -> Iterator[_Change]:
    """Fewer sequences at a time."""
    for sequences in range(1, config.training.local_batch_size):
        yield _changed(config, "training", "local_batch_size", sequences)


def _changed(config: Config, section: str, key: str, value: Any) -> _Change:
    changed = replace(config, **{section: replace(getattr(config, section), **{key: value})})
    return _Change(f"--{section}.{key} {value}", changed)
