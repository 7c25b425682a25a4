"""Find the rule of a save-list that decides about an operation: the first that matches. This file needs no torch.

The rules are applied to operations that run (`apply.py`), and to a traced block for the cost of each rule
(`forecast/activation_cost.py`).

An operation's position determines its linear layer. Operations before a matmul (a norm's statistics, a gather, a cast)
belong to the matmul's layer. A reduce-scatter, and the return of experts' results, belong to the layer of the matmul
before them. So a rule for `wqkv` does not depend on the layer's dtype.
"""

import json
from collections import Counter
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Literal, NamedTuple

from titanlite.activation_checkpoint import operations as ops
from titanlite.activation_checkpoint.operations import ALWAYS_KEPT, CLASS_OF, CLASSES, FUSED, WIDER
from titanlite.config.problems import Problems, nearest_layer
from titanlite.config.recipe_schema import SaveList, SaveRule
from titanlite.errors import RecipeError

BLOCK = "block"  # the `op` of a rule for whole blocks, which run without checkpointing
ENDS = (ops.SCATTER, *ops.RESULTS_TO_OWNERS)  # operations that belong to the last matmul's layer

Action = Literal["save", "recompute"]


class Decision(NamedTuple):
    """The decision whether an operation's result is saved or recomputed."""

    action: Action
    rules: tuple[int, ...]  # numbers of the rules that matched: up to two for a fused operation, none for the default
    by: int | None  # number of the rule that decided; None: the default did
    layer: str  # the linear layer that the operation belongs to, "" for attention


class BlockRules:
    """The rules of one block, applied to one operation of a forward pass after another.

    Args:
        active: numbers of the rules that are for this block.
        layers: names of the block's linear layers, in the order in which they run.
    """

    def __init__(self, save_list: SaveList, active: frozenset[int], layers: tuple[str, ...]) -> None:
        self._save_list, self._active, self._layers = save_list, active, layers
        self._matmuls = 0
        self._matched: Counter[int] = Counter()
        self._operands: Counter[str | None] = Counter()  # casts and their maxima since the last matmul, by class
        self._recomputed: list[str] = []  # layers with a recomputed matmul since the last attention

    def decide(self, op: str, is_view: bool = False, to_float8: bool = False) -> Decision:
        """Decide whether the result of the next operation is saved.

        Args:
            op: name as torch spells it, "aten.mm.default".
            is_view: whether its result is a view.
            to_float8: whether its result is float8.

        Raises:
            RecipeError: attention is kept, with any kernel, but not all matmuls that make its q, k and v.
        """
        if CLASS_OF.get(op) == ALWAYS_KEPT:
            named = self._first(op, ALWAYS_KEPT, "")
            return Decision("save", () if named is None else (named,), named, "")
        default: Action = "recompute" if is_view else self._save_list.default  # a view would keep its base
        classes = FUSED.get(op) or (self._class(op, to_float8),)
        layer = self._layer(self._matmuls - (op in ENDS)) if classes[0] not in (None, "attention") else ""
        found = [self._first(op, name, layer) for name in reversed(classes)]  # the result's class first
        if classes == (None,) and op in CLASS_OF:  # made from a weight: rules never keep it
            found = [i for i in found if i is None or self._save_list.rules[i].action == "recompute"] or [None]
        says = [(rule, default if rule is None else self._action(rule)) for rule in found]
        decisive = says[:1] if op == ops.GATHER_MATMUL else says
        action: Action = "save" if "save" in [of_rule for _, of_rule in decisive] else "recompute"
        rules = tuple(dict.fromkeys(rule for rule in reversed(found) if rule is not None))
        if "matmul" in classes or "experts" in classes:
            self._matmuls += 1
            self._operands.clear()
            self._recomputed += [layer] if action == "recompute" else []
        elif "attention" in classes:
            recomputed, self._recomputed = self._recomputed, []
            if recomputed and (kept_by := self._keep_attention()):
                raise self._other_bits(kept_by[0], recomputed)
        return Decision(action, rules, next((rule for rule, of_rule in decisive if of_rule == action), None), layer)

    def _class(self, op: str, to_float8: bool) -> str | None:
        """Return the class of an operation, or None. A layer's second cast, which is of its weight, has no class."""
        if op == ops.CAST and not to_float8:
            return None
        name = CLASS_OF.get(op)
        if name == "cast" or op in (ops.AMAX, ops.MAX):
            has_maximum = op in (ops.SWIGLU_CAST, ops.CAST_BLOCKS, ops.EXPERT_GATE_CAST)
            self._operands.update(["statistics", "cast"] if has_maximum else [name])
            return name if self._operands[name] == 1 else None
        if op == ops.MAX_OF_RANKS:
            return name if self._operands["statistics"] == 1 else None
        return name

    def _layer(self, matmul: int) -> str:
        return self._layers[matmul % len(self._layers)]

    def _first(self, op: str, name: str | None, layer: str) -> int | None:
        """Return the number of the first rule that matches an operation, or None."""
        for i, rule in enumerate(self._save_list.rules):
            is_for = i in self._active and rule.op in (op, name, WIDER.get(name or ""))
            if is_for and (not rule.module or is_named(layer, rule.module)):
                return i
        return None

    def _action(self, i: int) -> Action:
        """Count a match of rule `i`, and return the rule's action for this match."""
        self._matched[i] += 1
        return self._says(i)

    def _says(self, i: int) -> Action:
        """Return the action of rule `i` for its latest match, or for its first match if it has none yet."""
        rule = self._save_list.rules[i]
        if max(self._matched[i] - 1, 0) % rule.every == 0:
            return rule.action
        return "recompute" if rule.action == "save" else "save"

    def _keep_attention(self) -> list[int | None]:
        """Return the rules (None: the default) that keep attention with some kernel, as torch chooses on the device."""
        found = dict.fromkeys(self._first(op, "attention", "") for op in CLASSES["attention"])
        says = {i: self._save_list.default if i is None else self._says(i) for i in found}
        return [i for i in found if says[i] == "save"]

    def _other_bits(self, rule: int | None, recomputed: list[str]) -> RecipeError:
        """Return the error for kept attention with recomputed q, k and v: its softmax statistics may not match them."""
        listed = self._save_list
        where, saw = ("default", "save") if rule is None else (f"rules[{rule}].op", listed.rules[rule].op)
        names = [layer.rpartition(".")[2] for layer in recomputed]
        want = (
            f"the matmuls behind attention's q, k and v kept as well; {', '.join(names)} would be recomputed, and in "
            "other bits the softmax statistics would not be theirs"
        )
        fix = f'put first a rule with op = "matmul", module = {json.dumps(names)}, action = "save"'
        problems = Problems(listed.origin)
        problems.add(where, json.dumps(saw), want, fix)
        return problems.error(RecipeError)


def rule_in_words(rule: SaveRule) -> str:
    """Write a rule in words, without its `layers`: "save matmul wqkv w13, every 2"."""
    words = " ".join((rule.action, rule.op, *rule.module))
    return words + (f", every {rule.every}" if rule.every > 1 else "")


def kernels(save_list: SaveList) -> list[str]:
    """Return the attention kernels for whole samples that a list names; if it names none, `ATTENTION`."""
    named = {rule.op for rule in save_list.rules}
    return [op for op in CLASSES["attention"] if op in named and op != ops.CONTEXT_ATTENTION] or [ops.ATTENTION]


def is_whole(save_list: SaveList, active: frozenset[int]) -> bool:
    """Return whether a block with these active rules runs without checkpointing."""
    if any(save_list.rules[i].op == BLOCK for i in active):
        return True
    return save_list.default == "save" and not save_list.rules


def is_named(layer: str, patterns: Sequence[str]) -> bool:
    """Return whether a pattern, as "wo", "attention.wo" or "feed_forward.*", matches the end of a layer's name."""
    return any(fnmatchcase(f".{layer}", f"*.{pattern}") for pattern in patterns)


def add_mistakes(save_list: SaveList, layers: Sequence[str], problems: Problems) -> None:
    """Add a problem for each module of a rule that matches none of `layers` (the linear layers of blocks, by name), and
    for each rule that would route tokens again."""
    last_names = list(dict.fromkeys(layer.rpartition(".")[2] for layer in layers))
    named = [(i, module) for i, rule in enumerate(save_list.rules) if not rule.optional for module in rule.module]
    for i, module in named:
        if not any(is_named(layer, [module]) for layer in layers):
            near = nearest_layer(module, last_names)
            fix = f'did you mean "{near}"?' if near else "remove it, or set optional = true"
            want = f"a linear layer of a block: {', '.join(last_names)}"
            problems.add(f"rules[{i}].module", f'"{module}"', want, fix)
    for i, rule in enumerate(save_list.rules):
        if rule.action == "recompute" and rule.op in (ALWAYS_KEPT, *CLASSES[ALWAYS_KEPT]):
            want = '"save": where tokens go is always kept, so that backward goes the same way'
            problems.add(f"rules[{i}].action", '"recompute"', want, "remove the rule")
