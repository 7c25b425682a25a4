"""Choose the save-list of `recipe = "auto"`: the fastest one whose predicted peak of memory stays within a budget.

The activations that can be kept fall into a few groups: attention, each matmul, each collective, or all of a block. A
*selection* is a set of such groups. The trace gives the bytes that it keeps (`activation_cost.py`); the time to
recompute all other activations was measured on this device (`time_activations.py`). Most blocks of a model are alike,
so a list has two selections: one for the first n blocks, and one for the others. The second keeps more, as backward
begins with these blocks. All pairs and all n are tried, with the peak that `memory.py` predicts, so no such list is
faster by the measured times. A third selection would be one more graph to compile, and could save at most a part of
one block's recomputation.
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
    """Seconds to recompute each activation that `expensive` returns, and all elementwise work of one block."""

    activations: Mapping[Activation, float]
    elementwise: float

    def seconds(self, block: BlockCost) -> float:
        """Return the seconds of a block's recomputation."""
        parts = sum(self.activations.get(a, 0.0) for a in block.recomputed)
        return parts + (0.0 if block.whole else self.elementwise)


@dataclass(frozen=True)
class Choice:
    """The chosen save-list.

    Attributes:
        peak: predicted peak of memory, in bytes.
        seconds: time of recomputation in a micro-step.
        prepared_s: seconds spent on timing a block and choosing the list.
    """

    save_list: SaveList
    peak: int
    seconds: float
    prepared_s: float = 0.0


@dataclass(frozen=True)
class _Selection:
    """A set of rules, the cost of each block under it, and the seconds of each block's recomputation."""

    rules: tuple[SaveRule, ...]
    blocks: list[BlockCost]
    seconds: list[float]

    def is_beaten_by(self, other: "_Selection") -> bool:
        """Return whether `other` keeps no more bytes and recomputes no longer than this selection, in every block."""
        of_both = zip(self.blocks, self.seconds, other.blocks, other.seconds, strict=True)
        return all(block.held >= less.held and seconds >= faster for block, seconds, less, faster in of_both)


def expensive(run: TracedRun) -> dict[SaveRule, list[Activation]]:
    """Return the activations of a run's blocks that may be worth keeping, by the rule that keeps them.

    Statistics and casts are left out: their recomputation counts as elementwise work, or as part of their matmul.
    """
    found: dict[SaveRule, list[Activation]] = {}
    kinds = {id(block): block for block in run.blocks}.values()
    for activation in dict.fromkeys(each for block in kinds for each in activations(block)):
        # A fused operation is kept by a rule for matmuls: one for communication would not keep q, k and v.
        name = "matmul" if activation.op in FUSED else CLASS_OF[activation.op]
        if name in _EXPENSIVE:
            rule = SaveRule(name, "save", module=(activation.layer,) if activation.layer else ())
            found.setdefault(rule, []).append(activation)
    return found


def choose(model: MemoryModel, times: RecomputeTimes, budget_gib: float) -> Choice:
    """Return the fastest save-list whose predicted peak, with a second window of experts' rows, fits a budget less the
    margin `memory.MARGIN`.

    Raises:
        ValueError: no list fits. `search.check_budget` reports this earlier, before anything is timed.
    """
    n_layers = model.dims.n_layers
    selections, most = _selections(model.run, times), usable(budget_gib) - model.later_window
    best: Choice | None = None
    for fewer, more in [(s, s) for s in selections] + list(combinations(selections, 2)):
        for n in range(1 if fewer is not more else n_layers, n_layers + (fewer is more)):
            seconds = sum(fewer.seconds[:n]) + sum(more.seconds[n:])
            if best and seconds >= best.seconds:
                continue
            peak = model.peak(fewer.blocks[:n] + more.blocks[n:]).total
            if peak <= most:
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
    """Return the selections that no other beats in both bytes and time, those that keep the fewest bytes first."""
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
    """Return a set of rules with its costs; None if the rules keep attention without its q, k and v."""
    try:
        blocks = block_costs(run, SaveList("", "recompute", rules))
    except RecipeError:
        return None
    return _Selection(rules, blocks, [times.seconds(block) for block in blocks])


def _two_part_list(fewer: _Selection, more: _Selection, n: int, n_layers: int) -> SaveList:
    """Return a save-list: `fewer` for the first n blocks, `more` for the others; rules for whole blocks come first."""
    rules: list[SaveRule] = []
    for rule in dict.fromkeys([*more.rules, *fewer.rules]):
        first = 0 if rule in fewer.rules else n
        last = n_layers if rule in more.rules or n == n_layers else n
        layers = (str(first) if first else "") + ":" + (str(last) if last < n_layers else "")
        rules.append(SaveRule(rule.op, rule.action, module=rule.module, layers=layers))
    return SaveList("", "recompute", tuple(sorted(rules, key=lambda rule: rule.op != BLOCK)))


def in_words(choice: Choice) -> str:
    """Describe in one line what a chosen save-list keeps."""
    kept = ", ".join(
        " ".join((rule.op, *rule.module, *([f"of blocks {rule.layers}"] if rule.layers != ":" else [])))
        for rule in choice.save_list.rules
    )
    return kept or "nothing but the input of each block"
