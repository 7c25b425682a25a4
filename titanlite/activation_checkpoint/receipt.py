"""Say in the receipt what a save-list did: how often each rule matched, and what it keeps."""

from collections.abc import Sequence

from titanlite.activation_checkpoint.apply import SaveListUse
from titanlite.activation_checkpoint.rules import rule_in_words
from titanlite.config.recipe_schema import SaveList, SaveRule
from titanlite.receipt import Entry, Skipped


def save_list_entry(
    use: SaveListUse, save_list: SaveList, requested: str, chosen: dict[str, object], held: Sequence[float] | None
) -> Entry:
    """The receipt's entry of a save-list, once blocks have run.

    Args:
        use: what was seen of it.
        save_list: the list.
        requested: `activation_checkpoint.recipe`.
        chosen: what there is to say of a list that was chosen; empty of one that was named.
        held: predicted bytes that each rule keeps of a block that it is for, on this rank in a micro-step; None: not
            known.
    """
    rules, unmatched = rule_labels(use.rules), use.unmatched()
    applied = {
        **chosen,
        "blocks": use.blocks,
        "matches": {rule: use.matches[i] for i, rule in enumerate(rules)},
    }
    if rules:
        of_rules = held and {rule: round(n / 2**20, 3) for rule, n in zip(rules, held, strict=True)}
        applied["predicted_mib_per_layer"] = of_rules or "unknown"
    return Entry(
        "activation_checkpoint",
        requested,
        applied,
        count=len(rules) - len(unmatched) if rules else 1,  # what rules do not say, `default` says
        missed=tuple(Skipped(rules[i], f"matched no operation{_line_of_rule(save_list, i)}") for i in unmatched),
        key="activation_checkpoint.recipe",
    )


def rule_labels(rules: Sequence[SaveRule]) -> list[str]:
    """Rules in words; those that another has said before, as may be without `job.strict`, with their numbers."""
    words = [rule_in_words(rule) + (f", blocks {rule.layers}" if rule.layers != ":" else "") for rule in rules]
    return [f"{rule} (rule {i})" if rule in words[: i - 1] else rule for i, rule in enumerate(words, 1)]


def _line_of_rule(save_list: SaveList, rule: int) -> str:
    """Return the file and the line of a rule in brackets, if it is from a file."""
    place = save_list.origin.of(f"rules[{rule}].op")
    return f" ({place.source}, line {place.line})" if place.line is not None else ""
