"""Say what a run would hold before it is started: plan FILE --activation-checkpoint [flags of train.py].

    --activation-checkpoint    the price of each rule of the save-list, and what every list would keep

All is computed from shapes (`titanlite/parallel/activation_bytes.py`): no GPU, no process group, no torch.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from titanlite import recipes
from titanlite.commands.validate import CheckedRun
from titanlite.config.recipe_schema import SaveList, SaveRule
from titanlite.errors import Problem, RecipeError, describe
from titanlite.parallel.activation_bytes import LAYERS, Layout, block_input, held_without_checkpointing, price
from titanlite.parallel.save_rules import CLASSES

_MIB, _GIB = 2**20, 2**30


@dataclass(frozen=True)
class RulePrice:
    """What one rule keeps, as a mean over the blocks that it is for, on one rank and for one micro-step.

    Attributes:
        rule: the rule.
        blocks: number of blocks that it is for.
        matches: operations that it decided about, in all blocks.
        held: bytes that stay until backward.
        flops: of computing what it decided about again.
        moved: bytes that computing it again reads, writes and receives.
    """

    rule: SaveRule
    blocks: int
    matches: int
    held: float
    flops: float
    moved: float


@dataclass(frozen=True)
class Totals:
    """What all blocks keep and compute again, on one rank and for one micro-step; their inputs included."""

    held: int
    flops: int
    moved: int


def layout_of(checked: CheckedRun) -> Layout:
    """Return how one rank would run a checked config."""
    config = checked.config
    filters = config.float8.filter_fqns
    return Layout(
        tokens=config.training.local_batch_size * config.training.seq_len,
        seq_len=config.training.seq_len,
        tensor_parallel=config.parallelism.tensor_parallel_degree,
        itemsize={"bfloat16": 2, "float32": 4}[config.training.mixed_precision_param],
        compiled=config.compile.enable,
        fused=config.parallelism.async_tensor_parallel,
        float8=checked.float8,
        # A filter that names single blocks, as "layers.3.", is not seen: all blocks are priced alike.
        converted=tuple(n for n in LAYERS if checked.float8 and not any(f in f"layers.0.{n}" for f in filters)),
    )


def rule_prices(checked: CheckedRun, layout: Layout) -> list[RulePrice]:
    """Price each rule of a run's save-list.

    Args:
        checked: the run.
        layout: of a rank.

    Raises:
        RecipeError: a rule matches nothing and is not optional, or attention is kept without its q, k and v.
    """
    rules, n_layers = checked.save_list.rules, checked.dimensions.n_layers
    matches, held, flops, moved = (Counter[int]() for _ in range(4))
    for active, blocks in _groups(checked.save_list, n_layers).items():
        for priced in price(checked.dimensions, layout, checked.save_list, active):
            matches.update(dict.fromkeys(priced.decision.rules, blocks))
            if priced.decision.by is not None:
                held[priced.decision.by] += blocks * priced.held
                flops[priced.decision.by] += blocks * priced.activation.flops
                moved[priced.decision.by] += blocks * priced.activation.moved
    problems = [
        Problem(f"rules[{i}].op", f'"{rule.op}"', "an operation of this run; it matches nothing", "set optional = true")
        for i, rule in enumerate(rules)
        if not matches[i] and not rule.optional and rule.op in CLASSES
    ]
    if problems:
        raise RecipeError(describe(f"save-list {checked.config.activation_checkpoint.recipe}", problems))
    counts = [len(rule.blocks(n_layers)) for rule in rules]
    return [
        RulePrice(rule, n, matches[i], held[i] / max(n, 1), flops[i] / max(n, 1), moved[i] / max(n, 1))
        for i, (rule, n) in enumerate(zip(rules, counts, strict=True))
    ]


def totals(checked: CheckedRun, layout: Layout) -> Totals:
    """Add up all blocks of a run.

    Args:
        checked: the run.
        layout: of a rank.

    Raises:
        RecipeError: the list keeps what it does not name, or attention without its q, k and v.
    """
    sizes, chosen = checked.dimensions, checked.save_list
    if chosen.default == "save" and not chosen.rules:
        return Totals(sizes.n_layers * held_without_checkpointing(sizes, layout), 0, 0)
    if chosen.default == "save":
        want = '"recompute": what is kept without being named depends on the compiler, and has no price'
        problem = Problem("default", '"save"', want, 'default = "recompute", and rules for what to keep')
        raise RecipeError(describe(f"save-list {checked.config.activation_checkpoint.recipe}", [problem]))
    held, flops, moved = sizes.n_layers * block_input(sizes, layout), 0, 0
    for active, blocks in _groups(chosen, sizes.n_layers).items():
        for priced in price(sizes, layout, chosen, active):
            held += blocks * priced.held
            flops += blocks * priced.activation.flops * priced.again
            moved += blocks * priced.activation.moved * priced.again
    return Totals(held, flops, moved)


def _groups(save_list: SaveList, n_layers: int) -> Counter[frozenset[int]]:
    """The sets of rules that blocks have, and how many blocks have each."""
    return Counter(
        frozenset(i for i, rule in enumerate(save_list.rules) if number in rule.blocks(n_layers))
        for number in range(n_layers)
    )


def price_list(checked: CheckedRun, file: str) -> str:
    """Format the prices of a run's save-list, and the totals of all lists.

    Args:
        checked: the run.
        file: its config, for the first line.

    Raises:
        RecipeError: the list cannot work here, or has no price.
    """
    config, layout = checked.config, layout_of(checked)
    name, n_layers = config.activation_checkpoint.recipe, checked.dimensions.n_layers
    totals(checked, layout)  # a list without a price is refused before anything is printed
    prices = rule_prices(checked, layout) if checked.save_list.rules else []
    arithmetic = config.training.mixed_precision_param if checked.float8 is None else f"float8 {config.float8.recipe}"
    out = [
        f"{file}: {config.model.name} {config.model.flavor}, {n_layers} layers, {layout.tokens:,} tokens a micro-step, "
        f"tensor parallel {layout.tensor_parallel}, {arithmetic}, {'compiled' if layout.compiled else 'eager'}\n",
        f"\nsave-list {name}, on one rank and per layer; what is kept, and what computing it again would cost:\n",
    ]
    rows = [(_label(p.rule), f"{p.blocks} of {n_layers}", *_amounts(p)) for p in prices]
    if checked.save_list.rules or checked.save_list.default == "recompute":
        size = f"{block_input(checked.dimensions, layout) / _MIB:,.1f}"
        rows.append(("the block's input, always", f"{n_layers} of {n_layers}", size, "", ""))
        out += _table(("rule", "layers", "MiB", "GFLOP", "MiB moved"), rows)
    else:
        out.append("  no rules: everything is kept\n")
    out.append("\nall layers, on one rank; what is kept, and what is computed again in a micro-step:\n")
    listed = []
    for other in dict.fromkeys([name, *recipes.names("activation_checkpoint", config.job.recipe_dirs)]):
        chosen = recipes.load("activation_checkpoint", other, config.job.recipe_dirs)
        try:
            sums = totals(replace(checked, save_list=chosen), layout)
        except RecipeError:  # of another list than the config's
            listed.append((other, "no price", "", ""))
            continue
        again = (f"{sums.flops / 1e12:,.2f}", f"{sums.moved / _GIB:,.2f}")
        listed.append((other, f"{sums.held / _GIB:,.2f}", *again))
    out += _table(("save-list", "GiB", "TFLOP", "GiB moved"), listed)
    return "".join(out)


def _amounts(price: RulePrice) -> tuple[str, str, str]:
    if not price.matches:
        seen = "nothing here" if price.rule.op in CLASSES else "not priced"
        return seen, "", ""
    return f"{price.held / _MIB:,.1f}", f"{price.flops / 1e9:,.1f}", f"{price.moved / _MIB:,.1f}"


def _label(rule: SaveRule) -> str:
    """A rule in words, as "save matmul wqkv w13, every 2"."""
    words = " ".join((rule.action, rule.op, *rule.module))
    return words + (f", every {rule.every}" if rule.every > 1 else "")


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of columns; all but the first are numbers, to the right."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = []
    for row in (header, *rows):
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        lines.append(f"  {'  '.join(cells)}".rstrip() + "\n")
    return lines
