"""Print `titanlite plan FILE --activation-checkpoint`: the price of each rule, and what every list would keep.

All numbers follow from traced blocks (`titanlite/forecast/activation_cost.py`, `memory.py`), without a GPU.
"""

from dataclasses import dataclass

from titanlite import recipes
from titanlite.activation_checkpoint.operations import CLASSES, OPERATIONS
from titanlite.activation_checkpoint.rules import BLOCK, rule_in_words
from titanlite.byte_size import byte_size
from titanlite.config.recipe_schema import SaveList
from titanlite.errors import ConfigError, RecipeError, describe
from titanlite.forecast.activation_cost import RuleCost, block_costs, rule_costs
from titanlite.forecast.memory import MemoryModel
from titanlite.forecast.traced_run import TracedRun
from titanlite.preflight.checked_run import CheckedRun
from titanlite.text_table import columns
from titanlite.training.assemble import Assembly

_MIB, _GIB = 2**20, 2**30


@dataclass(frozen=True)
class Totals:
    """The costs of all blocks under a save-list, on one rank and in one micro-step."""

    held: int  # bytes kept for backward, the blocks' inputs included
    flops: int  # FLOPs of recomputation
    moved: int  # bytes that recomputation reads and writes


def totals(run: TracedRun, save_list: SaveList) -> Totals:
    """Return the costs of all blocks of a model under a save-list; raise a `RecipeError` as `block_costs` does."""
    blocks = block_costs(run, save_list)
    again = [activation for block in blocks for activation in block.recomputed]
    return Totals(sum(b.held for b in blocks), sum(a.flops for a in again), sum(a.moved for a in again))


def price_list(made: Assembly, file: str, world: int | None = None) -> str:
    """Return the prices of the rules of a run's save-list, and the totals of all lists; with `world`, also peaks."""
    checked, run = made.asked, made.memory.run
    config, dims, save_list = checked.config, checked.dims, checked.save_list
    if run.no_trace_reason:
        raise RecipeError(describe(file, [run.no_trace_reason]))
    name = config.activation_checkpoint.recipe
    arithmetic = config.training.mixed_precision_param if checked.float8 is None else f"float8 {config.float8.recipe}"
    later = ": chosen when the run starts, as the fastest whose peak is at most {:g} GiB\n"
    return "".join(
        [
            f"{file}: {config.model.file or config.model.name} {config.model.flavor}, {dims.n_layers} layers, "
            f"{run.tokens:,} tokens a micro-step, tensor parallel {run.tensor_parallel}, {arithmetic}, "
            f"{'compiled' if run.compiled else 'eager'}\n\nsave-list {name}",
            *(_of_rules(run, save_list) if save_list else [later.format(config.activation_checkpoint.budget_gib)]),
            "\nall layers, on one rank: what is kept, and what is recomputed in a micro-step:\n",
            _of_all_lists(checked, made.memory, world is not None),
        ]
    )


def _of_rules(run: TracedRun, save_list: SaveList) -> list[str]:
    """Return the introduction and the table of the rules of a run's save-list."""
    block_costs(run, save_list)  # raises for a list that cannot be priced, before anything is printed
    prices, n_layers = rule_costs(run, save_list), len(run.blocks)
    rows = [(rule_in_words(p.rule), f"{p.blocks} of {n_layers}", *_amounts(p)) for p in prices]
    introduction = ", on one rank and per layer: what is kept, and what recomputing it would cost:\n"
    if not save_list.rules and save_list.default == "save":
        return [introduction, "  no rules: everything is kept\n"]
    size = f"{run.blocks[0].input_bytes / _MIB:,.1f}"
    rows.append(("the block's input, always", f"{n_layers} of {n_layers}", size, "", ""))
    return [introduction, columns(("rule", "layers", "MiB", "GFLOP", "MiB moved"), *rows)]


def _of_all_lists(checked: CheckedRun, model: MemoryModel, has_peak: bool) -> str:
    """Return a table of the costs of each save-list, first the run's own. `has_peak`: with the peak of memory."""
    config = checked.config
    own = [config.activation_checkpoint.recipe] if checked.save_list else []
    priced: dict[str, tuple[Totals, float | None] | None] = {}
    for name in dict.fromkeys([*own, *recipes.names("activation_checkpoint", config.job.recipe_dirs)]):
        try:
            save_list = recipes.load("activation_checkpoint", name, config.job.recipe_dirs)
            sums = totals(model.run, save_list)
            priced[name] = sums, model.peak_under(save_list).total if has_peak else None
        except ConfigError:  # the file of a list that the run does not use is broken, or the list cannot work here
            priced[name] = None
    is_small = all(max(sums.held, sums.moved) < _GIB for sums, _ in filter(None, priced.values()))
    unit, called = (_MIB, "MiB") if is_small else (_GIB, "GiB")
    rows: list[tuple[str, ...]] = [("save-list", called, "TFLOP", f"{called} moved", "peak of the run")]
    for name, price in priced.items():
        cells = "no price", "", "", ""
        if price is not None:
            sums, peak = price
            amounts = f"{sums.held / unit:,.2f}", f"{sums.flops / 1e12:,.2f}", f"{sums.moved / unit:,.2f}"
            cells = *amounts, byte_size(peak or 0)
        rows.append((name, *cells))
    return columns(*(row[: 4 + has_peak] for row in rows))


def _amounts(price: RuleCost) -> tuple[str, str, str]:
    if not price.matches:
        seen = "nothing here" if price.rule.op in (BLOCK, *CLASSES, *OPERATIONS) else "not priced"
        return seen, "", ""
    return f"{price.held / _MIB:,.1f}", f"{price.flops / 1e9:,.1f}", f"{price.moved / _MIB:,.1f}"
