"""Read the groups of an optimizer recipe. The keys of a group depend on its rule, which may be the user's own."""

import math
from collections.abc import Mapping
from dataclasses import field, make_dataclass, replace
from typing import Any, cast

from titanlite.config.build import from_table, show
from titanlite.config.problems import Problems
from titanlite.config.recipe_schema import GROUP_OF_RULE, OptimizerRecipe, OwnRule, ParameterGroup
from titanlite.errors import nearest


def optimizer_recipe(
    table: Mapping[str, object], rules: Mapping[str, OwnRule], problems: Problems
) -> OptimizerRecipe | None:
    """Read the table of an optimizer recipe; None if it has problems. `rules`: rules of the user's file, by name."""
    groups = table.get("groups")
    if not isinstance(groups, dict):
        return from_table(OptimizerRecipe, table, problems)
    given = cast("dict[str, Any]", groups)
    schemas = GROUP_OF_RULE | {name: _schema(rule) for name, rule in rules.items()}
    made = {name: _group(name, given, schemas, problems) for name in given}
    recipe = from_table(OptimizerRecipe, {**table, "groups": {}}, problems)
    return None if recipe is None or problems else replace(recipe, groups=made)


def _group(
    name: str, groups: Mapping[str, Any], schemas: Mapping[str, type[ParameterGroup]], problems: Problems
) -> ParameterGroup | None:
    """Read the group `name` with the keys of its rule. On an error add a problem and return None."""
    where, table = f"groups.{name}", groups[name]
    if not isinstance(table, dict):
        problems.add(where, show(table), "a table", f"write it as a table: [{where}]")
        return None
    group = cast("dict[str, object]", table)
    if "rule" not in group:
        near = nearest(name, [other for other in groups if other != name])
        fix = f"did you mean [groups.{near}]?" if near else 'add rule = "adamw", or another'
        problems.add(f"{where}.rule", "", "the rule of the group; it is missing", fix, at=problems.origin.of(where))
        return None
    rule = group["rule"]
    if not isinstance(rule, str):
        return from_table(ParameterGroup, {"rule": rule}, problems, where)
    if rule not in schemas:
        near = nearest(rule, schemas)
        file = f"class {rule} in the file that optimizer.file names"
        want = f"one of {', '.join(map(show, schemas))}, or a rule of your own: {file}"
        fix = f"did you mean {show(near)}?" if near else f"--optimizer.file my_rule.py, which has the class {rule}"
        problems.add(f"{where}.rule", show(rule), want, fix)
        return None

    def of_another(path: str, _: object) -> str | None:
        key = path.rpartition(".")[2]
        others = [other for other, schema in schemas.items() if key in schema.__dataclass_fields__]
        return f"remove {key}, or rule = {show(others[0])}" if others else None

    for key, value in group.items() if rule not in GROUP_OF_RULE else ():  # shipped rules have ranges
        if isinstance(value, float) and not math.isfinite(value):
            problems.add(f"{where}.{key}", show(value), "a finite number", f"leave {key} out")
    return from_table(schemas[rule], group, problems, where, of_another)


def _schema(rule: OwnRule) -> type[ParameterGroup]:
    """Make the schema of a group with a user's rule: the keys that all groups have, and those of the rule."""
    keys: list[Any] = [(key, type(default), field(default=default)) for key, default in rule.keys.items()]
    made = make_dataclass("GroupOfOwnRule", keys, bases=(ParameterGroup,), frozen=True)
    return cast("type[ParameterGroup]", made)
