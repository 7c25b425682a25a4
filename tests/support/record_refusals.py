"""A pytest plugin that records each refusal which a test reaches, and what may be its input.

`scripts/harvest_refusals.py` loads it; otherwise it is off. A line of JSON is written for each error that is made, into
a file of the process, so that pytest-xdist's workers and forked ranks lose none; commands that a test starts as new
processes are not seen. Inputs are found in the frames of the stack: a command line, a `Config`, a recipe.
"""

import inspect
import json
import os
import shlex
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import tomli_w

import titanlite
from tests.support.refusals import CONFIG
from titanlite import recipes
from titanlite.config.architectures import ARCHITECTURES
from titanlite.config.recipe_schema import Float8Recipe, ModelDims, OptimizerRecipe, SaveList
from titanlite.config.schema import Config, Model, sections
from titanlite.config.toml_file import shipped_folder
from titanlite.config.write import to_toml, toml_table
from titanlite.errors import Problem, TitanliteError

FOLDER = "TITANLITE_REFUSALS"  # the variable with the folder that records go to
_PACKAGE = Path(titanlite.__file__).parent
_PASSED_ON = ("errors.py", "config/problems.py", "preflight/checked_run.py:attempt")  # make problems of others' checks
_EACH = 4  # records of one place and key, since not every input can be carried out again
_MOST_FILES, _LARGEST = 12, 6_000  # of a test's folder, and bytes of each: what is more is not recorded
_places = dict[tuple[str, str, str], str]()
_asked = list[str]()  # the last command line in which something was wrong
_seen = Counter[tuple[str, str]]()
_test, _folder = "", Path()


def _stack(frame: FrameType | None) -> Iterator[tuple[str, FrameType]]:
    """Yield the frames of titanlite from the innermost on, with file and function, up to the test's own."""
    while frame is not None and "_pytest" not in frame.f_code.co_filename:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(_PACKAGE):
            yield f"{path.relative_to(_PACKAGE)}:{frame.f_code.co_name}", frame
        frame = frame.f_back


def place() -> str:
    """Return file, function and line of the check that makes a problem or an error just now."""
    for name, frame in _stack(inspect.currentframe()):
        if not name.startswith(_PASSED_ON):
            return f"{name}:{frame.f_lineno}"
    return "tests"


def place_of(problem: Problem) -> str:
    """Return the place that made a problem first, however often it was passed on."""
    return _places.get((problem.where.removeprefix("--"), problem.saw, problem.want), "tests")


def watch() -> None:
    """Remember from now on where each problem is made."""
    make = Problem.__new__

    def made(cls: type[Problem], *args: Any, **kwargs: Any) -> Problem:
        problem = make(cls, *args, **kwargs)
        _places.setdefault((problem.where.removeprefix("--"), problem.saw, problem.want), place())
        for name, frame in _stack(inspect.currentframe()):
            if name == "config/command_line.py:parse_what_is_right":  # whose caller raises them
                _asked[:] = frame.f_locals["argv"]
        return problem

    Problem.__new__ = made


def forget() -> None:
    """Forget where problems were made, before another test makes equal ones elsewhere."""
    _places.clear()
    _asked.clear()


def pytest_configure() -> None:
    """Record the errors of this process, and of those that are forked from it."""
    if FOLDER not in os.environ:
        return
    watch()
    initialise = Exception.__init__

    def made(self: TitanliteError, *args: object) -> None:
        initialise(self, *args)
        _record(self)

    TitanliteError.__init__ = made


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> None:
    """Know the test that runs, and its folder."""
    global _test, _folder
    _test, _folder = item.nodeid, getattr(item, "funcargs", {}).get("tmp_path", Path("/nowhere"))
    forget()


def _record(error: TitanliteError) -> None:
    """Write down an error whose problems were not seen as often as is enough."""
    problems = [problem for report in error.args for problem in getattr(report, "problems", ())]
    kind, rows = type(error).__name__, list[dict[str, Any]]()
    for problem in problems or [Problem("", str(error), "", "")]:
        at = place_of(problem) if problems else place()
        key = problem.where.replace(f"{_folder}/", "").replace(str(_folder), ".")
        _seen[at, key] += 1
        if _seen[at, key] <= _EACH and at != "tests":
            rows.append({"at": at, "key": key, "error": kind})
    if rows:
        row = {"test": _test, "problems": rows, "inputs": [*_inputs(inspect.currentframe())]}
        with Path(os.environ[FOLDER], f"{os.getpid()}-{os.geteuid()}.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")


def _inputs(frame: FrameType | None) -> Iterator[dict[str, Any]]:
    """Yield what may be the input, the likeliest first: `argv` of the command titanlite, and `files`."""
    files = _files_of_test()
    words, config, path, named, world, dims, held = None, None, None, None, None, None, dict[type, Any]()
    parts = dict[type, Any]()
    commands = list[list[str]]()
    for name, each in _stack(frame):
        known = each.f_locals
        if name == "preflight/checked_run.py:checked_run":
            words, world = known["argv"], known["world_size"] or world
        elif name == "config/command_line.py:parse_what_is_right":
            words = words or known["argv"]
        elif name == "commands/__init__.py:_run_command":
            commands.append([known["name"], *known["rest"]])
        elif name.startswith("commands/") and name.endswith(".py:run") and isinstance(known.get("argv"), list):
            command = name.removeprefix("commands/").partition(".")[0].replace("_", "-")
            commands.append([command, *known["argv"]])
        elif name in ("config/read.py:read_what_is_right", "config/read.py:read_config"):
            path = known["path"]
        elif name == "recipes.py:load":
            named = known["kind"], known["name_or_path"], known["extra_dirs"]
        for value in known.values():
            config = value if isinstance(value, Config) else config
            dims = value if isinstance(value, ModelDims) else dims
            parts |= {type(value): value} if isinstance(value, tuple(sections().values())) else {}
            held |= {type(value): value} if isinstance(value, SaveList | Float8Recipe | OptimizerRecipe) else {}
        given = next((known[n] for n in ("world_size", "world") if isinstance(known.get(n), int)), None)
        world = given or world
    if config is None and parts:
        config = Config(**{name: parts[kind] for name, kind in sections().items() if kind in parts})
    words = words if words is not None else [*_asked] or None
    of_world = ["--world", str(world)] if world else []
    lines = [["validate", *words, *of_world]] if words is not None else []
    lines += commands + ([["validate", str(path), *of_world]] if path is not None else [])
    for line in lines:
        yield _moved(line, files)
    if named is not None:
        kind, name, dirs = named
        given = {"model.name": name.partition("-")[0], "model.flavor": name.partition("-")[2]}
        given = given if kind == "model" else {recipes.KINDS[kind].key: name}
        text = "".join(f"{k} = {json.dumps(str(v))}\n" for k, v in given.items())
        text += f"job.recipe_dirs = {json.dumps([str(d) for d in dirs])}\n" if dirs else ""
        yield _moved(["validate", CONFIG, *of_world], {**files, CONFIG: text})
    if config is not None or dims is not None or held:
        with_recipes = {**files, CONFIG: _text_of(config or Config(), dims, {})}
        for value in held.values():
            kind = next(k for k, each in recipes.KINDS.items() if each.schema is type(value))
            with_recipes[f"mine/{kind}/own.toml"] = to_toml(value)
        own = {type(value) for value in held.values()}
        with_recipes[CONFIG] = _text_of(config or Config(), dims, own)
        yield _moved(["validate", CONFIG, *of_world], with_recipes)
        if own:
            yield _moved(["validate", CONFIG, *of_world], {**files, CONFIG: _text_of(config or Config(), dims, {})})


def _text_of(config: Config, dims: ModelDims | None, own: Any) -> str:
    """Return what a config has other than the defaults, with a model's dimensions and recipes beside it."""
    model = config.model
    if dims is not None and model.name in ARCHITECTURES:
        try:
            shipped = asdict(recipes.load("model", f"{model.name}-{model.flavor}", config.job.recipe_dirs))
        except TitanliteError:
            shipped = dict[str, Any]()
        other = {k: v for k, v in asdict(dims).items() if k in vars(Model()) and shipped.get(k) != v}
        config = replace(config, model=replace(model, **other))
    given, defaults = toml_table(config), toml_table(Config())
    table = {
        section: {k: v for k, v in keys.items() if k not in defaults[section] or defaults[section][k] != v}
        for section, keys in given.items()
    }
    for kind in own:
        key = next(each.key for each in recipes.KINDS.values() if each.schema is kind)
        section, _, name = key.partition(".")
        table[section][name] = "own"
        table["job"]["recipe_dirs"] = ["mine"]
    return tomli_w.dumps({section: keys for section, keys in table.items() if keys})


def _files_of_test() -> dict[str, str]:
    """Return the small texts in the test's folder; a folder without files ends in a slash."""
    files = dict[str, str]()
    for root, folders, names in os.walk(_folder):
        inside = Path(root).relative_to(_folder)
        if not folders and not names and inside != Path():
            files[f"{inside}/"] = ""
        for name in sorted(names):
            path = Path(root, name)
            if path.is_file() and not path.is_symlink() and path.stat().st_size <= _LARGEST:
                try:
                    files[str(inside / name)] = path.read_text(encoding="utf-8")
                except (UnicodeDecodeError, OSError):
                    continue
        if len(files) > _MOST_FILES:
            return {}
    return files


def _moved(argv: list[str], files: dict[str, str]) -> dict[str, Any]:
    """Return a command line and files as in a folder of their own: with relative paths, and the shipped configs."""
    line, moved, configs = shlex.join(map(str, argv)), dict[str, str](), shipped_folder("configs")

    def near(text: str) -> str:
        text = text.replace(f"{_folder}/", "").replace(str(_folder), ".")
        return text.replace(f"{configs}/", "")

    for name in [p.name for p in configs.glob("*.toml") if str(p) in line]:
        moved[name] = (configs / name).read_text()
    return {"argv": near(line), "files": {**moved, **{name: near(text) for name, text in files.items()}}}
