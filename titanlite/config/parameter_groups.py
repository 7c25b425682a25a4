"""Find which group of an optimizer's recipe takes each parameter of a model, and what it is updated with."""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Any

from titanlite.config.problems import Origin, Problems, show
from titanlite.config.recipe_schema import MATRIX_RULES, OptimizerRecipe, ParameterGroup
from titanlite.config.schema import Optimizer
from titanlite.errors import ConfigError, RecipeError, nearest

_EXCLUDE = "optimizer.weight_decay_exclude"


@dataclass(frozen=True)
class UpdateSettings:
    """The settings of one parameter's update: its group's own values, or those of `[optimizer]`."""

    group: str
    rule: str
    lr_factor: float
    weight_decay: float
    own: tuple[tuple[str, Any], ...]  # keys that the rule has beside these

    def of_rule(self) -> dict[str, Any]:
        """Return what the rule reads, by key."""
        return {key: value for key, value in vars(self).items() if key != "own"} | dict(self.own)


def update_settings(
    recipe: OptimizerRecipe,
    config: Optimizer,
    shapes: Mapping[str, Sequence[int]],
    origin: Origin | None = None,
    of_matrices: Collection[str] | None = None,
) -> dict[str, UpdateSettings]:
    """Return how each parameter is updated, by name, in the order of `shapes`.

    Groups are asked in order, those without a pattern after all others; the first that matches decides. What it leaves
    out, `config` says.

    Args:
        recipe: has the groups.
        config: `[optimizer]`.
        shapes: of the whole parameters, by name.
        origin: the places of its keys.
        of_matrices: parameters that are made of whole matrices; None: that was checked before.

    Raises:
        ConfigError: a pattern matches no parameter, a group takes none, no group takes a parameter, one that is
            excluded from weight decay has some by its group, or one without matrices has a rule for them.
    """
    groups = _taken(recipe, shapes)
    of_recipe, of_config = Problems(recipe.origin), Problems(origin or Origin("config"))
    _check_groups(recipe, shapes, groups, of_recipe)
    if of_matrices is not None:
        _check_matrices(recipe, {n: s for n, s in shapes.items() if n not in of_matrices}, groups, of_recipe)
    excluded = _excluded(config, recipe, shapes, groups, of_config)
    errors = [p.error(kind) for p, kind in ((of_config, ConfigError), (of_recipe, RecipeError)) if p]
    if errors:
        raise type(errors[0])(*(report for error in errors for report in error.args))
    settings = dict[str, UpdateSettings]()
    for parameter in shapes:
        group, decay = recipe.groups[groups[parameter]], 0.0 if parameter in excluded else config.weight_decay
        decay = decay if group.weight_decay is None else group.weight_decay
        own = tuple((key, getattr(config, key) if value is None else value) for key, value in group.own.items())
        settings[parameter] = UpdateSettings(groups[parameter], group.rule, group.lr_factor, decay, own)
    return settings


def _taken(recipe: OptimizerRecipe, shapes: Mapping[str, Sequence[int]]) -> dict[str, str]:
    """Return the group of each parameter, of those that one takes."""
    ordered = sorted(recipe.groups.items(), key=lambda each: not each[1].pattern)  # stable
    found = {
        parameter: next((name for name, group in ordered if _would_take(group, parameter, len(shape))), None)
        for parameter, shape in shapes.items()
    }
    return {parameter: name for parameter, name in found.items() if name is not None}


def _would_take(group: ParameterGroup, parameter: str, dimensions: int) -> bool:
    if group.shape != "any" and (group.shape == "matrix") != (dimensions >= 2):
        return False
    return not group.pattern or any(fnmatch(parameter, pattern) for pattern in group.pattern)


def _check_groups(
    recipe: OptimizerRecipe, shapes: Mapping[str, Sequence[int]], taken: Mapping[str, str], problems: Problems
) -> None:
    """Refuse patterns and groups that do nothing, and parameters that no group takes."""
    for name, group in recipe.groups.items():
        key = f"groups.{name}"
        lost = [p for p in group.pattern if not any(fnmatch(parameter, p) for parameter in shapes)]
        for pattern in () if group.optional else lost:
            _no_match(f"{key}.pattern", pattern, shapes, problems)
        if name not in taken.values() and not lost and not group.optional:
            others = {taken[n] for n in shapes if n in taken and _would_take(group, n, len(shapes[n]))}
            first = f"others come first: {', '.join(sorted(others))}"
            why = first if others else f"none has shape = {show(group.shape)}"
            fix = f"remove [{key}], move it up, or write optional = true"
            if not problems.is_own(key):
                fix = f"give groups of yours fewer parameters, or write [{key}] with optional = true"
            problems.add(key, "", f"a group that takes a parameter; {why}", fix)
    if left := [name for name in shapes if name not in taken]:
        want = f"a group for every parameter; none takes {_some(left)}"
        problems.add("groups", "", want, 'add [groups.rest] with rule = "adamw", which takes what no other does')


def _some(parameters: Collection[str]) -> str:
    """Name up to four parameters, one for all blocks, and say how many more there are."""
    names = one_of_all_blocks(parameters)
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _check_matrices(
    recipe: OptimizerRecipe, without: Mapping[str, Sequence[int]], taken: Mapping[str, str], problems: Problems
) -> None:
    """Refuse a rule for whole matrices on a parameter that is none."""
    for name, group in recipe.groups.items():
        own = [n for n in taken if taken[n] == name]
        wrong = [n for n in own if n in without] if group.rule in MATRIX_RULES else []
        if not wrong:
            continue
        if len(wrong) == len(own):
            fix = 'rule = "adamw"'
        elif all(len(without[n]) < 2 for n in wrong):
            fix = 'shape = "matrix"; what it leaves, a group with rule = "adamw" takes'
        else:
            fix = f'a group above it with rule = "adamw" and pattern = {show(one_of_all_blocks(wrong))}'
        # What a base says was right there.
        where = next(filter(problems.is_own, (f"groups.{name}.{k}" for k in ("rule", "shape", "pattern"))), None)
        want = f"parameters of projections alone, beside a rule for whole matrices; it takes {_some(wrong)}"
        at = problems.origin.of(where) if where else None
        problems.add(f"groups.{name}.rule", show(group.rule), want, fix, at=at)


def _excluded(
    config: Optimizer,
    recipe: OptimizerRecipe,
    shapes: Mapping[str, Sequence[int]],
    taken: Mapping[str, str],
    problems: Problems,
) -> set[str]:
    """Return the parameters that `optimizer.weight_decay_exclude` names; none may have a weight decay by its group."""
    patterns, found = config.weight_decay_exclude, set[str]()
    for pattern in patterns:
        named = [name for name in shapes if fnmatch(name, pattern)]
        found.update(named)
        if not named:
            _no_match(_EXCLUDE, pattern, shapes, problems)
        decays = [(name, taken[name]) for name in named if name in taken and recipe.groups[taken[name]].weight_decay]
        for parameter, name in decays[:1]:
            own = f"groups.{name}.weight_decay = {show(recipe.groups[name].weight_decay)}"
            want = f"patterns of parameters whose group leaves weight_decay out; {parameter} has {own}"
            kept = [other for other in patterns if other != pattern]
            fix = f"weight_decay_exclude = {show(kept)}, or no weight decay in the recipe ({recipe.origin.source})"
            problems.add(_EXCLUDE, show(pattern), want, fix)
    return found


def _no_match(key: str, pattern: str, parameters: Collection[str], problems: Problems) -> None:
    names = one_of_all_blocks(parameters)
    # Those of all that end alike, too: "*attention_norm.weight", "*norm.weight", "*weight".
    ends = dict.fromkeys("*" + name[cut.end() :] for name in names for cut in re.finditer(r"^|[._]", name))
    near = nearest(pattern, [*names, *ends])
    want = f"a pattern that matches a parameter: {', '.join(names[:4])}, …"
    problems.add(key, show(pattern), want, f"did you mean {show(near)}?" if near else "remove it")


def one_of_all_blocks(parameters: Collection[str]) -> list[str]:
    """Return the names, one for all blocks."""
    return list(dict.fromkeys(re.sub(r"\.\d+\.", ".*.", name) for name in parameters))


def rows_of_groups(settings: Mapping[str, UpdateSettings]) -> dict[UpdateSettings, list[str]]:
    """Return the parameters that are updated alike, by what they are updated with."""
    rows = dict[UpdateSettings, list[str]]()
    for name, own in settings.items():
        rows.setdefault(own, []).append(name)
    return rows
