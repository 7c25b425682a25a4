"""Recipes: TOML files that are found by name, checked against a schema, and only then used.

Three kinds, one folder each under `recipes/`:

    model                   the dimensions of a published size, named `<model.name>-<model.flavor>`
    float8                  the arithmetic of a linear layer's three matmuls
    activation_checkpoint   a save-list: which activations are kept for backward

A recipe is legal or it is not loaded: what the schemas (`config/recipe_schema.py`) cannot say about a value, the
checks below do. Code elsewhere interprets the fields: no recipe name occurs in an `if`. This module imports no torch,
so that a bad recipe is reported within a second.
"""

import dataclasses
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, cast, get_args, overload

from titanlite.config.architectures import check_keys
from titanlite.config.build import build, show
from titanlite.config.problems import Origin, Place, Problems
from titanlite.config.recipe_schema import (
    BLOCKS,
    MATMULS,
    Float8Recipe,
    Granularity,
    ModelRecipe,
    SaveList,
)
from titanlite.config.renamed import OLD_FLOAT8_RECIPES
from titanlite.config.schema import Config
from titanlite.config.toml_file import read_merged, shipped_folder
from titanlite.errors import RecipeError, nearest

Kind = Literal["model", "float8", "activation_checkpoint"]
OP_CLASSES = ("attention", "matmul", "communication", "statistics", "cast")
AUTO = "auto"  # instead of a save-list: one is chosen when the run starts


def names(kind: Kind, extra_dirs: Sequence[str] = ()) -> list[str]:
    """Return the names of all recipes of one kind, the shipped ones first.

    Args:
        kind: which recipes.
        extra_dirs: the user's folders (`job.recipe_dirs`).

    Raises:
        RecipeError: a folder does not exist, or two recipes have one name.
    """
    return list(_files(kind, extra_dirs, Origin("recipes")))


def current_name(kind: Kind, name: str, extra_dirs: Sequence[str] = ()) -> str:
    """Return the name that a recipe has here: `name`, unless that is what torchao or torchtitan once called it.

    Args:
        kind: which recipes.
        name: as the config says it.
        extra_dirs: the user's folders (`job.recipe_dirs`), whose names are never old ones.

    Raises:
        RecipeError: as `names`.
    """
    if kind != "float8" or name in names(kind, extra_dirs):
        return name
    return OLD_FLOAT8_RECIPES.get(name, name)


@overload
def load(
    kind: Literal["model"], name_or_path: str, extra_dirs: Sequence[str] = (), origin: Origin | None = None
) -> ModelRecipe: ...
@overload
def load(
    kind: Literal["float8"], name_or_path: str, extra_dirs: Sequence[str] = (), origin: Origin | None = None
) -> Float8Recipe: ...
@overload
def load(
    kind: Literal["activation_checkpoint"],
    name_or_path: str,
    extra_dirs: Sequence[str] = (),
    origin: Origin | None = None,
) -> SaveList: ...
def load(
    kind: Kind, name_or_path: str, extra_dirs: Sequence[str] = (), origin: Origin | None = None
) -> ModelRecipe | Float8Recipe | SaveList:
    """Find a recipe, read it with what it extends, and check it.

    Args:
        kind: which recipes to look in.
        name_or_path: a name, or the path of a file (it ends in .toml).
        extra_dirs: the user's folders (`job.recipe_dirs`).
        origin: where the config named the recipe, for the message if there is none.

    Raises:
        RecipeError: there is no such recipe, or it is malformed or not legal; every problem is in the message.
        ConfigError: its file is not TOML.
    """
    origin = origin or Origin("recipes")
    files = _files(kind, extra_dirs, origin)
    path = _find(kind, current_name(kind, name_or_path, extra_dirs), files, origin)

    def find_base(name: str, at: Place) -> Path:
        return _find(kind, name, files, Origin(at.source, {"extends": at}), "extends", Path(at.source).parent)

    table, places = read_merged(path, find_base)
    problems = Problems(Origin(str(path), places))
    recipe = build(KINDS[kind].schema, table, problems)
    if recipe is not None and not problems:
        KINDS[kind].check(recipe, problems)
    problems.raise_all(RecipeError)
    if isinstance(recipe, SaveList):  # a model tells later what it cannot do; a copy with other rules has no lines
        object.__setattr__(recipe, "origin", problems.origin)
    return cast("ModelRecipe | Float8Recipe | SaveList", recipe)


def model_dimensions(config: Config, origin: Origin | None = None) -> ModelRecipe:
    """Return the dimensions of a config's model: its flavor, and over it the keys that `[model]` overrides.

    Args:
        config: the run.
        origin: where its keys were given, for the message if there is no such flavor.

    Raises:
        RecipeError: there is no such flavor, or the architecture lacks a key or makes nothing of one.
    """
    model = config.model
    name = Path(model.file).stem if model.file else model.name
    recipe = load("model", f"{name}-{model.flavor}", config.job.recipe_dirs, origin)
    given = {k: v for k, v in dataclasses.asdict(model).items() if v is not None}
    recipe = dataclasses.replace(recipe, **{k: v for k, v in given.items() if k not in ("name", "file", "flavor")})
    problems = Problems(origin or Origin("config"))
    check_keys(model, recipe, problems)
    problems.raise_all(RecipeError)
    return recipe


def _files(kind: Kind, extra_dirs: Sequence[str], origin: Origin) -> dict[str, Path]:
    """Return name → file, the shipped ones first."""
    problems = Problems(origin)
    files = {path.stem: path for path in sorted((shipped_folder("recipes") / kind).glob("*.toml"))}
    for folder in (Path(given).expanduser() for given in extra_dirs):
        if not os.path.isdir(folder):
            problems.add("job.recipe_dirs", show(str(folder)), "a folder that exists", "create it, or remove it here")
            continue
        if not any(os.path.isdir(folder / one) for one in KINDS):
            want = f"a folder with a subfolder {' or '.join(KINDS)}, where recipes are looked up"
            is_one = folder.name in KINDS
            fix = (
                f"name the folder above it, {folder.parent}"
                if is_one
                else "move each recipe into the subfolder of its kind"
            )
            problems.add("job.recipe_dirs", show(str(folder)), want, fix)
            continue
        for path in sorted((folder / kind).glob("*.toml")):
            if path.stem in KINDS[kind].words:
                want = f'another name: {KINDS[kind].key} = "{path.stem}" is reserved'
                problems.add("job.recipe_dirs", show(str(path)), want, f"rename {path.name}")
            elif path.stem in files and path.resolve() != files[path.stem].resolve():  # it may be the shipped one
                want = f"a name of its own; {files[path.stem]} is already called that"
                problems.add("job.recipe_dirs", show(str(path)), want, f"rename {path.name}")
            files.setdefault(path.stem, path)
    problems.raise_all(RecipeError)
    return files


def _find(
    kind: Kind, name: str, files: dict[str, Path], origin: Origin, key: str | None = None, base: Path = Path()
) -> Path:
    """Return the file of a recipe, or raise an error that lists the names there are."""
    if name in files:
        return files[name]
    if name.endswith(".toml") and os.path.isfile(base / name):
        return base / name
    words = () if key is not None or name in KINDS[kind].words else KINDS[kind].words
    asked, choices, place = name, [*words, *files], "a .toml file that exists"
    if kind == "model" and key is None:  # a config says name and flavor apart
        architecture, _, flavor = name.partition("-")
        own = [stem for stem, path in files.items() if path.parent != shipped_folder("recipes") / kind]
        has = f", which have {', '.join(own)}" if own else ""
        asked, place = flavor or name, f"model/{name}.toml in a folder of job.recipe_dirs{has}"
        choices = [c.removeprefix(f"{architecture}-") for c in choices if c.startswith(f"{architecture}-")]
    problems, key = Problems(origin), key or KINDS[kind].key
    near = OLD_FLOAT8_RECIPES.get(asked) if kind == "float8" else None
    near = near or nearest(asked, choices)
    fix = f'did you mean "{near}"?' if near else f"see `titanlite recipes {kind}`"
    want = f"one of {', '.join(choices)}, or {place}" if choices else place
    problems.add(key, show(asked), want, fix)
    raise problems.error(RecipeError)


def _check_model(recipe: ModelRecipe, problems: Problems) -> None:
    """Dimensions are positive, heads even; `config/check.py` holds them against each other, after the overrides."""
    for name, value in dataclasses.asdict(recipe).items():
        if value == 0 and getattr(ModelRecipe, name, None) == 0:
            continue  # not given; `config/architectures.py` knows who needs it
        if isinstance(value, int | float) and not isinstance(value, bool) and not value > 0:
            problems.add(name, show(value), "a number above 0", f"{name} = the published size")
    if recipe.head_dim % 2:  # no key of a config overrides it
        problems.add(
            "head_dim", show(recipe.head_dim), "an even width, for rotary pairs", "head_dim = the published size"
        )


_PAIRS = {  # of granularities in one matmul that exist, in either order
    frozenset(pair)
    for pair in (
        ("tensor", "tensor"),
        ("row", "row"),
        ("tensor", "row"),  # the one scale is repeated
        ("1x128", "1x128"),
        ("1x128", "128x128"),
        ("1x32", "1x32"),
    )
}


def _check_float8(recipe: Float8Recipe, problems: Problems) -> None:
    """Each matmul is one that the hardware, or its definition, can carry out."""
    for matmul, (left, right) in MATMULS.items():
        a, b = getattr(recipe, left), getattr(recipe, right)
        grain_a, grain_b = recipe.operands(matmul)
        if (grain_a == "none") != (grain_b == "none"):
            where, other = (left, right) if grain_a == "none" else (right, left)
            want = f'both operands of a matmul in float8, or both "none"; {other}.{matmul} is not "none"'
            problems.add(f"{where}.{matmul}", '"none"', want, f'{other}.{matmul} = "none"')
        elif grain_a == "none":
            continue
        elif a.dtype == b.dtype == "e5m2":
            want = f"e4m3 for one operand of the {matmul} matmul: tensor cores have no e5m2 × e5m2"
            problems.add(f"{right}.dtype", '"e5m2"', want, f'{right}.dtype = "e4m3"')
        elif {grain_a, grain_b} not in _PAIRS:
            kept, wrong = (f"{left}.{matmul}", grain_a), (f"{right}.{matmul}", grain_b)
            if problems.is_own(kept[0]) and not problems.is_own(wrong[0]):  # what a base says was right there
                kept, wrong = wrong, kept
            fitting = [show(g) for g in get_args(Granularity) if {kept[1], g} in _PAIRS]
            want = f"one of {', '.join(fitting)} beside {kept[0]} = {show(kept[1])}"
            problems.add(wrong[0], show(wrong[1]), want, f"{matmul} = {fitting[0]}")
        elif grain_a in BLOCKS and getattr(recipe.accumulation, matmul) == "fast":
            want = '"split": what has scales by block is added up in float32, block by block'
            problems.add(f"accumulation.{matmul}", '"fast"', want, f'{matmul} = "split"')
    grains = set(recipe.granularities) - {"none"}
    if not grains and not problems:
        want = 'a matmul in float8; all three are "none"'
        problems.add("input.output", '"none"', want, 'float8.recipe = "none" in the config, for no float8 at all')
    if recipe.scale_rounding == "e8m0_rceil" and (others := sorted(grains - set(BLOCKS))):
        want = f"a rounding for all of its granularities; {', '.join(others)} have no E8M0 scales, blocks have"
        problems.add("scale_rounding", '"e8m0_rceil"', want, 'scale_rounding = "pow2_floor"')
    if recipe.scale_rounding == "exact" and "1x32" in grains:
        want = "a power of two: scales of 1x32 blocks are stored as E8M0, exponents alone"
        problems.add("scale_rounding", '"exact"', want, 'scale_rounding = "e8m0_rceil"')
    weight = recipe.weight
    if recipe.fsdp_all_gather == "float8":
        given = {"fsdp_all_gather": "float8"}
        if weight.output != weight.grad_input or weight.output not in ("tensor", "row"):
            given |= {"weight.output": weight.output, "weight.grad_input": weight.grad_input}
            want = 'weight.output and weight.grad_input both "tensor", or both "row": one cast travels'
        elif weight.output == "row" and recipe.scale_rounding != "pow2_floor":
            given["scale_rounding"] = recipe.scale_rounding
            want = 'scale_rounding = "pow2_floor": backward casts rows again, by column'
        if len(given) > 1:  # what a base says was right there
            key = next(filter(problems.is_own, given), "fsdp_all_gather")
            want = f'beside fsdp_all_gather = "float8", {want}'
            problems.add(key, show(given[key]), want, 'fsdp_all_gather = "high_precision"')
    if recipe.reduce_amax:
        if others := sorted(set(recipe.granularities) - {"tensor"}):
            want = f'false, unless every operand has one scale, "tensor"; {", ".join(others)} would stay a rank\'s own'
            problems.add("reduce_amax", "true", want, "leave reduce_amax out")
        elif recipe.fsdp_all_gather != "float8":
            want = '"float8" beside reduce_amax = true: maxima of all weights are then reduced at once'
            problems.add("fsdp_all_gather", show(recipe.fsdp_all_gather), want, 'fsdp_all_gather = "float8"')
    if not recipe.min_compute_capability > 0:
        given = show(recipe.min_compute_capability)
        problems.add("min_compute_capability", given, "a number above 0", "leave min_compute_capability out")
    unit, why = max(((BLOCKS[g][1], "blocks are whole") for g in grains if g in BLOCKS), default=(1, ""))
    if recipe.status != "emulated" and unit < 16:
        unit, why = 16, "tensor cores multiply no other widths"  # in float8, a row is whole words of 16 bytes
    if recipe.dim_multiple < 1 or recipe.dim_multiple % unit:
        want = "a number above 0" if unit == 1 else f"a multiple of {unit}: {why}"
        fix = "leave dim_multiple out" if unit == 1 else f"dim_multiple = {unit}"
        problems.add("dim_multiple", show(recipe.dim_multiple), want, fix)


def _check_save_list(recipe: SaveList, problems: Problems) -> None:
    """Each rule names an op and can match something."""
    decided: set[str] = set()  # ops that an earlier rule matches without exception
    for n, rule in enumerate(recipe.rules):
        where, is_class, is_block = f"rules[{n}]", rule.op in OP_CLASSES, rule.op == "block"
        if not is_class and not is_block and "." not in rule.op:
            choices = (*OP_CLASSES, "block")
            near = nearest(rule.op, choices)
            fix = f'did you mean "{near}"?' if near else "name a class, or one op"
            want = f"one of {', '.join(choices)}, or one op, as aten.mm.default"
            problems.add(f"{where}.op", show(rule.op), want, fix)
        if is_block and any(earlier.op != "block" for earlier in recipe.rules[:n]):
            want = "before all rules that are for a part of a block: the first that matches decides"
            problems.add(f"{where}.op", show(rule.op), want, "move the rule up")
        if is_block and rule.action != "save":
            want = '"save": what a block keeps of itself, other rules say'
            problems.add(f"{where}.action", show(rule.action), want, 'action = "save", or remove the rule')
        if is_block and recipe.default == "save":
            want = '"recompute" beside a rule for whole blocks'
            problems.add("default", '"save"', want, 'default = "recompute"')
        if rule.every < 1 or (rule.every > 1 and not is_class):
            want = "at least 1, and 1 for a rule that names one op"
            problems.add(f"{where}.every", str(rule.every), want, "every = 1 (the default)")
        if rule.module and (not is_class or rule.op == "attention"):
            want = f"no modules: a rule chooses by linear layer among {', '.join(OP_CLASSES[1:])}"
            problems.add(f"{where}.module", show(rule.module), want, "remove module")
        try:
            rule.blocks(1)
        except ValueError:
            want = 'a slice of the blocks, as ":", "5:" or ":-2"'
            problems.add(f"{where}.layers", show(rule.layers), want, 'layers = ":" (the default)')
        if rule.op in decided:
            want = "an op that no earlier rule has decided; this rule can never match"
            problems.add(f"{where}.op", show(rule.op), want, "remove the rule, or move it up")
        if rule.every == 1 and not rule.module and rule.layers == ":":
            decided.add(rule.op)


@dataclasses.dataclass(frozen=True)
class _Kind:
    """What differs between kinds of recipes."""

    schema: type[Any]
    check: Callable[[Any, Problems], None]
    key: str  # of the config, that names a recipe of this kind
    words: tuple[str, ...] = ()  # what that key may say besides a name


KINDS: dict[Kind, _Kind] = {
    "model": _Kind(ModelRecipe, _check_model, "model.flavor"),
    "float8": _Kind(Float8Recipe, _check_float8, "float8.recipe", words=("none",)),
    "activation_checkpoint": _Kind(SaveList, _check_save_list, "activation_checkpoint.recipe", words=(AUTO,)),
}
