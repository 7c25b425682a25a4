"""Search for the fastest layout, batch and save-list of a new run, or for changes that make a run fit into memory.

A candidate is checked as any config is; `memory.py` and `step_time.py` predict its memory and speed.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby, product
from typing import Any

from titanlite import recipes
from titanlite.byte_size import byte_size
from titanlite.config.check import check_config
from titanlite.config.problems import Origin, Problems
from titanlite.config.recipe_schema import Float8Recipe, ModelDims, OptimizerRecipe, SaveList
from titanlite.config.schema import Config
from titanlite.config.stages import sequences_per_step
from titanlite.errors import ConfigError, RecipeError
from titanlite.forecast.activation_cost import block_costs, no_cost_reasons
from titanlite.forecast.attended import AttendedShare
from titanlite.forecast.choose_save_list import choose
from titanlite.forecast.device_specs import Rates, no_rates_reason
from titanlite.forecast.memory import GIB, GPUS_OF_A_HOST, MARGIN, MemoryModel, spans_hosts, usable
from titanlite.forecast.step_time import StepTimeModel
from titanlite.forecast.traced_run import trace_alike

LEAST = SaveList("", "recompute")
"""The save-list that keeps least: only the input of each block."""

RESERVE_GIB = 3.0
"""Memory of a GPU that CUDA, NCCL and libraries take, and that no prediction counts (see `memory.py`)."""

_NEARLY = 0.99  # share of the fastest speed that counts as equally fast: predictions are no more exact
_WORTH = 1.02  # speed-up over the best named save-list from which on `auto` is worth its time at the start
_DEGREES, _AT_A_TIME = (1, 2, 4, 8), (1, 2, 4, 8, 16, 32)
_LONG = 32_768  # least tokens of a sequence for which a new run tries context parallelism: shorter ones fit a GPU
_SHOWN = 3


@dataclass(frozen=True)
class Setting:
    """The facts that all candidates of a search share. `MemoryModel` describes the other attributes.

    Attributes:
        rates: of the device; None: speeds are not predicted.
        attended: share of causal attention within documents, as in `StepTimeModel`.
        of_device: whether a memory limit includes symmetric memory; False: it is `budget_gib`, for the peak alone.
    """

    dims: ModelDims
    float8: Float8Recipe | None
    rules: OptimizerRecipe
    rates: Rates | None = None
    attended: AttendedShare | None = None
    host: int = GPUS_OF_A_HOST
    of_device: bool = True


@dataclass(frozen=True)
class Candidate:
    """A config that a run could have. Its memory and speed are predicted on first use.

    Attributes:
        config: the run's, with this candidate's layout, batch and save-list.
        save_list: None: `auto` chooses it within the budget of `config`.
        flag: command-line flags that turn the config of the run `beside` into this one.
        budget_gib: memory of the device; None: that of the rates' device, less `RESERVE_GIB`.
    """

    setting: Setting
    world: int
    config: Config
    save_list: SaveList | None = None
    flag: str = ""
    beside: "Candidate | None" = None
    budget_gib: float | None = None

    def __str__(self) -> str:
        said = f"{self.flag:<44}  frees {byte_size(self.frees)}, peak {byte_size(self.peak)}"
        return said + (f", {self.tokens_per_second:,.0f} tok/s/GPU" if self.tokens_per_second else "")

    @cached_property
    def memory(self) -> MemoryModel:
        """Return the model of the run's memory; raise ConfigError if the config is invalid."""
        of = self.setting
        check_config(self.config, of.dims, self.world)
        return MemoryModel(self.config, of.dims, of.float8, of.rules, self.world, host=of.host)

    @cached_property
    def time(self) -> StepTimeModel | None:
        """Return the model of the run's step time; None if no rates are known."""
        rates = self.setting.rates
        if rates is None or no_rates_reason(self.memory) is not None:
            return None
        return StepTimeModel(self.memory, rates, self.setting.attended)

    @cached_property
    def _list(self) -> SaveList | None:
        """Return the save-list, or the choice of `auto` by the measured rates; None if these are not known."""
        budget = self.config.activation_checkpoint.budget_gib
        if self.save_list is None and self.time is not None and budget is not None:
            return choose(self.memory, self.time.times(), budget).save_list
        return self.save_list

    @cached_property
    def peak(self) -> int:
        """Return the predicted bytes of the peak, with a second window of experts' rows. For a change to `auto`, which
        will time the run itself: the budget.

        Raises:
            ConfigError: the config is invalid, or the cost of the save-list cannot be predicted.
        """
        if self._list is None or (self.save_list is None and self.beside is not None):
            return int((self.config.activation_checkpoint.budget_gib or 0.0) * GIB)
        return self.memory.needed_under(self._list)

    @property
    def on_device(self) -> int:
        """Return the bytes on a GPU at the peak, with symmetric memory."""
        return self.peak + self.memory.symmetric_memory

    @property
    def needed(self) -> int:
        """Return the bytes to compare with a limit: on the GPU, or of the peak alone (`Setting.of_device`)."""
        return self.on_device if self.setting.of_device else self.peak

    @property
    def frees(self) -> int:
        """Return the bytes that the flag saves compared with the run `beside`; 0 without one."""
        return self.beside.needed - self.needed if self.beside else 0

    @cached_property
    def tokens_per_second(self) -> float:
        """Predict the tokens per second of a GPU; 0: unknown, also if the change switches copy engines on or off."""
        if self.time is None or self._list is None:
            return 0.0
        if self.beside is not None and self.beside.memory.copy_engines != self.memory.copy_engines:
            return 0.0
        return self.time.tokens_per_second(self.time.step(block_costs(self.memory.run, self._list)))

    @property
    def fits(self) -> bool:
        """Return whether the run fits into the device's memory, less a margin for the prediction."""
        rates = self.setting.rates
        budget = rates.device_gib - RESERVE_GIB if self.budget_gib is None and rates else self.budget_gib
        return budget is None or self.on_device <= usable(budget)

    @property
    def degree(self) -> int:
        """Return the tensor-parallel degree."""
        return self.config.parallelism.tensor_parallel_degree

    @property
    def experts_over(self) -> int:
        """Return the expert-parallel degree."""
        return self.config.parallelism.expert_parallel_degree

    @property
    def replicas(self) -> int:
        """Return the number of replicas, over each of which FSDP splits the weights."""
        return self.config.parallelism.data_parallel_replicate_degree

    @property
    def context_over(self) -> int:
        """Return the context-parallel degree."""
        return self.config.parallelism.context_parallel_degree

    @property
    def at_a_time(self) -> int:
        """Return the sequences of a micro-step on a data-parallel rank."""
        return self.config.training.local_batch_size

    @property
    def recipe(self) -> str:
        """Return the name of the save-list."""
        return self.config.activation_checkpoint.recipe

    def changed(self, section: str, key: str, value: Any) -> "Candidate":
        """Return this candidate with another value of one config key, and with the flag for it."""
        config = replace(self.config, **{section: replace(getattr(self.config, section), **{key: value})})
        flag = f"{self.flag} --{section}.{key} {value}".lstrip()
        return replace(self, config=config, flag=flag, beside=self.beside or self)

    def keeping(self, name: str, save_list: SaveList | None, budget_gib: float | None = None) -> "Candidate":
        """Return this candidate with the save-list called `name`; None: `auto` chooses it within `budget_gib`."""
        kept = replace(self.config.activation_checkpoint, recipe=name, budget_gib=budget_gib)
        found = replace(self, config=replace(self.config, activation_checkpoint=kept), save_list=save_list)
        vars(found).update({key: vars(self)[key] for key in ("memory", "time") if key in vars(self)})  # for any list
        return found


def optimizer_rules(config: Config) -> OptimizerRecipe:
    """Load the optimizer recipe that a config names."""
    return recipes.load("optimizer", config.optimizer.recipe, config.job.recipe_dirs)


def gpu_candidates(base: Candidate) -> list[Candidate]:
    """Return the candidates for a new run on GPUs whose rates are known.

    Every tensor-parallel degree within a host is combined with every micro-batch and shipped save-list, and with the
    list that `auto` would make if that may be faster. A mixture of experts also gets every expert-parallel degree,
    and a run with long sequences every context-parallel degree. On several hosts each of these is tried with replicas
    of one host or more (HSDP).

    `base` has no layout and save-list yet; its global batch is the target.
    """
    layouts = list(_layouts_of(base, base.setting.host))
    for _, traced in groupby(layouts, lambda layout: (layout.degree, layout.experts_over, layout.context_over)):
        configs, of = [layout.config for layout in traced], base.setting
        trace_alike(configs, of.dims, of.float8, spans_hosts(configs[0], base.world, of.host))
    named, too_large = list[tuple[Candidate, list[Candidate]]](), set[object]()
    for layout in layouts:
        alike = layout.degree, layout.experts_over, layout.context_over, layout.at_a_time
        if alike not in too_large:
            named.append((layout, candidates_of_layout(layout)))
            if not any(candidate.fits for candidate in named[-1][1]):
                too_large.add(alike)  # more replicas take more memory
    fastest = max((c.tokens_per_second for _, found in named for c in found if c.fits), default=0.0)
    made: list[Candidate] = []
    for layout, found in named:
        # No list is faster than keeping everything, so `auto` is not tried where even this gains little.
        most = max((candidate.tokens_per_second for candidate in found), default=0.0)
        if any(candidate.fits for candidate in found) and most > _WORTH * fastest and base.setting.rates:
            of_device = base.setting.rates.device_gib - RESERVE_GIB - layout.memory.symmetric_memory / GIB
            made.append(layout.keeping(recipes.AUTO, None, int(of_device * 10) / 10))
    return [*(candidate for _, found in named for candidate in found), *made]


def candidates_of_layout(layout: Candidate) -> list[Candidate]:
    """Return a layout with each shipped save-list whose cost can be predicted; empty if no rates are known."""
    if layout.memory.run.no_trace_reason is not None or layout.time is None:
        return []
    lists = {name: recipes.load("activation_checkpoint", name) for name in recipes.names("activation_checkpoint")}
    return [layout.keeping(*each) for each in lists.items() if not no_cost_reasons(each[1])]


def cpu_candidates(base: Candidate, host_gib: float) -> list[Candidate]:
    """Return the candidates for a new run on CPUs, in order of preference, as no rates are known.

    `host_gib` is the memory of the host, half of which is left free.
    """
    base, lists = replace(base, budget_gib=host_gib / base.world / 2), ("none", "full")
    found = [
        layout.keeping(name, recipes.load("activation_checkpoint", name))
        for layout in _layouts_of(base, most=1)
        for name in lists
    ]
    return sorted(found, key=lambda candidate: (candidate.recipe != "none", -candidate.at_a_time))


def best(candidates: Sequence[Candidate]) -> Candidate | None:
    """Return the fastest candidate that fits, or None.

    Among equally fast ones (`_NEARLY`) a lower tensor-parallel degree is preferred, then less memory, which fewer
    replicas take.
    """
    fitting = [candidate for candidate in candidates if candidate.fits]
    named = [candidate for candidate in fitting if candidate.recipe != recipes.AUTO]
    if not named:
        return None
    if not named[0].tokens_per_second:  # unknown: the first is preferred
        return named[0]
    fastest = max(candidate.tokens_per_second for candidate in named)
    made = [candidate for candidate in fitting if candidate.tokens_per_second > _WORTH * fastest]
    if made:
        named, fastest = made, max(candidate.tokens_per_second for candidate in made)
    near = [candidate for candidate in named if candidate.tokens_per_second >= _NEARLY * fastest]
    return min(near, key=lambda candidate: (candidate.degree, candidate.replicas, candidate.on_device))


def fastest_by(candidates: Sequence[Candidate], key: Callable[[Candidate], object]) -> Mapping[object, Candidate]:
    """Return for each value of `key` the fastest candidate that fits, or the one with least memory if none fits."""
    found: dict[object, Candidate] = {}
    for candidate in sorted(candidates, key=lambda c: (c.fits, c.tokens_per_second if c.fits else -c.on_device)):
        found[key(candidate)] = candidate
    return {key(candidate): found[key(candidate)] for candidate in candidates}  # in the given order


def _layouts_of(base: Candidate, most: int) -> Iterator[Candidate]:
    """Yield every possible layout and micro-batch, with the global batch nearest to that of `base`.

    `most` is the largest product of the degrees of tensor, expert and context parallelism. GPUs whose rates are known
    get numbers of replicas too.
    """
    config, wanted = base.config, base.config.training.global_batch_size or 1
    contexts = _DEGREES if config.training.seq_len >= _LONG else (1,)
    degrees = [(degree, 1, context) for degree, context in product(_DEGREES, contexts)]
    degrees += [(1, experts, 1) for experts in _DEGREES[1:]] if base.setting.dims.experts is not None else []
    for degree, experts, context in degrees:
        if degree * experts * context > most or base.world % (degree * experts * context):
            continue
        is_async = degree > 1 and config.parallelism.async_tensor_parallel
        of_tensors = {"tensor_parallel_degree": degree, "async_tensor_parallel": is_async}
        of_tokens = {"expert_parallel_degree": experts, "context_parallel_degree": context}
        mesh = replace(config.parallelism, **of_tensors, **of_tokens)
        for n, replicas in product(_AT_A_TIME, _replicas_of(base)):
            at_once = n * base.world // (degree * context)
            if at_once > wanted and n > 1:
                continue
            sequences = max(1, round(wanted / at_once)) * at_once
            training = replace(config.training, local_batch_size=n, global_batch_size=sequences)
            mesh = replace(mesh, data_parallel_replicate_degree=replicas)
            possible = replace(base, config=replace(config, parallelism=mesh, training=training))
            if _is_possible(possible):
                yield possible


def _replicas_of(base: Candidate) -> list[int]:
    """Return the numbers of replicas to try: 1, powers of two that divide the hosts, and one for each host."""
    hosts = max(1, base.world // base.setting.host) if base.setting.rates else 1
    return sorted({n for n in (2**i for i in range(hosts.bit_length())) if hosts % n == 0} | {hosts})


def changes_that_fit(
    model: MemoryModel,
    save_list: SaveList,
    limit: float,
    of_device: bool = True,
    rates: Rates | None = None,
    attended: AttendedShare | None = None,
) -> list[Candidate]:
    """Return up to three changes with which a run would fit into `limit` bytes.

    There are three kinds: another save-list, another layout with the same global batch, and a smaller batch, which may
    change the result of training. One change of each kind comes before a second one; if none suffices, two are
    combined. Within a kind the fastest comes first, or without speeds the one that uses most memory. If rates are
    known, the three are sorted by speed, and those with another global batch come last.

    The cost of `save_list`, the run's, must be predictable. `Setting` describes the other arguments.
    """
    setting = Setting(model.dims, model.float8, model.rules, rates, attended, model.host, of_device)
    run = Candidate(setting, model.world, model.config, save_list)
    sequences, as_now = sequences_per_step(run.config, run.world), run.tokens_per_second

    def fitting(changes: Iterable[Candidate], unknown: float) -> list[Candidate]:
        found = [other for other in changes if _is_possible(other) and other.needed <= limit and other.frees > 0]
        return _fastest_first(sorted(found, key=lambda other: -other.peak), unknown)

    lists = fitting(_save_lists(run), as_now)
    budget = run.config.activation_checkpoint.budget_gib if not of_device else None
    lower = budget or math.floor((limit - model.symmetric_memory) / GIB * 10) / 10
    if limit < run.needed and model.needed_under(LEAST) <= usable(lower):
        flags = [] if run.recipe == recipes.AUTO else ["--activation_checkpoint.recipe auto"]
        flags += [] if budget else [f"--activation_checkpoint.budget_gib {lower}"]
        lists = [replace(run.keeping(recipes.AUTO, None, lower), flag=" ".join(flags), beside=run), *lists]
    layouts, batches = fitting(_layouts(run, sequences), 0.0), fitting(_batches(run), as_now)
    if not (lists or layouts or batches):
        firsts = *_layouts(run, sequences), *_batches(run)
        lists = fitting((second for first in firsts for second in (*_save_lists(first), *_batches(first))), 0.0)
    kinds = lists, layouts, batches
    shown = [kind[n] for n in range(_SHOWN) for kind in kinds if n < len(kind)][:_SHOWN]
    shown = sorted(shown, key=lambda other: next(i for i, kind in enumerate(kinds) if other in kind))
    if rates is None:
        return shown
    is_other = {other.flag: sequences_per_step(other.config, other.world) != sequences for other in shown}
    return sorted(_fastest_first(shown, 0.0), key=lambda other: is_other[other.flag])


def processes_that_fit(model: MemoryModel, save_list: SaveList, limit: float, and_changes: bool = False) -> str | None:
    """Double the number of processes until the run fits; return the flags, or None if 1024 times as many do not fit.

    `limit` is in bytes, for the peak and symmetric memory together. With `and_changes` each number of processes is also
    tried with the save-list `LEAST`, with one sequence per micro-step, with both, and in other layouts.
    """
    setting = Setting(model.dims, model.float8, model.rules, host=model.host)
    run = Candidate(setting, model.world, model.config, save_list)
    for more in (model.world << n for n in range(1, 11)):
        own = _over_the_others(replace(run, world=more, flag=f"--world {more}"))
        for other in (own, *(_with_less(own) if and_changes else ())):
            if _is_possible(other) and other.on_device <= limit:
                return other.flag
    return None


def check_budget(model: MemoryModel, save_list: SaveList | None, origin: Origin, rates: Rates | None = None) -> None:
    """Refuse an `activation_checkpoint.budget_gib` that a save-list is predicted to exceed.

    A `save_list` of None stands for `auto`, whose blocks keep only their input where memory is least. `rates` are those
    of the device, if it is known.

    Raises:
        ConfigError: the budget is too small; `origin` gives the file and line of the key.
    """
    budget, kept = model.config.activation_checkpoint.budget_gib, save_list or LEAST
    if budget is None or (save_list is not None and (model.run.no_trace_reason or no_cost_reasons(save_list))):
        return
    needed = model.needed_under(kept)
    if needed <= usable(budget):
        return
    others = changes_that_fit(model, kept, usable(budget), of_device=False)
    enough = _rounded_up(needed / usable(1))
    room = (rates.device_gib - RESERVE_GIB) - model.symmetric_memory / GIB if rates else math.inf
    fixes = [f"--activation_checkpoint.budget_gib {enough}"] if enough <= room else []
    of = f"with {model.config.activation_checkpoint.recipe}" if save_list else "when blocks keep only their input"
    want = (
        f"at least {enough}: {needed / GIB:.{_digits(enough)}f} are predicted {of}, and "
        f"{MARGIN:.1%} stay free as a margin for the prediction"
    )
    problems = Problems(origin)
    fixes += map(str, others) if others else [f"more ranks: no other layout or batch fits {budget:g} GiB"]
    fix = fixes[0] if len(fixes) == 1 else "one of these" + "".join(f"\n          {each}" for each in fixes)
    problems.add("activation_checkpoint.budget_gib", f"{budget:g}", want, fix)
    problems.raise_all()


def _digits(gib: float) -> int:
    """Return after how many digits an amount of memory is cut off: it has three at least, and one after the point."""
    return max(1, 2 - math.floor(math.log10(gib)))


def _rounded_up(gib: float) -> float:
    """Round an amount of memory up to as many digits as `_digits` says."""
    n = _digits(gib)
    return round(math.ceil(gib * 10**n) / 10**n, n)


def _is_possible(candidate: Candidate) -> bool:
    """Return whether a candidate's config is valid, and its peak can be predicted and keeps to the budget of it."""
    budget = candidate.config.activation_checkpoint.budget_gib or math.inf
    try:
        check_config(candidate.config, candidate.setting.dims, candidate.world)
        return candidate.save_list is None or 0 < candidate.peak <= usable(budget)
    except ConfigError:
        return False


def _fastest_first(others: list[Candidate], unknown: float) -> list[Candidate]:
    """Sort by speed, by `unknown` if none is predicted. Keep the order within a percent: predictions are not exact."""
    fastest = max((other.tokens_per_second or unknown for other in others), default=0.0) or 1.0
    return sorted(others, key=lambda other: -round(100 * (other.tokens_per_second or unknown) / fastest))


def _with_less(run: Candidate) -> Iterator[Candidate]:
    """Yield the run with the save-list `LEAST`, with one sequence per micro-step, with both, then in other layouts."""
    is_auto, is_many = run.recipe == recipes.AUTO, run.at_a_time > 1

    def in_full(one: Candidate) -> Candidate:
        return replace(one.changed("activation_checkpoint", "recipe", "full"), save_list=LEAST)

    one_at_a_time = run.changed("training", "local_batch_size", 1)
    found = [] if is_auto else [in_full(run)]
    found += [one_at_a_time] if is_many else []
    found += [in_full(one_at_a_time)] if is_many and not is_auto else []
    yield from found
    yield from (layout for last in found[-1:] for layout in _layouts(last, None))


def _save_lists(run: Candidate) -> Iterator[Candidate]:
    """Yield the run with every save-list that can be loaded; nothing if `auto` chooses among more of them."""
    if run.recipe == recipes.AUTO:
        return
    for name in recipes.names("activation_checkpoint", run.config.job.recipe_dirs):
        try:
            other = recipes.load("activation_checkpoint", name, run.config.job.recipe_dirs)
        except RecipeError:  # in a list that the run does not use
            continue
        yield replace(run.changed("activation_checkpoint", "recipe", name), save_list=other)


def _layouts(run: Candidate, sequences: int | None) -> Iterator[Candidate]:
    """Yield the run without copy engines, with more tensor- or context-parallel ranks and a global batch of `sequences`
    (None: the config's), with fewer replicas, with weights freed after forward, with other expert-parallel degrees."""
    mesh = run.config.parallelism

    def with_degree(axis: str, degree: int) -> Candidate:
        return run.changed("parallelism", f"{axis}_degree", degree)

    def keeping_the_step(other: Candidate) -> Candidate:
        is_given = not sequences or other.config.training.global_batch_size
        return _over_the_others(other if is_given else other.changed("training", "global_batch_size", sequences))

    if mesh.fsdp_copy_engines != "never":
        yield run.changed("parallelism", "fsdp_copy_engines", "never")
    for degree in range(mesh.tensor_parallel_degree + 1, 9):  # a host has eight GPUs at most
        yield keeping_the_step(with_degree("tensor_parallel", degree))
    for degree in (2, 4, 8) if run.at_a_time == 1 else ():  # else a smaller micro-batch saves the same
        if degree > mesh.context_parallel_degree:
            yield keeping_the_step(with_degree("context_parallel", degree))
    for degree in range(1, mesh.data_parallel_replicate_degree):
        yield _over_the_others(with_degree("data_parallel_replicate", degree))
    yield run.changed("parallelism", "fsdp_reshard_after_forward", "always")
    for degree in (1, 2, 4, 8) if run.setting.dims.experts is not None else ():
        if degree != mesh.expert_parallel_degree:
            yield with_degree("expert_parallel", degree)


def _over_the_others(run: Candidate) -> Candidate:
    """Set data_parallel_shard_degree to -1, so that FSDP shards over all remaining ranks."""
    is_free = run.config.parallelism.data_parallel_shard_degree == -1
    return run if is_free else run.changed("parallelism", "data_parallel_shard_degree", -1)


def _batches(run: Candidate) -> Iterator[Candidate]:
    """Yield the run with each smaller micro-batch."""
    return (run.changed("training", "local_batch_size", n) for n in range(1, run.at_a_time))
