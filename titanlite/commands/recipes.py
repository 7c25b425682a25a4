"""List recipes, show one, or make one: recipes [KIND [NAME]], recipes model --from FOLDER.

Recipes are shown as loaded: defaults filled in, `extends` resolved. So a recipe that extends another can be read here
without opening both.
"""

import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast, get_args

from titanlite.commands.arguments import Command
from titanlite.config.check import check_file
from titanlite.config.config_json import recipe_of
from titanlite.config.problems import Origin, Problems
from titanlite.config.recipe_schema import ModelDims, OwnRule
from titanlite.config.schema import FROM_CHECKPOINT
from titanlite.config.write import to_toml
from titanlite.errors import RecipeError, nearest
from titanlite.hub import fetch_description, is_hub_name, resolve_name
from titanlite.recipes import Kind, load, names

_KINDS: tuple[Kind, ...] = get_args(Kind)
# Names of recipes that a config may use although they have no file, each with its help, by kind.
_WITHOUT_FILE: dict[str, dict[str, str]] = {
    "model": {FROM_CHECKPOINT: "As model.flavor: the dimensions of the folder in checkpoint.initial_load_path."},
    "float8": {"none": "No float8: linear layers compute in training.mixed_precision_param."},
    "activation_checkpoint": {
        "auto": "The fastest list within activation_checkpoint.budget_gib, found when a run starts."
    },
}
_DIRS, _FROM, _RULES = "--job.recipe_dirs", "--from", "--optimizer.file"
COMMAND = Command(
    "recipes",
    __doc__ or "",
    {
        "KIND": f"{', '.join(_KINDS)}; default: all of them",
        "NAME": "recipe to show in full, or the path of one",
        f"{_DIRS} FOLDER": "also list your own recipes; separate several folders with commas",
        f"{_RULES} FILE": "the Python file of your own update rules, which groups of your own recipes have",
        f"{_FROM} FOLDER": "print the recipe of the model in a folder in Hugging Face's layout, by its config.json",
    },
    takes="[KIND [NAME]]",
)


def run(argv: list[str]) -> int:
    """Print the recipes of all kinds or of one kind, or one recipe."""
    if "--measure" in argv:  # no flag: a script measures
        raise RecipeError.of("command line", "--measure", "", "no flag", "scripts/bench/float8_layers.py of a checkout")
    argv, given = COMMAND.read_words(argv)
    dirs = given[_DIRS].split(",") if _DIRS in given else []
    rules = _rules_of(given[_RULES]) if _RULES in given else {}
    if len(argv) > 2:
        want = "at most a kind and a name"
        raise RecipeError.of("command line", " ".join(argv), "", want, "titanlite recipes KIND NAME")
    for kind in argv[:1]:
        if kind not in _KINDS:
            near = nearest(kind, _KINDS)
            fix = f"did you mean {near}?" if near else "titanlite recipes, to see them all"
            raise RecipeError.of("command line", "KIND", kind, f"one of {', '.join(_KINDS)}", fix)

    def read(kind: str, name: str) -> Any:
        return load(cast("Any", kind), name, dirs, Origin("command line"), rules)

    if _FROM in given:
        sys.stdout.write(_of_folder(argv, given[_FROM]))
    elif len(argv) == 2:
        kind, name = argv
        text = _WITHOUT_FILE.get(kind, {}).get(name)
        sys.stdout.write(f"# {kind} recipe {name}" + (f": {text}\n" if text else f"\n{to_toml(read(kind, name))}"))
    else:
        kinds = cast("Sequence[Kind]", argv) or _KINDS
        wrong = list[RecipeError]()
        sys.stdout.write("\n".join(_listing(kind, names(kind, dirs), read, wrong) for kind in kinds))
        if wrong:
            raise RecipeError("\n".join(map(str, wrong)))
    return 0


def _rules_of(file: str) -> Mapping[str, OwnRule]:
    """Return the update rules in the user's Python file, by name."""
    problems = Problems(Origin("command line"))
    check_file("optimizer.file", file, problems)
    problems.raise_all()

    from titanlite.update_rules.find import rules_of_file  # imports torch

    return rules_of_file(file, problems.origin)


def _of_folder(argv: Sequence[str], folder: str) -> str:
    """Return the text of a recipe file for the model in `folder`, or of that name of the hub.

    A kind in `argv` other than model is refused.
    """
    problems = Problems(Origin("command line"))
    if argv != ["model"]:
        want, fix = "the kind whose recipes are dimensions: model", f"titanlite recipes model {_FROM} {folder}"
        problems.add(_FROM, " ".join(argv), want, fix)
        problems.raise_all(RecipeError)
    if is_hub_name(folder):
        folder, _ = resolve_name(folder, _FROM)
        fetch_description(folder, _FROM)
    found = recipe_of(folder, problems, _FROM)
    problems.raise_all(RecipeError)
    architecture, recipe = cast("tuple[str, ModelDims]", found)
    where = f"model/{architecture}-NAME.toml in a folder of job.recipe_dirs"
    return f'# save as {where}; then model.name = "{architecture}", model.flavor = "NAME"\n' + to_toml(recipe)


def _listing(kind: Kind, there: Sequence[str], read: Callable[[str, str], Any], wrong: list[RecipeError]) -> str:
    """Return the recipes of a kind, named in `there`, with their help. Append the errors of broken ones to `wrong`."""
    rows = dict[str, str]()
    for name in there:
        try:
            rows[name] = read(kind, name).help
        except RecipeError as error:
            rows[name] = "(has a mistake)"
            wrong.append(error)
    rows |= _WITHOUT_FILE.get(kind, {})
    width = max(map(len, rows))
    indent = " " * (width + 4)
    lines = [kind]
    for name, text in rows.items():
        lines += textwrap.wrap(text, 100, initial_indent=f"  {name:{width}}  ", subsequent_indent=indent)
    return "\n".join(lines) + "\n"
