"""`recipe = "auto"`: the fastest save-list whose predicted peak stays within a budget.

What can be kept falls into a few groups: attention, each matmul, each collective, or a whole block. A *selection* is a
set of them; its cost is read off the trace (`activation_cost.py`), and the time to compute the rest again has been
measured on this device (`time_activations.py`). Most blocks of a model are alike, so a list is two selections, one for
the first n blocks and one for the others: the second keeps more, for backward begins there. All pairs and all n are
tried, and each peak is that of `memory.py`: of such lists none is faster by the measured times. Two and not three,
because each selection is a graph to compile, and a third one could gain no more than part of one block.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import chain, combinations

from titanlite.activation_checkpoint.operations import CLASS_OF, FUSED
from titanlite.activation_checkpoint.rules import BLOCK
from titanlite.config.recipe_schema import SaveList, SaveRule
from titanlite.errors import RecipeError
from titanlite.forecast.activation_cost import Activation, BlockCost, activations, block_costs
from titanlite.forecast.memory import GIB, MemoryModel, usable
from titanlite.forecast.traced_run import TracedRun

_EXPENSIVE = ("attention", "matmul", "communication", "experts", "dispatch")


@dataclass(frozen=True)
class RecomputeTimes:
    """Seconds to compute parts of a block again: each of `expensive`, and the rest of a block that is not whole."""

    activations: Mapping[Activation, float]
    elementwise: float

    def seconds(self, block: BlockCost) -> float:
        """Return the seconds of what a block computes again."""
        parts = sum(self.activations.get(a, 0.0) for a in block.recomputed)
        return parts + (0.0 if block.whole else self.elementwise)


@dataclass(frozen=True)
class Choice:
    """The chosen save-list.

    Attributes:
        peak: predicted, in bytes.
        seconds: of recomputation in a micro-step.
        prepared_s: that it took to time a block and to choose.
    """

    save_list: SaveList
    peak: int
    seconds: float
    prepared_s: float = 0.0


@dataclass(frozen=True)
class _Selection:
    """A set of rules, what blocks keep by it, and the seconds that each computes again."""

    rules: tuple[SaveRule, ...]
    blocks: list[BlockCost]
    seconds: list[float]

    def is_beaten_by(self, other: "_Selection") -> bool:
        """Check that in no block the other one keeps more or takes longer."""
        of_both = zip(self.blocks, self.seconds, other.blocks, other.seconds, strict=True)
        return all(block.held >= less.held and seconds >= faster for block, seconds, less, faster in of_both)


def expensive(run: TracedRun) -> dict[SaveRule, list[Activation]]:
    """Return what may be worth keeping of the blocks, by the rule that keeps it.

    Statistics and casts are not: computing them again is part of the elementwise work, or of their matmul.
    """
    found: dict[SaveRule, list[Activation]] = {}
    kinds = {id(block): block for block in run.blocks}.values()
    for activation in dict.fromkeys(each for block in kinds for each in activations(block)):
        # A fused operation is kept as a matmul: attention's q, k and v must be kept by a rule that says so.
        name = "matmul" if activation.op in FUSED else CLASS_OF[activation.op]
        if name in _EXPENSIVE:
            rule = SaveRule(name, "save", module=(activation.layer,) if activation.layer else ())
            found.setdefault(rule, []).append(activation)
    return found


def choose(model: MemoryModel, times: RecomputeTimes, budget_gib: float) -> Choice:
    """Find the fastest list whose predicted peak leaves a margin of a budget free.

    Raises:
        ValueError: no list fits, which `search.check_budget` finds before anything is timed.
    """
    n_layers = model.dims.n_layers
    selections = _selections(model.run, times)
    best: Choice | None = None
    for fewer, more in [(s, s) for s in selections] + list(combinations(selections, 2)):
        for n in range(1 if fewer is not more else n_layers, n_layers + (fewer is more)):
            seconds = sum(fewer.seconds[:n]) + sum(more.seconds[n:])
            if best and seconds >= best.seconds:
                continue
            peak = model.peak(fewer.blocks[:n] + more.blocks[n:]).total
            if peak <= usable(budget_gib):
                best = Choice(_two_part_list(fewer, more, n, n_layers), peak, seconds)
    if best is None:
        raise ValueError(f"no save-list keeps to {budget_gib:g} GiB")
    tokens, t = model.run.tokens, model.run.tensor_parallel
    help = (
        f"Chosen by auto for {budget_gib:g} GiB, of which it takes {best.peak / GIB:.1f}: {n_layers} layers of width "
        f"{model.dims.dim}, {tokens:,} tokens a micro-step, {model.shards} shards, tensor parallel {t}."
    )
    return replace(best, save_list=replace(best.save_list, help=help))


def _selections(run: TracedRun, times: RecomputeTimes) -> list[_Selection]:
    """Return the selections that no other beats in both bytes and time, in the order of what they keep."""
    rules = expensive(run)
    subsets = chain.from_iterable(combinations(rules, n) for n in range(len(rules) + 1))
    found = [selection for subset in subsets if (selection := _selection(subset, run, times))]
    if whole := _selection((SaveRule(BLOCK, "save"),), run, times):
        found.append(whole)
    found.sort(key=lambda s: (sum(block.held for block in s.blocks), sum(s.seconds), len(s.rules)))
    front: list[_Selection] = []
    for selection in found:
        if not any(selection.is_beaten_by(other) for other in front):
            front.append(selection)
    return front


def _selection(rules: tuple[SaveRule, ...], run: TracedRun, times: RecomputeTimes) -> _Selection | None:
    """Price a selection; None if it cannot be: attention without its q, k and v."""
    try:
        blocks = block_costs(run, SaveList("", "recompute", rules))
    except RecipeError:
        return None
    return _Selection(rules, blocks, [times.seconds(block) for block in blocks])


def _two_part_list(fewer: _Selection, more: _Selection, n: int, n_layers: int) -> SaveList:
    """Join two selections, the first for n blocks; rules for whole blocks must come first."""
    rules: list[SaveRule] = []
    for rule in dict.fromkeys([*more.rules, *fewer.rules]):
        first = 0 if rule in fewer.rules else n
        last = n_layers if rule in more.rules or n == n_layers else n
        layers = (str(first) if first else "") + ":" + (str(last) if last < n_layers else "")
        rules.append(SaveRule(rule.op, rule.action, module=rule.module, layers=layers))
    return SaveList("", "recompute", tuple(sorted(rules, key=lambda rule: rule.op != BLOCK)))


def in_words(choice: Choice) -> str:
    """Say in a line what was chosen."""
    kept = ", ".join(
        " ".join((rule.op, *rule.module, *([f"of blocks {rule.layers}"] if rule.layers != ":" else [])))
        for rule in choice.save_list.rules
    )
    return kept or "nothing but the input of each block"
