"""Read the groups of an optimizer's recipe whose rule is of the user's own file, with the keys that it has."""

import math
from collections.abc import Mapping
from dataclasses import field, fields, make_dataclass, replace
from typing import Any, cast

from titanlite.config.build import from_table, show
from titanlite.config.problems import Problems
from titanlite.config.recipe_schema import KEYS_OF_RULE, OptimizerRecipe, OwnRule, ParameterGroup
from titanlite.errors import nearest

COMMON_KEYS = tuple(f.name for f in fields(ParameterGroup) if not any(f.name in keys for keys in KEYS_OF_RULE.values()))
"""Keys of a group that do not depend on its rule."""


def optimizer_recipe(
    table: Mapping[str, object], rules: Mapping[str, OwnRule], problems: Problems
) -> OptimizerRecipe | None:
    """Read a recipe whose groups may have rules of the user's own.

    Args:
        table: what its file says.
        rules: of the user's own, by name.
        problems: collects what is wrong: also a rule that nobody has.
    """
    groups = table.get("groups")
    if not isinstance(groups, dict):
        return from_table(OptimizerRecipe, table, problems)
    given = cast("dict[str, object]", groups)
    own = _groups_of_own_rules(given, rules, problems)
    shipped = {name: {"rule": "adamw"} if name in own else group for name, group in given.items()}
    recipe = from_table(OptimizerRecipe, {**table, "groups": shipped}, problems)
    if recipe is None or problems:
        return recipe
    return replace(recipe, groups={name: own.get(name) or group for name, group in recipe.groups.items()})


def _groups_of_own_rules(
    groups: Mapping[str, object], rules: Mapping[str, OwnRule], problems: Problems
) -> dict[str, ParameterGroup | None]:
    """Read the groups that have a rule of the user's own, by name; None where a problem was added."""
    found = dict[str, ParameterGroup | None]()
    for name, table in groups.items():
        rule = cast("dict[str, object]", table).get("rule") if isinstance(table, dict) else None
        if isinstance(rule, str) and rule in rules:
            found[name] = _group_of_own_rule(f"groups.{name}", cast("dict[str, object]", table), rules[rule], problems)
        elif isinstance(table, dict) and "rule" not in table:
            near = nearest(name, [other for other in groups if other != name])
            fix = f"did you mean [groups.{near}]?" if near else 'add rule = "adamw", or another'
            at = problems.origin.of(f"groups.{name}")
            problems.add(f"groups.{name}.rule", "", "the rule of the group; it is missing", fix, at=at)
            found[name] = None
        elif isinstance(rule, str) and rule not in KEYS_OF_RULE:
            choices = (*KEYS_OF_RULE, *rules)
            near = nearest(rule, choices)
            file = f"class {rule} in the file that optimizer.file names"
            want = f"one of {', '.join(map(show, choices))}, or a rule of your own: {file}"
            fix = f"did you mean {show(near)}?" if near else f"--optimizer.file my_rule.py, which has the class {rule}"
            problems.add(f"groups.{name}.rule", show(rule), want, fix)
    return found


def _group_of_own_rule(
    where: str, table: Mapping[str, object], rule: OwnRule, problems: Problems
) -> ParameterGroup | None:
    """Read one group, whose keys are those of all and the rule's."""
    known = (*COMMON_KEYS, *rule.keys)
    for key, value in table.items():
        if key not in known:
            near = nearest(key, known)
            want = f"one of {', '.join(known)}; the keys of class {rule.name} in {rule.file}"
            problems.add(f"{where}.{key}", show(value), want, f"did you mean {where}.{near}?" if near else "remove it")
        elif isinstance(value, float) and not math.isfinite(value):
            problems.add(f"{where}.{key}", show(value), "a finite number", f"leave {key} out")
    given = {key: value for key, value in table.items() if key in known}
    made = from_table(_schema(rule), given, problems, where)
    return None if problems else made


def _schema(rule: OwnRule) -> type[ParameterGroup]:
    """Make the schema of a group that has a rule of one's own: that of all groups, and the rule's keys."""
    keys: list[Any] = [(key, type(default), field(default=default)) for key, default in rule.keys.items()]
    namespace = {"own_keys": tuple(rule.keys)}
    made = make_dataclass("GroupOfOwnRule", keys, bases=(ParameterGroup,), frozen=True, namespace=namespace)
    return cast("type[ParameterGroup]", made)
