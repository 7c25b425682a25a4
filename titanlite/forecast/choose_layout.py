"""Choose how a run is split over its GPUs, how much each does at a time, and what blocks keep: the fastest that fits.

Every tensor-parallel degree of a host is tried with every micro-batch and every shipped save-list, and the list that
`auto` would make. Of what is nearly as fast as the fastest, the one with fewer tensor-parallel ranks is taken, and of
these the one that takes least memory: forecasts are no more exact than that.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from titanlite import recipes
from titanlite.config.check import check_config
from titanlite.config.recipe_schema import Float8Recipe, ModelDims, OptimizerRecipe, SaveList
from titanlite.config.schema import Config
from titanlite.errors import ConfigError
from titanlite.forecast.activation_cost import block_costs, no_cost_reasons
from titanlite.forecast.attended import AttendedShare
from titanlite.forecast.choose_save_list import choose
from titanlite.forecast.device_specs import Rates, no_rates_reason
from titanlite.forecast.memory import GIB, MemoryModel, usable
from titanlite.forecast.step_time import StepTimeModel

RESERVE_GIB = 3.0
"""Memory that CUDA, NCCL and libraries take of a GPU, which no forecast counts: a few GiB, as `memory.py` says."""

_NEARLY = 0.99  # of the fastest: as fast
_WORTH = 1.02  # against a list with a name: worth one that is made when the run starts
_DEGREES, _AT_A_TIME = (1, 2, 4, 8), (1, 2, 4, 8, 16, 32)


@dataclass(frozen=True)
class Option:
    """One way to run.

    Attributes:
        config: with its layout, batch and save-list.
        on_device: bytes that a GPU holds at the peak, symmetric memory among them.
        step_s: of a step; 0 where no rates are known.
        tokens_per_second: by GPU; 0 likewise.
        fits: whether the GPU has that much.
    """

    config: Config
    on_device: int
    step_s: float
    tokens_per_second: float
    fits: bool

    @property
    def degree(self) -> int:
        """Tensor-parallel ranks."""
        return self.config.parallelism.tensor_parallel_degree

    @property
    def at_a_time(self) -> int:
        """Sequences of a micro-step."""
        return self.config.training.local_batch_size

    @property
    def save_list(self) -> str:
        """Name of the save-list."""
        return self.config.activation_checkpoint.recipe


def gpu_options(
    config: Config, dims: ModelDims, world: int, rates: Rates, attended: AttendedShare | None = None
) -> list[Option]:
    """List what a run could be on GPUs whose rates are known.

    Args:
        config: without layout and save-list; its global batch is what is aimed at.
        dims: the model's dimensions.
        world: number of GPUs.
        rates: of them, with their memory.
        attended: as of `StepTimeModel`.
    """
    layouts = list(_layouts_of(config, dims, world, rates.host))
    named = [options_of_layout(laid_out, dims, world, rates, attended) for laid_out in layouts]
    fastest = max((o.tokens_per_second for options in named for o in options if o.fits), default=0.0)
    made: list[Option] = []
    for laid_out, options in zip(layouts, named, strict=True):
        # Keeping everything is faster than any list: where even that is hardly faster, none is looked for.
        most = max((option.tokens_per_second for option in options), default=0.0)
        if any(option.fits for option in options) and most > _WORTH * fastest:
            made.append(_with_auto(laid_out, dims, world, rates, attended))
    return [*(option for options in named for option in options), *made]


def options_of_layout(
    config: Config,
    dims: ModelDims,
    world: int,
    rates: Rates,
    attended: AttendedShare | None = None,
    float8: Float8Recipe | None = None,
) -> list[Option]:
    """List what a run with a layout and a micro-batch could keep.

    Args:
        config: with all but a save-list.
        dims: the model's dimensions.
        world: number of GPUs.
        rates: of them, with their memory.
        attended: as of `StepTimeModel`.
        float8: arithmetic of the linear layers, or None.
    """
    memory = MemoryModel(config, dims, float8, optimizer_rules(config), world, host=rates.host)
    if memory.run.no_trace_reason is not None or no_rates_reason(memory) is not None:
        return []
    time, budget = StepTimeModel(memory, rates, attended), rates.device_gib - RESERVE_GIB
    lists = {name: recipes.load("activation_checkpoint", name) for name in recipes.names("activation_checkpoint")}
    return [
        _priced_option(_with_list(config, name), memory, time, save_list, budget)
        for name, save_list in lists.items()
        if not no_cost_reasons(save_list)
    ]


def optimizer_rules(config: Config) -> OptimizerRecipe:
    """Load the optimizer's recipe of a config that is being chosen."""
    return recipes.load("optimizer", config.optimizer.recipe, config.job.recipe_dirs)


def _with_auto(config: Config, dims: ModelDims, world: int, rates: Rates, attended: AttendedShare | None) -> Option:
    """Give a layout the list that `auto` would make by these rates."""
    memory = MemoryModel(config, dims, None, optimizer_rules(config), world, host=rates.host)
    budget, time = rates.device_gib - RESERVE_GIB, StepTimeModel(memory, rates, attended)
    of_peak = int((budget - memory.symmetric_memory / GIB) * 10) / 10
    save_list = choose(memory, time.times(), of_peak).save_list
    return _priced_option(_with_list(config, recipes.AUTO, of_peak), memory, time, save_list, budget)


def cpu_options(config: Config, dims: ModelDims, world: int, host_gib: float) -> list[Option]:
    """List what a run could be on a CPU, in the order in which they are to be preferred: no rates are known of it.

    Args:
        config: as of `gpu_options`.
        dims: the model's dimensions.
        world: number of processes.
        host_gib: memory that they share.
    """
    lists = {name: recipes.load("activation_checkpoint", name) for name in ("none", "full")}
    found: list[Option] = []
    for laid_out in _layouts_of(config, dims, world, most=1):
        memory = MemoryModel(laid_out, dims, None, optimizer_rules(laid_out), world)
        for name, save_list in lists.items():
            found.append(_priced_option(_with_list(laid_out, name), memory, None, save_list, host_gib / world / 2))
    return sorted(found, key=lambda option: (option.save_list != "none", -option.at_a_time))


def best(options: list[Option]) -> Option | None:
    """Choose among options that fit; None if none does."""
    fitting = [option for option in options if option.fits]
    named = [option for option in fitting if option.save_list != recipes.AUTO]
    if not named:
        return None
    if not named[0].tokens_per_second:  # in their order
        return named[0]
    fastest = max(option.tokens_per_second for option in named)
    made = [option for option in fitting if option.tokens_per_second > _WORTH * fastest]
    if made:
        named, fastest = made, max(option.tokens_per_second for option in made)
    near = [option for option in named if option.tokens_per_second >= _NEARLY * fastest]
    return min(near, key=lambda option: (option.degree, option.on_device))


def fastest_by(options: Sequence[Option], key: Callable[[Option], object]) -> Mapping[object, Option]:
    """Give the fastest option that fits for each value of a property; the smallest one where none fits."""
    found: dict[object, Option] = {}
    for option in options:
        rank = (option.fits, option.tokens_per_second if option.fits else -option.on_device)
        other = found.get(key(option))
        if other is None or rank > (other.fits, other.tokens_per_second if other.fits else -other.on_device):
            found[key(option)] = option
    return found


def _layouts_of(config: Config, dims: ModelDims, world: int, most: int) -> Iterator[Config]:
    """Give every layout and micro-batch that is possible, with the global batch nearest to the one that is wanted."""
    wanted = config.training.global_batch_size or 1
    for degree in _DEGREES:
        if degree > most or world % degree:
            continue
        mesh = replace(
            config.parallelism,
            tensor_parallel_degree=degree,
            async_tensor_parallel=degree > 1 and config.parallelism.async_tensor_parallel,
        )
        for n in _AT_A_TIME:
            at_once = n * world // degree
            if at_once > wanted and n > 1:
                continue
            sequences = max(1, round(wanted / at_once)) * at_once
            training = replace(config.training, local_batch_size=n, global_batch_size=sequences)
            possible = replace(config, parallelism=mesh, training=training)
            try:
                check_config(possible, dims, world)
            except ConfigError:
                continue
            yield possible


def _with_list(config: Config, name: str, budget_gib: float | None = None) -> Config:
    chosen = replace(config.activation_checkpoint, recipe=name, budget_gib=budget_gib)
    return replace(config, activation_checkpoint=chosen)


def _priced_option(
    config: Config, memory: MemoryModel, time: StepTimeModel | None, save_list: SaveList, budget_gib: float
) -> Option:
    blocks = block_costs(memory.run, save_list)
    on_device = memory.peak(blocks).total + memory.symmetric_memory
    step = time.step(blocks) if time else None
    speed = time.tokens_per_second(step) if time and step else 0.0
    return Option(config, on_device, step.total / 1e3 if step else 0.0, speed, on_device <= usable(budget_gib))
