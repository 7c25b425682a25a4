"""The receipt's entry of a save-list: matches of each rule, and the bytes that it keeps."""

from collections.abc import Sequence

from titanlite.activation_checkpoint.apply import SaveListUse
from titanlite.activation_checkpoint.rules import rule_in_words
from titanlite.config.recipe_schema import SaveList, SaveRule
from titanlite.receipt import Entry, Skipped


def save_list_entry(
    use: SaveListUse, save_list: SaveList, requested: str, chosen: dict[str, object], held: Sequence[float] | None
) -> Entry:
    """Return the receipt's entry of a save-list, after a step.

    Args:
        use: counts of the rules' matches in the step.
        requested: value of `activation_checkpoint.recipe`.
        chosen: facts about a list that `auto` chose; empty if the config names the list.
        held: predicted bytes that each rule keeps of a block, on this rank in a micro-step; None: not predicted.
    """
    rules, unmatched = rule_labels(use.rules), use.unmatched()
    applied = {
        **chosen,
        "blocks": len(use.checkpointed),
        "matches": {rule: use.matches[i] for i, rule in enumerate(rules)},
    }
    if rules:
        of_rules = held and {rule: round(n / 2**20, 3) for rule, n in zip(rules, held, strict=True)}
        applied["predicted_mib_per_layer"] = of_rules or "unknown"
    return Entry(
        "activation_checkpoint",
        requested,
        applied,
        count=len(rules) - len(unmatched) if rules else 1,  # without rules, `default` counts
        missed=tuple(Skipped(rules[i], f"matched no operation{_line_of_rule(save_list, i)}") for i in unmatched),
        key="activation_checkpoint.recipe",
    )


def rule_labels(rules: Sequence[SaveRule]) -> list[str]:
    """Return each rule in words. A repeated rule, which `job.strict` refuses, also has its number."""
    words = [rule_in_words(rule) + (f", blocks {rule.layers}" if rule.layers != ":" else "") for rule in rules]
    return [f"{rule} (rule {i})" if rule in words[: i - 1] else rule for i, rule in enumerate(words, 1)]


def _line_of_rule(save_list: SaveList, rule: int) -> str:
    """Return the file and the line of a rule in brackets; "" if the rule is not from a file."""
    place = save_list.origin.of(f"rules[{rule}].op")
    return f" ({place.source}, line {place.line})" if place.line is not None else ""
