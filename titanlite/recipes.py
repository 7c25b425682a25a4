"""Recipes: TOML files that are found by name, checked against a schema, and only then used.

Four kinds, one folder each under `recipes/`:

    model                   the dimensions of a published size, named `<model.name>-<model.flavor>`
    float8                  the arithmetic of a linear layer's three matmuls
    activation_checkpoint   a save-list: which activations are kept for backward
    optimizer               groups of parameters, and the rule by which each is updated

`config/check_recipe.py` checks what the schemas (`config/recipe_schema.py`) cannot express. Code elsewhere interprets
the fields: no recipe name occurs in an `if`.
"""

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, cast, overload

from titanlite.config.build import from_table, show
from titanlite.config.check_recipe import check_float8, check_keys, check_model, check_optimizer, check_save_rules
from titanlite.config.config_json import model_of
from titanlite.config.own_groups import optimizer_recipe
from titanlite.config.problems import Origin, Place, Problems
from titanlite.config.recipe_schema import Float8Recipe, ModelDims, OptimizerRecipe, OwnRule, SaveList
from titanlite.config.schema import FROM_CHECKPOINT, Config
from titanlite.config.toml_file import read_merged, shipped_folder
from titanlite.config.torchtitan import answer_to_value, flavor
from titanlite.durable import require_reachable
from titanlite.errors import RecipeError, nearest

Kind = Literal["model", "float8", "activation_checkpoint", "optimizer"]
_NO_RULES: Mapping[str, OwnRule] = MappingProxyType({})
AUTO = "auto"  # instead of a name: a save-list is chosen when the run starts


def names(kind: Kind, extra_dirs: Sequence[str] = ()) -> list[str]:
    """Return the names of all recipes of one kind, the shipped ones first."""
    return list(_files(kind, extra_dirs, Origin("recipes")))


def require(kind: Kind, name_or_path: str, extra_dirs: Sequence[str], origin: Origin) -> None:
    """Raise RecipeError, as `load` does, if no recipe has this name or path. The content of the recipe is not read."""
    _find(kind, name_or_path, _files(kind, extra_dirs, origin), origin)


@overload
def load(
    kind: Literal["model"], name_or_path: str, extra_dirs: Sequence[str] = (), origin: Origin | None = None
) -> ModelDims: ...
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
@overload
def load(
    kind: Literal["optimizer"],
    name_or_path: str,
    extra_dirs: Sequence[str] = (),
    origin: Origin | None = None,
    rules: Mapping[str, OwnRule] = _NO_RULES,
) -> OptimizerRecipe: ...
def load(
    kind: Kind,
    name_or_path: str,
    extra_dirs: Sequence[str] = (),
    origin: Origin | None = None,
    rules: Mapping[str, OwnRule] = _NO_RULES,
) -> ModelDims | Float8Recipe | SaveList | OptimizerRecipe:
    """Find a recipe, read it and the recipes that it extends, and check it. `rules`: the update rules of a user's file.

    Raises:
        RecipeError: there is no such recipe, or it is malformed or not legal. The error lists every problem.
        ConfigError: its file is not TOML.
    """
    origin = origin or Origin("recipes")
    files = _files(kind, extra_dirs, origin)
    path = _find(kind, name_or_path, files, origin)

    def find_base(name: str, at: Place) -> Path:
        return _find(kind, name, files, Origin(at.source, {"extends": at}), "extends", Path(at.source).parent)

    is_optimizer, schema = kind == "optimizer", KINDS[kind].schema
    table, places = read_merged(path, find_base, added_first="groups" if is_optimizer else "")
    problems = Problems(Origin(str(path), places))
    recipe = optimizer_recipe(table, rules, problems) if is_optimizer else from_table(schema, table, problems)
    if recipe is not None and not problems:
        KINDS[kind].check(recipe, problems)
    problems.raise_all(RecipeError)
    # For later checks, which need a model: messages name the line in the file. A changed copy has no lines.
    if isinstance(recipe, SaveList | OptimizerRecipe):
        object.__setattr__(recipe, "origin", problems.origin)
    if isinstance(recipe, OptimizerRecipe):
        object.__setattr__(recipe, "own_rules", rules)
    return cast("ModelDims | Float8Recipe | SaveList | OptimizerRecipe", recipe)


def model_dims(config: Config, origin: Origin | None = None) -> ModelDims:
    """Return the dimensions of the config's model: of its flavor or initial weights, with the overrides of `[model]`.

    Raises:
        RecipeError: there is no such flavor; or the architecture needs a missing dimension, or does not use a given
            one.
        ConfigError: the flavor is that of initial weights, which are not given or are of another model.
    """
    model = config.model
    name, origin = Path(model.file).stem if model.file else model.name, origin or Origin("config")
    if model.flavor == FROM_CHECKPOINT:
        recipe = model_of(config, origin)
    else:
        recipe = load("model", f"{name}-{model.flavor}", config.job.recipe_dirs, origin)
    given = {k: v for k, v in dataclasses.asdict(model).items() if v is not None}
    recipe = dataclasses.replace(recipe, **{k: v for k, v in given.items() if k not in ("name", "file", "flavor")})
    problems = Problems(origin)
    check_keys(model, recipe, problems)
    problems.raise_all(RecipeError)
    return recipe


def _files(kind: Kind, extra_dirs: Sequence[str], origin: Origin) -> dict[str, Path]:
    """Return the files of all recipes of a kind by name, shipped recipes first; refuse unusable folders and names."""
    problems = Problems(origin)
    files = {path.stem: path for path in sorted((shipped_folder("recipes") / kind).glob("*.toml"))}
    for folder in (Path(os.path.expanduser(given)) for given in extra_dirs):
        require_reachable(folder / "model")
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
            word = path.stem.partition("-")[2] if kind == "model" else path.stem  # the name in a config
            if word in KINDS[kind].words:
                want = f'another name: {KINDS[kind].key} = "{word}" is reserved'
                problems.add("job.recipe_dirs", show(str(path)), want, f"rename {path.name}")
            elif path.stem in files and path.resolve() != files[path.stem].resolve():  # two files of one name
                want = f"a name of its own; {files[path.stem]} is already called that"
                problems.add("job.recipe_dirs", show(str(path)), want, f"rename {path.name}")
            files.setdefault(path.stem, path)
    problems.raise_all(RecipeError)
    return files


def _find(
    kind: Kind, name: str, files: dict[str, Path], origin: Origin, key: str | None = None, base: Path = Path()
) -> Path:
    """Return the file of a recipe, or raise RecipeError with the known names.

    For a name in `extends`, `key` is "extends", and a path is relative to the folder `base`.
    """
    if name in files:
        return files[name]
    if name.endswith(".toml") and os.path.isfile(base / name):
        return base / name
    words = () if key is not None or name in KINDS[kind].words else KINDS[kind].words
    asked, choices, place, there = name, [*words, *files], "a .toml file that exists", None
    if kind == "model" and key is None:  # a config has separate keys for name and flavor
        architecture, _, size = name.partition("-")
        there = flavor(architecture, size)
        own = [stem for stem, path in files.items() if path.parent != shipped_folder("recipes") / kind]
        has = f", which have {', '.join(own)}" if own else ""
        asked, place = size or name, f"model/{name}.toml in a folder of job.recipe_dirs{has}"
        flavors = [c.removeprefix(f"{architecture}-") for c in choices if c.startswith(f"{architecture}-")]
        choices = (
            [*flavors, *words] if flavors else [c for c in choices if c.endswith(f"-{name}")]
        )  # `name` may be a flavor alone
    problems, key = Problems(origin), key or KINDS[kind].key
    there = there or answer_to_value(KINDS[kind].key, asked)
    near = nearest(asked, choices) or next((c for c in choices if is_part(asked, c)), None)
    fix = there or (f'did you mean "{near}"?' if near else f"see `titanlite recipes {kind}`")
    want = f"one of {', '.join(choices)}, or {place}" if choices else place
    problems.add(key, show(asked), want, fix)
    raise problems.error(RecipeError)


def is_part(text: str, name: str) -> bool:
    """Return whether `text` is one or more parts of `name` between hyphens, as "30B" is of "qwen3_moe-30B-A3B"."""
    return f"-{text}-".lower() in f"-{name}-".lower()


@dataclasses.dataclass(frozen=True)
class _Kind:
    """The schema, checks and config key of a kind of recipes."""

    schema: type[Any]
    check: Callable[[Any, Problems], None]
    key: str  # config key whose value names a recipe of this kind
    words: tuple[str, ...] = ()  # values of this key that are no recipe names


KINDS: dict[Kind, _Kind] = {
    "model": _Kind(ModelDims, check_model, "model.flavor", words=(FROM_CHECKPOINT,)),
    "float8": _Kind(Float8Recipe, check_float8, "float8.recipe", words=("none",)),
    "activation_checkpoint": _Kind(SaveList, check_save_rules, "activation_checkpoint.recipe", words=(AUTO,)),
    "optimizer": _Kind(OptimizerRecipe, check_optimizer, "optimizer.recipe"),
}
