"""The `titanlite` command: its subcommands, and what happens to their errors.

Each subcommand is a module of this package with `run(argv) -> exit code`; the first line of its docstring is its
help. It is imported when it is called, and its help is read without importing it, so that `--help` answers at once.
"""

import ast
import importlib
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import titanlite
from titanlite.errors import ConfigError, TitanliteError, nearest
from titanlite.exit_code import guard_streams

COMMANDS = (
    "new",
    "train",
    "validate",
    "convert",
    "plan",
    "recipes",
    "prepare",
    "data",
    "compare",
    "explain",
    "evaluate",
    "export",
    "verify-resume",
    "schema",
    "completion",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand.

    Returns:
        0 if it did what it was asked, 2 for a mistake that the user can fix, which is then on stderr, or 130 if
        interrupted.
    """
    guard_streams()
    name, *rest = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    if name in ("--help", "-h"):
        sys.stdout.write(_overview())
        return 0
    if name == "--version" and not rest:
        sys.stdout.write(f"titanlite {titanlite.__version__}, torch {_version_of_torch()}\n")
        return 0
    try:
        if name not in COMMANDS:
            near = nearest(name, COMMANDS)
            fix = f"did you mean titanlite {near}?" if near else "see titanlite --help"
            raise ConfigError.of("command line", name, "", f"one of {', '.join(COMMANDS)}", fix)
        return importlib.import_module(f"{__name__}.{module_of(name)}").run(rest)
    except TitanliteError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def module_of(name: str) -> str:
    """Return the module of this package that a command is."""
    return name.replace("-", "_")


def _version_of_torch() -> str:
    """Return the installed version, without importing torch."""
    from importlib import metadata

    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        return "is not installed"


def _overview() -> str:
    lines = ["usage: titanlite [--version] COMMAND [--help] ...", ""]
    for name in COMMANDS:
        source = Path(__file__).with_name(f"{module_of(name)}.py").read_text(encoding="utf-8")
        help_text = (ast.get_docstring(ast.parse(source)) or "").partition("\n")[0]
        lines.append(f"  {name:14}{help_text}")
    return "\n".join(lines) + "\n"
