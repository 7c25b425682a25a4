"""What each rule of a save-list keeps, and what computing that again would cost: `titanlite plan` prints it, and
a receipt has the bytes where compiled blocks cannot be asked. By the formulas of `block_price.py`, without torch.
"""

from collections import Counter
from dataclasses import dataclass

from titanlite.activation_checkpoint.rules import BLOCK, is_whole
from titanlite.config.recipe_schema import SaveList, SaveRule
from titanlite.forecast.activation_bytes import Layout
from titanlite.forecast.block_price import held_without_checkpointing, price


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


def rule_prices(layout: Layout, save_list: SaveList) -> list[RulePrice]:
    """Price each rule of a save-list.

    Args:
        layout: of a rank.
        save_list: one that has a price (`block_prices`).

    Raises:
        RecipeError: attention is kept without its q, k and v.
    """
    rules, n_layers = save_list.rules, layout.dims.n_layers
    if not rules:
        return []
    matches, held, flops, moved = (Counter[int]() for _ in range(4))
    kinds = Counter(zip(save_list.active(n_layers), layout.dims.windows, strict=True))
    for (active, window), blocks in kinds.items():
        if is_whole(save_list, active):
            first = min(i for i in active if rules[i].op == BLOCK)
            matches[first] += blocks
            held[first] += blocks * (held_without_checkpointing(layout) - layout.block_input)
            continue
        for priced in price(layout, save_list, active, window):
            matches.update(dict.fromkeys(priced.decision.rules, blocks))
            if priced.decision.by is not None:
                held[priced.decision.by] += blocks * priced.held
                flops[priced.decision.by] += blocks * priced.activation.flops
                moved[priced.decision.by] += blocks * priced.activation.moved
    counts = [len(rule.blocks(n_layers)) for rule in rules]
    return [
        RulePrice(rule, n, matches[i], held[i] / max(n, 1), flops[i] / max(n, 1), moved[i] / max(n, 1))
        for i, (rule, n) in enumerate(zip(rules, counts, strict=True))
    ]
