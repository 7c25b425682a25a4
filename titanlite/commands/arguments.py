"""The arguments of a command: its words, its own flags, and keys of the config as flags; and its help page.

Most commands take a config, which stands first or behind `--config` as with train.py. What is no flag of their own is
left to `config/command_line.py`, which has the last word on it. Others take no config, and so no other flags.
"""

import sys
import textwrap
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from titanlite.config.build import show
from titanlite.config.command_line import answer_help
from titanlite.errors import ConfigError, Problem, describe, nearest

_CONFIG = "FILE [--section.key VALUE ...]"


@dataclass(frozen=True)
class Given:
    """Hold what a command line says.

    Attributes:
        flags: as train.py takes them; `--config` and the file come first.
        own: values of the command's own flags; "" of one that takes none.
        world: number of processes, if `--world` is given.
    """

    flags: list[str]
    own: Mapping[str, str]
    world: int | None

    @property
    def file(self) -> str:
        """Path of the config."""
        return self.flags[1]


@dataclass(frozen=True)
class Command:
    """A command, as its help page explains it.

    Attributes:
        name: behind `titanlite`.
        about: what it does.
        rows: its own flags, each with its value if it takes one, as "--world N", and what they are for; and its words,
            if it takes no config.
        takes: its words in its usage.
    """

    name: str
    about: str
    rows: Mapping[str, str]
    takes: str = _CONFIG

    def read(self, argv: Sequence[str]) -> Given:
        """Read a command line with a config.

        Args:
            argv: arguments behind the name.

        Raises:
            ConfigError: there is not one file, or an own flag is misspelt, or has no value or not one that it can have.
            SystemExit: with 0, after `--help`.
        """
        answer_help(argv, self.help)
        rest, given = _take(argv, ["--config FILE", *self._own])
        behind, first = given.pop("--config", []), list[str]()
        while rest and not rest[0].startswith("-") and (rest[0].endswith(".toml") or not behind + first):
            first.append(rest.pop(0))
        files = first + behind
        if len(files) != 1 or not files[0]:
            want = "one config, as the first argument or behind --config"
            misplaced = [word for word in rest if word.endswith(".toml") and not word.startswith("-")]
            meant = files[0] if len(files) > 1 else next(iter(misplaced), "configs/debug.toml")
            fix = f"titanlite {self.name} {meant}"
            if "--world" in self._usage:  # without it there may be nothing to plan
                fix += " --world 2"
            if len(files) > 1:
                fix += f"; in a file, extends = {show(files)} merges several"
            raise _error("FILE", " ".join(files), want, fix)
        own = {name: values[-1] for name, values in given.items()}
        world = own.get("--world", "1")
        if not world.isdecimal() or len(world) > 9 or int(world) < 1:
            raise _error("--world", world, "a number of processes, at least 1", "--world 8")
        return Given(["--config", files[0], *rest], own, int(world) if "--world" in own else None)

    def read_words(self, argv: Sequence[str]) -> tuple[list[str], dict[str, str]]:
        """Read a command line without a config.

        Args:
            argv: arguments behind the name.

        Returns:
            The words that are of no flag, and the values by flag; of equal ones, the last counts.

        Raises:
            ConfigError: a flag has no value, or there is none of its name.
            SystemExit: with 0, after `--help`.
        """
        if {"-h", "--help"} & set(argv):
            sys.stdout.write(f"usage: {self.help}\n")
            raise SystemExit(0)
        words, given = _take(argv, self._own)
        unknown = [word.partition("=") for word in words if word.startswith("-")]
        if unknown:
            problems = [Problem(name, saw, _want(self._own), self._usage) for name, _, saw in unknown]
            raise ConfigError(describe("command line", problems))
        return words, {name: values[-1] for name, values in given.items()}

    @property
    def help(self) -> str:
        """Return what the help page says before the sections of the config, if the command takes one."""
        file = {"FILE": "a config, as configs/debug.toml; --config FILE is the same"} if self.takes == _CONFIG else {}
        return f"{self._usage}\n\n{self.about.strip()}\n\n{_table({**file, **self.rows})}"

    @property
    def _own(self) -> list[str]:
        return [row for row in self.rows if row.startswith("-")]

    @property
    def _usage(self) -> str:
        return " ".join(["titanlite", self.name, self.takes, *(f"[{flag}]" for flag in self._own)])


def apart(argv: Sequence[str], flag: str) -> list[str]:
    """Return the arguments with `--flag=VALUE` as two words, for what comes behind a flag to be more than its value."""
    return [word for a in argv for word in (a.split("=", 1) if a.startswith(f"{flag}=") else [a])]


def _table(rows: Mapping[str, str]) -> str:
    """Format words and flags, and what they are for."""
    width = max(map(len, rows))
    return "\n".join(
        textwrap.fill(text, 120, initial_indent=f"  {flag:{width}}  ", subsequent_indent=" " * (width + 4))
        for flag, text in rows.items()
    )


def _take(argv: Sequence[str], own: Collection[str]) -> tuple[list[str], dict[str, list[str]]]:
    """Split a command's own flags off: `--name VALUE`, `--name=VALUE`, or `--name` of one that takes no value.

    Returns:
        All other arguments, and the values by name.

    Raises:
        ConfigError: a flag has no value, or is all but one of them, as `--wrld`.
    """
    flags = {flag.partition(" ")[0]: flag for flag in own}
    rest, given = list[str](), dict[str, list[str]]()
    left = list(argv)
    while left:
        word = left.pop(0)
        name, has_value, value = word.partition("=")
        takes_value = " " in flags.get(name, "")
        if name not in flags or (has_value and not takes_value):
            # Keys of a config have a dot.
            near = nearest(name.lstrip("-"), [flag.lstrip("-") for flag in flags if ("." in flag) == ("." in name)])
            if word.startswith("-") and near:
                raise _error(name, value, _want(own), f"did you mean --{near}?")
            rest.append(word)
            continue
        if takes_value and not has_value:
            value = left.pop(0) if left else ""
        if takes_value and (not value or value.partition("=")[0] in flags):
            raise _error(name, "", "a value", flags[name])
        given.setdefault(name, []).append(value)
    return rest, given


def _want(own: Collection[str]) -> str:
    return f"a flag of this command: {', '.join(flag.partition(' ')[0] for flag in own)}"


def _error(where: str, saw: str, want: str, fix: str) -> ConfigError:
    return ConfigError.of("command line", where, saw, want, fix)
