"""Assign each parameter of a model to a group of the optimizer recipe, and find the settings of its update."""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Any

from titanlite.config.problems import Origin, Problems, show
from titanlite.config.recipe_schema import FROZEN, MATRIX_RULES, OptimizerRecipe, ParameterGroup
from titanlite.config.schema import Optimizer
from titanlite.errors import ConfigError, RecipeError, nearest

_EXCLUDE = "optimizer.weight_decay_exclude"


@dataclass(frozen=True)
class UpdateSettings:
    """The settings of one parameter's update: values of its group, and of `[optimizer]` where the group has none."""

    group: str
    rule: str  # `FROZEN` with `lr_factor` 0, and then without weight decay and further keys
    lr_factor: float
    weight_decay: float
    own: tuple[tuple[str, Any], ...]  # further keys of the rule, with their values

    def of_rule(self) -> dict[str, Any]:
        """Return all settings as one dict, by key, as the update rule reads them."""
        return {key: value for key, value in vars(self).items() if key != "own"} | dict(self.own)


def update_settings(
    recipe: OptimizerRecipe,
    config: Optimizer,
    shapes: Mapping[str, Sequence[int]],
    origin: Origin | None = None,
    of_matrices: Collection[str] | None = None,
) -> dict[str, UpdateSettings]:
    """Return the settings of each parameter's update, by name, in the order of `shapes`.

    The first group that matches a parameter takes it; groups without a pattern come last. A key that the group leaves
    out has the value of `config`.

    Args:
        recipe: groups of the optimizer.
        config: `[optimizer]`.
        shapes: shape of each parameter before sharding, by name.
        origin: file and line of each key of `config`.
        of_matrices: parameters that consist of whole matrices; None: rules for matrices are not checked.

    Raises:
        ConfigError: a pattern matches no parameter, a group takes no parameter, a parameter has no group, a parameter
            is excluded from weight decay but its group sets one, or it has no matrices but a rule for matrices; or all
            parameters are frozen.
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
        if not group.lr_factor:
            settings[parameter] = UpdateSettings(groups[parameter], FROZEN, 0.0, 0.0, ())
            continue
        decay = decay if group.weight_decay is None else group.weight_decay
        own = tuple((key, getattr(config, key) if value is None else value) for key, value in group.own.items())
        settings[parameter] = UpdateSettings(groups[parameter], group.rule, group.lr_factor, decay, own)
    return settings


def _taken(recipe: OptimizerRecipe, shapes: Mapping[str, Sequence[int]]) -> dict[str, str]:
    """Return parameter → name of the group that takes it, without parameters that no group takes."""
    ordered = sorted(recipe.groups.items(), key=lambda each: not each[1].pattern)  # stable, so groups keep their order
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
    """Refuse patterns that match nothing, groups that take nothing, parameters that no group takes, and a recipe that
    freezes all parameters.
    """
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
        want = f"a group for every parameter; none takes {some_of(left)}"
        problems.add("groups", "", want, 'add [groups.rest] with rule = "adamw", which takes what no other does')
    elif not any(recipe.groups[name].lr_factor for name in taken.values()):
        want = "a group with another factor: this one freezes its parameters, and so do all others that take some"
        problems.add(f"groups.{next(iter(taken.values()))}.lr_factor", "0.0", want, "lr_factor = 1.0 in one of them")


def some_of(parameters: Collection[str]) -> str:
    """Join up to four names of parameters, with * as the number of a block, and the count of further names."""
    names = one_of_all_blocks(parameters)
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _check_matrices(
    recipe: OptimizerRecipe, without: Mapping[str, Sequence[int]], taken: Mapping[str, str], problems: Problems
) -> None:
    """Refuse a rule for whole matrices in a group that takes a parameter without matrices (`without`)."""
    for name, group in recipe.groups.items():
        own = [n for n in taken if taken[n] == name]
        wrong = [n for n in own if n in without] if group.rule in MATRIX_RULES and group.lr_factor else []
        if not wrong:
            continue
        if len(wrong) == len(own):
            fix = 'rule = "adamw"'
        elif all(len(without[n]) < 2 for n in wrong):
            fix = 'shape = "matrix"; what it leaves, a group with rule = "adamw" takes'
        else:
            fix = f'a group above it with rule = "adamw" and pattern = {show(one_of_all_blocks(wrong))}'
        # Report a line of this file, not of a file that it extends.
        where = next(filter(problems.is_own, (f"groups.{name}.{k}" for k in ("rule", "shape", "pattern"))), None)
        want = f"parameters of projections alone, beside a rule for whole matrices; it takes {some_of(wrong)}"
        at = problems.origin.of(where) if where else None
        problems.add(f"groups.{name}.rule", show(group.rule), want, fix, at=at)


def _excluded(
    config: Optimizer,
    recipe: OptimizerRecipe,
    shapes: Mapping[str, Sequence[int]],
    taken: Mapping[str, str],
    problems: Problems,
) -> set[str]:
    """Return the parameters that `weight_decay_exclude` matches. Refuse those whose group sets a weight decay."""
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
    # Also patterns of common endings and beginnings: "*attention_norm.weight", "*norm.weight", "*weight"; "layers.*".
    ends = dict.fromkeys("*" + name[cut.end() :] for name in names for cut in re.finditer(r"^|[._]", name))
    begins = dict.fromkeys(name[: dot.start()] + ".*" for name in names for dot in re.finditer(r"(?<!\*)\.", name))
    if re.search(r"\d", pattern):  # it names a block, and beginnings stand for all blocks
        begins = {}
    near = nearest(pattern, [*names, *ends, *begins])
    want = f"a pattern that matches a parameter: {', '.join(names[:4])}, …"
    problems.add(key, show(pattern), want, f"did you mean {show(near)}?" if near else "remove it")


def one_of_all_blocks(parameters: Collection[str]) -> list[str]:
    """Return the names of parameters with * in place of the number of a block, each once."""
    return list(dict.fromkeys(re.sub(r"\.\d+\.", ".*.", name) for name in parameters))


def rows_of_groups(settings: Mapping[str, UpdateSettings]) -> dict[UpdateSettings, list[str]]:
    """Group the names of parameters by their settings: settings → names."""
    rows = dict[UpdateSettings, list[str]]()
    for name, own in settings.items():
        rows.setdefault(own, []).append(name)
    return rows
