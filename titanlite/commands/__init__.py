"""The `titanlite` command: runs its subcommands, and prints their overview, the version and shell completions.

Each subcommand is a module of this package with `run(argv) -> exit code` and `COMMAND`, the description of its flags.
The first line of the module's docstring is the help of the subcommand. A module is imported only when its subcommand is
called. `titanlite --help` reads the docstrings from the source files without an import, so that it answers at once.
"""

import ast
import importlib
import io
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import field, make_dataclass
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import titanlite
from titanlite.errors import ConfigError, nearest
from titanlite.exit_code import exit_code

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
    "generate",
    "evaluate",
    "export",
    "verify-resume",
    "schema",
)


_COMPLETION = "--tyro-print-completion"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand. Return its exit code, or the code that `exit_code` gives for the error that it raised."""
    words = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    with _signals_as_interrupts():
        return exit_code(lambda: _run_command(*words))


def _run_command(name: str, *rest: str) -> int:
    try:
        if name in ("--help", "-h"):
            sys.stdout.write(_overview())
            return 0
        flag, has_value, shell = name.partition("=")
        if flag == _COMPLETION:
            _print_completion(*[shell] * bool(has_value), *rest)
            return 0
        if name == "--version" and not rest:
            torch = "is not installed"
            with suppress(metadata.PackageNotFoundError):  # raised also for a build that is not a package
                torch = metadata.version("torch")
            sys.stdout.write(f"titanlite {titanlite.__version__}, torch {torch}\n")
            return 0
        if name not in COMMANDS:
            near = nearest(name, COMMANDS)
            fix = f"did you mean titanlite {near}?" if near else "see titanlite --help"
            fix = f"titanlite {_COMPLETION} bash" if name == "completion" else fix  # no command, but a flag
            raise ConfigError.of("command line", name, "", f"one of {', '.join(COMMANDS)}", fix)
        return importlib.import_module(f"{__name__}.{module_of(name)}").run(list(rest))
    finally:
        with suppress(BrokenPipeError):  # the reader of a pipe has closed it
            sys.stdout.flush()


@contextmanager
def _signals_as_interrupts() -> Iterator[None]:
    """Turn SIGTERM and SIGHUP into KeyboardInterrupt, so that a command removes its unfinished files as on Ctrl-C.

    Only the first signal counts, since launchers send several. A rank (`RANK` is set) still ends at once, because ranks
    that clean up could wait for each other.
    """

    def interrupt(number: int, _: object) -> None:
        signal.signal(number, signal.SIG_IGN)
        raise KeyboardInterrupt(number)

    numbers = [n for n in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) == signal.SIG_DFL]
    numbers = [] if "RANK" in os.environ else numbers
    for number in numbers:
        signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)


def module_of(name: str) -> str:
    """Return the name of the module that implements a command."""
    return name.replace("-", "_")


def _print_completion(*words: str) -> None:
    """Print tyro's completion script for a shell, the only word: commands, flags, config keys and their choices."""
    shell = " ".join(words)
    if shell not in ("bash", "zsh"):
        raise ConfigError.of("command line", _COMPLETION, shell, "bash or zsh", f"titanlite {_COMPLETION} bash")
    import tyro

    from titanlite.commands.arguments import TAKES_CONFIG, Command
    from titanlite.config.schema import Config

    def flags_of(name: str) -> type:
        command: Command = importlib.import_module(f"{__name__}.{module_of(name)}").COMMAND
        fields: list[tuple[str, Any, Any]] = [("words", tyro.conf.Positional[tuple[Path, ...]], ())]
        for n, (row, about) in enumerate(command.rows.items()):
            flag, _, value = row.partition(" ")
            if flag.startswith("--"):
                arg = tyro.conf.arg(name=flag[2:], help=about)
                fields.append((f"own_{n}", Annotated[str if value else bool, arg], "" if value else False))
        if command.takes == TAKES_CONFIG:
            fields.append(("config", Annotated[Config, tyro.conf.arg(name="")], Config()))
        return make_dataclass("Flags", [(key, kind, field(default=default)) for key, kind, default in fields])

    with suppress(SystemExit), redirect_stdout(made := io.StringIO()):
        tyro.extras.subcommand_cli_from_dict(
            {name: flags_of(name) for name in COMMANDS},
            prog="titanlite",
            args=[_COMPLETION, shell],
            config=(tyro.conf.FlagConversionOff, tyro.conf.HelptextFromCommentsOff),
            use_underscores=True,
        )
    script = made.getvalue()
    if shell == "bash":  # without a match, complete file names
        script += "complete -o default -F _tyro_titanlite titanlite\n"
    else:  # tyro's last line completes, as in a file that zsh autoloads; under `eval` the function must be registered
        script = script.rstrip().removesuffix(call := '_tyro_titanlite "$@"')
        register = "compdef _tyro_titanlite titanlite"
        script += f"if [[ $funcstack[1] == _titanlite ]]; then {call}; else {register}; fi\n"
    sys.stdout.write(script)


def _overview() -> str:
    lines = [f"usage: titanlite [--version] [{_COMPLETION} SHELL] COMMAND [--help] ...", ""]
    for name in COMMANDS:
        source = Path(__file__).with_name(f"{module_of(name)}.py").read_text(encoding="utf-8")
        help_text = (ast.get_docstring(ast.parse(source)) or "").partition("\n")[0]
        lines.append(f"  {name:14}{help_text}")
    return "\n".join(lines) + "\n"
