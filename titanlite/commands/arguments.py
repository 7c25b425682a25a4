"""The arguments of a command: its own flags, which are no keys of a config, and the words around them."""

import sys
from collections.abc import Sequence

from titanlite.errors import ConfigError, Problem, describe, nearest


def file_and_world(argv: Sequence[str], example: str) -> tuple[list[str], int | None]:
    """Read a command's FILE and `--world N`, which are no keys of the config.

    Args:
        argv: FILE [--section.key VALUE ...] [--world N].
        example: a command line with a file, for the message.

    Returns:
        The arguments as train.py has them, and the number of processes or None.

    Raises:
        ConfigError: there is no file, a second one behind `--config`, or no number.
    """
    rest, given = take(argv, ("--world",), "--world 8")
    number = given.get("--world", "1")
    if not number.isdecimal() or int(number) < 1:
        problem = Problem("--world", number, "a number of processes, at least 1", "--world 8")
        raise ConfigError(describe("command line", [problem]))
    world = int(number) if given else None
    if {"-h", "--help"} & set(rest):
        return rest, world
    if others := [word for word in rest if word.partition("=")[0] == "--config"]:
        problem = Problem(others[0], "", "no --config: the config is FILE, the first argument", example)
        raise ConfigError(describe("command line", [problem]))
    if rest and rest[0] and not rest[0].startswith("-"):
        return ["--config", *rest], world
    raise ConfigError(describe("command line", [Problem("FILE", "", "a config, as the first argument", example)]))


def take(argv: Sequence[str], names: Sequence[str], fix: str) -> tuple[list[str], dict[str, str]]:
    """Split a command's own flags off: they are no keys of the config. The last of equal ones counts.

    Args:
        argv: arguments.
        names: of the flags, each of which has a value: `--name VALUE` or `--name=VALUE`.
        fix: what to write instead of a flag without one.

    Returns:
        All other arguments, and the values by name.

    Raises:
        ConfigError: a flag has no value, or is all but one of them, as `--wrld`.
    """
    rest, given = list[str](), dict[str, str]()
    left = list(argv)
    while left:
        name, has_value, value = left.pop(0).partition("=")
        if name not in names:
            _require_no_near(name, value, names)
            rest.append(name + has_value + value)
            continue
        if not has_value:
            value = left.pop(0) if left else ""
        if not value or value.partition("=")[0] in names:
            raise ConfigError(describe("command line", [Problem(name, "", "a value", fix)]))
        given[name] = value
    return rest, given


def _require_no_near(word: str, value: str, names: Sequence[str]) -> None:
    """Raise if a word was probably meant to be one of the flags; keys of a config have a dot."""
    near = nearest(word.lstrip("-"), [name.lstrip("-") for name in names])
    if word.startswith("-") and "." not in word and near:
        want = f"a flag of this command: {', '.join(names)}"
        raise ConfigError(describe("command line", [Problem(word, value, want, f"did you mean --{near}?")]))


def words_and_flags(argv: Sequence[str], names: Sequence[str], page: str) -> tuple[list[str], dict[str, str]]:
    """Read the arguments of a command that takes no keys of a config.

    Args:
        argv: arguments.
        names: of the command's flags.
        page: what `--help` prints; its first line is the usage.

    Returns:
        The words that are of no flag, and the values by name.

    Raises:
        ConfigError: a flag has no value, or there is none of its name.
        SystemExit: with 0, after `--help`.
    """
    if {"-h", "--help"} & set(argv):
        sys.stdout.write(page)
        raise SystemExit(0)
    usage = page.partition("\n")[0].removeprefix("usage: ")
    words, given = take(argv, names, usage)
    unknown = [word.partition("=") for word in words if word.startswith("-")]
    if unknown:
        want = f"a flag of this command: {', '.join(names)}"
        raise ConfigError(describe("command line", [Problem(name, saw, want, usage) for name, _, saw in unknown]))
    return words, given
