"""Print a script that completes titanlite's commands, flags, keys and choices in a shell.

bash:  titanlite completion bash > ~/.local/share/bash-completion/completions/titanlite
zsh:   titanlite completion zsh > ~/.zfunc/_titanlite, where .zshrc has fpath+=~/.zfunc before compinit

The script is made once and knows the keys and recipes of this version; make it anew after an upgrade.
"""

import argparse
import importlib
import sys
from collections.abc import Sequence

from titanlite import recipes
from titanlite.commands import COMMANDS, module_of
from titanlite.commands.arguments import TAKES_CONFIG, Command
from titanlite.config.json_schema import config_json_schema
from titanlite.config.read import sections
from titanlite.errors import ConfigError
from titanlite.evaluation.tasks import HUB
from titanlite.forecast.device_specs import DEVICES
from titanlite.preflight.machine import GPU_NAMES

_SHELLS = ("bash", "zsh")
_FILES = ("FILE", "FOLDER", "RUN", "TORCHTITAN.toml", "OTHER", "TARGET", "SOURCE", "PATH", "RUN,RUN,...")
COMMAND = Command("completion", __doc__ or "", {"SHELL": " or ".join(_SHELLS)}, "SHELL")


def run(argv: list[str]) -> int:
    """Print the script."""
    words, _ = COMMAND.read_words(argv)
    if len(words) != 1 or words[0] not in _SHELLS:
        want, fix = f"one of {', '.join(_SHELLS)}", "titanlite completion bash"
        raise ConfigError.of("command line", "SHELL", " ".join(words), want, fix)
    import shtab

    script = shtab.complete(_parser(), words[0], root_prefix="titanlite")
    if words[0] == "bash":  # shtab's own does not know a folder from a file, and writes a space behind it
        script += "\ncomplete -o filenames -o bashdefault -F _shtab_titanlite titanlite\n"
    sys.stdout.write(script)
    return 0


def _parser() -> argparse.ArgumentParser:
    """Return a parser of every command as shtab reads it; nothing is parsed by it."""
    parser, values = argparse.ArgumentParser("titanlite"), _values()
    parser.add_argument("--version", action="store_true", help="print the installed versions")
    subparsers = parser.add_subparsers()
    for name in COMMANDS:
        command: Command = importlib.import_module(f"titanlite.commands.{module_of(name)}").COMMAND
        takes_config = command.takes == TAKES_CONFIG
        own = subparsers.add_parser(name, help=command.about.strip().partition("\n")[0], add_help=not takes_config)
        for row, about in command.rows.items():
            _add_row(own, row, about, values.get(row))
        if takes_config:
            _add_row(own, "FILE", "a config")
            _add_row(own, "--help [SECTION]", "explain a section of the config, or list them", [*sections()])
            _add_keys(own)
    return parser


def _values() -> dict[str, Sequence[str]]:
    """Return what can stand in the place of a word or a flag's value, by the row that a command lists it in."""
    models = recipes.names("model")
    return {
        "SHELL": _SHELLS,
        "KIND": tuple(recipes.KINDS),
        "NAME": list(dict.fromkeys(name for kind in recipes.KINDS for name in recipes.names(kind))),
        "--model NAME-FLAVOR": models,
        "--gpu NAME": GPU_NAMES,
        "--device NAME": tuple(DEVICES),
        "--dtype DTYPE": ("bfloat16", "float32"),
        "--tasks NAMES": tuple(HUB),
    }


def _add_row(parser: argparse.ArgumentParser, row: str, about: str, choices: Sequence[str] | None = None) -> None:
    """Add a word or a flag as a command lists it: "RUN", "--out FILE", "--diff [OTHER]" or "--measure"."""
    import shtab

    flag, _, value = row.partition(" ") if row.startswith("-") else (row, "", row)
    if not value:
        parser.add_argument(flag, action="store_true", help=_unformatted(about))
        return
    name = value.strip("[]")
    action = parser.add_argument(flag, help=_unformatted(about), nargs="?" if value != name else None)
    if choices:
        action.choices = choices
    elif name in _FILES:
        action.complete = shtab.FILE  # type: ignore[attr-defined]


def _add_keys(parser: argparse.ArgumentParser) -> None:
    """Add every key of the config as a flag, with its choices or the names that it is mostly given."""
    for section, table in config_json_schema()["properties"].items():
        for name, key in table.get("properties", {}).items():
            options = [key, *key.get("anyOf", [])]
            words = [str(word) for option in options for word in option.get("enum", [])]
            words += ["true", "false"] if key.get("type") == "boolean" else []
            about = _unformatted(key["description"].partition(". ")[0])
            parser.add_argument(f"--{section}.{name}", help=about, choices=words or None)


def _unformatted(text: str) -> str:
    """Return a text without what argparse would fill in."""
    return text.replace("%", "%%")
