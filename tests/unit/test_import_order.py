"""Imports run downward only, in the order of CONTRIBUTING.md."""

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "titanlite"
# From top to bottom. A module may import from its own row and from those below.
ROWS = (
    {"train", "__main__", "api"},
    {"recorder", "training", "commands"},
    {"comparison", "explain", "generation"},
    {"preflight"},
    {"forecast"},
    {"activation_checkpoint", "sharding", "async_tp", "checkpoint", "evaluation", "optimizers"},
    {"parallel"},
    {"float8", "observe"},
    {"models", "data", "update_rules"},
    {"kernels", "recipes"},
    {"config", "receipt", "exit_code", "device", "hub"},
    {"errors", "durable", "redact", "text_table", "byte_size", "json_file", "streams", "extras", "file_system"},
)
ROW = {name: number for number, names in enumerate(ROWS) for name in names}


def imports(path: Path) -> set[str]:
    """The parts of the package that a module imports, for type checking too."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("titanlite"):
            parts = (node.module or "").split(".")
            names |= {parts[1]} if len(parts) > 1 else {alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            names |= {alias.name.split(".")[1] for alias in node.names if alias.name.startswith("titanlite.")}
    return names - {"__version__"}


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_run_downward(path: Path) -> None:
    own = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    if own == "__init__":
        return
    upward = {name for name in imports(path) if ROW[name] < ROW[own]}
    assert not upward, f"{own} imports {upward}"


MODULES = {
    ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__"): path
    for path in PACKAGE.rglob("*.py")
}


def imported_modules(path: Path) -> set[str]:
    """The modules that a module imports: within functions and for type checking too."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            names |= {node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    return names & set(MODULES)


def cycle(imported: dict[str, set[str]]) -> list[str] | None:
    try:
        TopologicalSorter(imported).prepare()
    except CycleError as error:
        return error.args[1]
    return None


def test_no_module_imports_itself_by_way_of_others() -> None:
    # The package itself imports what is called from Python, when that is called.
    found = cycle({name: imported_modules(path) for name, path in MODULES.items() if name != "titanlite"})
    assert found is None, " ← ".join(found)


def test_a_cycle_is_found() -> None:
    assert cycle({"a": {"b"}, "b": {"c"}, "c": set()}) is None
    assert cycle({"a": {"b"}, "b": {"c"}, "c": {"a"}}) is not None
