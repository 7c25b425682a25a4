"""Read the update rules of a user's own file (`optimizer.file`), as they describe themselves, without running it.

A rule is a class that derives from `ElementwiseRule` (`titanlite/update_rules/elementwise.py`). Its state and keys are
literals in its body, so that the memory of a run, the room of its checkpoints and the groups of its recipe are checked
before torch is imported. `titanlite/update_rules/find.py` imports the file, and tries the rules.
"""

import ast
import hashlib
import math
import os
from dataclasses import replace
from typing import cast

from titanlite.config.build import show
from titanlite.config.own_groups import COMMON_KEYS
from titanlite.config.problems import Origin, Problems
from titanlite.config.recipe_schema import KEYS_OF_RULE, OwnRule, Value
from titanlite.durable import require_reachable
from titanlite.errors import ConfigError, Problem, describe

BASE = "ElementwiseRule"
TYPES: dict[str, type[float | int | bool | str]] = {"float": float, "int": int, "bool": bool, "str": str}
_STATE = 'a tuple of names, as state = ("momentum",)'


def rules_of_file(file: str, origin: Origin | None = None) -> dict[str, OwnRule]:
    """Read the rules of a file.

    Args:
        file: `optimizer.file`; "": there are none.
        origin: where the key was given.

    Returns:
        By the name of the class.

    Raises:
        ConfigError: there is no such file, it is not Python, it has no rule, or one does not say its state and keys by
            literals; all problems are in the message.
    """
    if not file:
        return {}
    problems = Problems(origin or Origin("config"))
    require_reachable(file)
    if not file.endswith(".py"):
        problems.add("optimizer.file", show(file), "a Python file", 'file = "my_rule.py"')
    elif not os.path.isfile(file):
        problems.add("optimizer.file", show(file), "a file that exists", "its path from where you start")
    problems.raise_all()
    found, wrong = dict[str, OwnRule](), list[Problem]()
    text = _text(file)
    sha256 = hashlib.sha256(text).hexdigest()
    for node in _parsed(file, text).body:
        if not isinstance(node, ast.ClassDef):
            continue
        bases = [ast.unparse(base).rpartition(".")[2] for base in node.bases]
        above = [found[base] for base in bases if base in found]
        if BASE in bases or above:
            found[node.name] = _rule(node, OwnRule(node.name, file, sha256, node.lineno, (), {}), above, wrong)
    if not found:
        want, fix = f"a class that derives from {BASE}", f"class Mine({BASE}), as in docs/how_to/own_optimizer.md"
        wrong.append(Problem("optimizer.file", f"{show(file)}, with no rule", want, fix))
    if wrong:
        raise ConfigError(describe(file, wrong))
    return found


def _text(file: str) -> bytes:
    try:
        with open(file, "rb") as opened:
            return opened.read()
    except OSError as error:
        raise ConfigError.of(file, "optimizer.file", str(error), "a file that can be read", "chmod +r it") from None


def _parsed(file: str, text: bytes) -> ast.Module:
    want, fix = "Python", f"change that line, until `python -m py_compile {file}` has nothing to say"
    try:
        return ast.parse(text, file)
    except SyntaxError as error:
        where, saw, line = (error.text or "").strip() or "optimizer.file", f"SyntaxError: {error.msg}", error.lineno
    except (ValueError, RecursionError) as error:  # a NUL, or parentheses without end
        where, saw, line = "optimizer.file", f"{type(error).__name__}: {error}", None
    raise ConfigError(describe(file, [Problem(where, saw, want, fix, line)]))


def _rule(node: ast.ClassDef, bare: OwnRule, above: list[OwnRule], wrong: list[Problem]) -> OwnRule:
    """Read one class; it has what the rules above it have, too."""
    state = next((rule.state for rule in above), ())
    keys = {key: value for rule in reversed(above) for key, value in rule.keys.items()}
    if node.name in KEYS_OF_RULE:
        want, fix = f"a name of its own; titanlite has a rule {show(node.name)}", "rename the class"
        wrong.append(Problem(f"class {node.name}", "", want, fix, node.lineno))
    for statement in node.body:
        if isinstance(statement, ast.Assign):
            names = [ast.unparse(each) for each in statement.targets]
            state = _names_of_state(node, statement, statement.value, wrong) if "state" in names else state
            for key in keys.keys() & {*names}:
                saw, fix = ast.unparse(statement.value), f"{key}: {type(keys[key]).__name__} = …"
                wrong.append(Problem(f"{node.name}.{key}", saw, "the key with its type", fix, statement.lineno))
        elif isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            name, type_ = statement.target.id, ast.unparse(statement.annotation)
            if name == "state" and statement.value is not None:
                state = _names_of_state(node, statement, statement.value, wrong)
            elif not name.startswith("_") and type_.partition("[")[0] != "ClassVar":
                keys |= _key_of_class(node, statement, name, wrong)
    return replace(bare, state=state, keys=keys)


def _names_of_state(node: ast.ClassDef, statement: ast.stmt, value: ast.expr, wrong: list[Problem]) -> tuple[str, ...]:
    """Read the names of the state, or add a problem."""
    try:
        found: object = ast.literal_eval(value)
    except ValueError:
        found = None
    given = cast("tuple[object, ...]", found) if isinstance(found, tuple) else (None,)
    names = {n: None for n in given if isinstance(n, str) and n.isidentifier() and n != "updates"}
    if len(names) == len(given):
        return tuple(names)
    fix = 'state = ("momentum",); without state, leave it out'
    want = f"{_STATE}: different words, none of them updates"
    wrong.append(Problem(f"{node.name}.state", ast.unparse(value), want, fix, statement.lineno))
    return ()


def _key_of_class(node: ast.ClassDef, statement: ast.AnnAssign, name: str, wrong: list[Problem]) -> dict[str, Value]:
    """Read a key and its default, or add a problem."""
    type_, given = ast.unparse(statement.annotation), ast.unparse(statement.value) if statement.value else ""
    try:
        default: object = ast.literal_eval(statement.value) if statement.value else None
    except ValueError:
        default = None
    if name in COMMON_KEYS or name == "update":
        want, fix = f"another name: {name} is a key of every group, or a part of the class", "rename it"
    elif type_ not in TYPES:
        want, fix = f"one of the types {', '.join(TYPES)}; {name} is of type {type_}", f"{name}: float = …"
    elif not _is_of_type(default, TYPES[type_]):
        want = f"a default that is {'finite and ' * (type_ == 'float')}a literal of type {type_}"
        fix = f"{name}: {type_} = {ast.unparse(ast.Constant(TYPES[type_]()))}"
    else:
        return {name: TYPES[type_](cast("Value", default))}
    wrong.append(Problem(f"{node.name}.{name}", given, want, fix, statement.lineno))
    return {}


def _is_of_type(value: object, type_: type[Value]) -> bool:
    """Return whether a value is of a key's type; a whole number is a float, too."""
    if type_ is float:
        return type(value) in (int, float) and math.isfinite(cast("float", value))
    return type(value) is type_
