"""A name says one thing: no two modules of the package define a class or function of the same name.

But where one class is a subclass of the other, and the entries of commands (`run`, `main`).
"""

import ast
import re
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "titanlite"
ENTRIES = {"run", "main"}


def imported(tree: ast.AST) -> dict[str, str]:
    """What each name that is imported in it stands for, as `module.name`."""
    found: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            found |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.asname: alias.name for alias in node.names if alias.asname}
    return found


def double_names(sources: Mapping[str, str]) -> set[str]:
    """Names that two modules define, none of which is a subclass of another's of the same name.

    Args:
        sources: the text of each module, by its dotted name.
    """
    defined: defaultdict[str, set[str]] = defaultdict(set)
    extends: set[str] = set()  # what subclasses a class of its own name
    for module, source in sources.items():
        tree = ast.parse(source)
        known = imported(tree)
        for node in tree.body:
            if not isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            defined[node.name].add(f"{module}.{node.name}")
            for base in node.bases if isinstance(node, ast.ClassDef) else ():
                start, _, rest = ast.unparse(base).partition(".")
                whole = f"{known.get(start, start)}.{rest}".rstrip(".")
                if whole != f"{module}.{node.name}" and whole.endswith(f".{node.name}"):
                    extends.add(f"{module}.{node.name}")
    return {name for name, places in defined.items() if len(places - extends) > 1} - ENTRIES


@pytest.fixture(scope="module")
def found() -> set[str]:
    paths = PACKAGE.rglob("*.py")
    return double_names({".".join(p.relative_to(PACKAGE.parent).with_suffix("").parts): p.read_text() for p in paths})


def test_no_name_is_defined_in_two_modules(found: set[str]) -> None:
    assert sorted(found) == []


@pytest.mark.parametrize(
    ("second", "double"),
    [
        ("class Block: ...", True),
        ("from a import Block as Other\nclass Block(Other): ...", False),
        ("import a as other\nclass Block(other.Block): ...", False),
        ("def Block(): ...", True),
        ("if True:\n    class Block: ...", False),
        ("from a import Block", False),
    ],
)
def test_a_double_name_is_found(second: str, double: bool) -> None:
    assert double_names({"a": "class Block: ...", "b": second}) == ({"Block"} if double else set())


def test_docstrings_are_sentences() -> None:
    """None is a clause that only begins with a question word."""
    opening = re.compile(r'"""(What|Whether|Which|Where|Of) ')
    found = [path.name for path in PACKAGE.rglob("*.py") if opening.search(path.read_text())]
    assert found == []


def names_of(source: str) -> set[str]:
    """What a module defines and imports."""
    nodes = list(ast.walk(tree := ast.parse(source)))
    kinds = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    found = {node.name for node in nodes if isinstance(node, kinds)} | imported(tree).keys()
    return found | {node.id for node in nodes if isinstance(node, ast.Name)}


def missing_names(source: str, defined: Mapping[str, set[str]]) -> set[str]:
    """Return the names that a file takes from modules which lack them.

    Args:
        source: the file's text.
        defined: by the dotted name of each module, what it defines.
    """
    used: set[str] = set()
    everywhere: dict[str, str] = {}
    for scope in ast.parse(source).body:
        own = imported(scope)
        used |= set(own.values())
        if isinstance(scope, ast.Import | ast.ImportFrom):
            everywhere |= own
        nodes = list(ast.walk(scope))
        local = {node.arg for node in nodes if isinstance(node, ast.arg)}
        local |= {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
        known = {name: of for name, of in everywhere.items() if name not in local} | own
        for node in nodes:
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.attr[:2] != "__":
                used.add(f"{known.get(node.value.id)}.{node.attr}")
    split = ((whole, *whole.rpartition(".")[::2]) for whole in used - defined.keys())
    return {whole for whole, module, name in split if module in defined and name not in defined[module]}


def test_tests_take_only_names_that_exist() -> None:
    """Also those of tests that run on a GPU alone."""
    root = PACKAGE.parent
    files = [path for part in ("titanlite", "tests", "benchmarks") for path in (root / part).rglob("*.py")]
    text = {".".join(p.relative_to(root).with_suffix("").parts).removesuffix(".__init__"): p.read_text() for p in files}
    defined = {module: names_of(source) for module, source in text.items()}
    missing = {module: found for module, source in text.items() if (found := missing_names(source, defined))}
    assert not missing


@pytest.mark.parametrize(
    "use", ["from a import c", "from a import b as x; x.c", "def f():\n    import a.b as x\n    x.c"]
)
def test_a_missing_name_is_found(use: str) -> None:
    assert missing_names(use, {"a": {"d"}, "a.b": {"d"}}) in ({"a.c"}, {"a.b.c"})
    assert not missing_names(use, {"a": {"c"}, "a.b": {"c"}})
