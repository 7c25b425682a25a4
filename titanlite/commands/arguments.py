"""The arguments of a command: its words, its own flags, and keys of the config as flags; and its help page.

Most commands take a config, which stands first or behind `--config` as with train.py; what is no flag of their own is
left to `config/command_line.py`. tyro would read own flags as fast, but reports a mistake as a printed box and an exit,
from which no message with its fix can be made.
"""

import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from titanlite.config.build import show
from titanlite.config.command_line import answer_help
from titanlite.errors import ConfigError, Problem, describe, nearest

TAKES_CONFIG = "FILE [--section.key VALUE ...]"
Number = TypeVar("Number", int, float)


def number_of(
    given: Mapping[str, str], flag: str, kind: type[Number], want: str, fix: str, above: float = 0, below: float = 10**6
) -> Number | None:
    """Read the number of a flag, None where it is not given; refuse one of another kind, or not between the bounds."""
    if flag not in given:
        return None
    try:
        number = kind(given[flag])
    except ValueError:
        number = None
    if number is None or not above < number < below or (kind is int and not given[flag].isdecimal()):
        raise ConfigError.of("command line", flag, given[flag], want, fix)
    return number


@dataclass(frozen=True)
class ParsedArgs:
    """A command line with a config.

    Attributes:
        flags: as train.py takes them; `--config` and the file come first.
        own: values of the command's own flags; "" of a flag without one.
        world: `--world`, if it is given.
    """

    flags: list[str]
    own: Mapping[str, str]
    world: int | None

    @property
    def file(self) -> str:
        """Return the path of the config."""
        return self.flags[1]


@dataclass(frozen=True)
class Command:
    """A command: what its help page, its usage, its parsing and a shell's completion are made of.

    Attributes:
        about: what it does.
        rows: help by own flag, with its value if it takes one, as "--world N"; and by word, if it takes no config.
        takes: its words in its usage.
    """

    name: str
    about: str
    rows: Mapping[str, str]
    takes: str = TAKES_CONFIG

    def read(self, argv: Sequence[str]) -> ParsedArgs:
        """Read a command line with a config.

        Raises:
            ConfigError: there is not one file, an own flag is misspelt or lacks its value, or `--world` is no number.
            SystemExit: with 0, after `--help`.
        """
        answer_help(argv, self.help)
        rest, given = self._take(argv)
        behind, first = given.pop("--config", []), list[str]()
        while rest and not rest[0].startswith("-") and (rest[0].endswith(".toml") or not behind + first):
            first.append(rest.pop(0))
        files = first + behind
        if len(files) != 1 or not files[0]:
            misplaced = [word for word in rest if word.endswith(".toml") and not word.startswith("-")]
            meant = [*(files if len(files) > 1 else []), *misplaced, "configs/debug.toml"]
            fix = f"titanlite {self.name} {meant[0]}"
            fix += " --world 2" * ("--world" in self._usage)  # without it there may be nothing to plan
            if len(files) > 1:
                fix += f"; in a file, extends = {show(files)} merges several"
            want = "one config, as the first argument or behind --config"
            raise ConfigError.of("command line", "FILE", " ".join(files), want, fix)
        own = {name: values[-1] for name, values in given.items()}
        world = number_of(own, "--world", int, "a number of processes, at least 1", "--world 8", below=10**9)
        return ParsedArgs(["--config", files[0], *rest], own, world)

    def read_words(self, argv: Sequence[str]) -> tuple[list[str], dict[str, str]]:
        """Read a command line without a config.

        Returns:
            The words that are of no flag, and the values by flag; the last one of a flag counts.

        Raises:
            ConfigError: a flag has no value, or there is none of its name.
            SystemExit: with 0, after `--help`.
        """
        if {"-h", "--help"} & set(argv):
            sys.stdout.write(f"usage: {self.help}\n")
            raise SystemExit(0)
        words, given = self._take(argv)
        unknown = [word.partition("=") for word in words if word.startswith("-")]
        if unknown:
            problems = [Problem(name, saw, self._want, self._usage) for name, _, saw in unknown]
            raise ConfigError(describe("command line", problems))
        return words, {name: values[-1] for name, values in given.items()}

    def read_word(self, argv: Sequence[str], want: str, example: str) -> tuple[str, dict[str, str]]:
        """Read a command line with one word, as `read_words` does; `example` is one that could be meant."""
        words, given = self.read_words(argv)
        if len(words) != 1:
            fix = f"titanlite {self.name} {example}"
            raise ConfigError.of("command line", self.takes, " ".join(words), want, fix)
        return words[0], given

    @property
    def help(self) -> str:
        """Return what the help page says before the sections of the config, if the command takes one."""
        file = (
            {"FILE": "a config, as configs/debug.toml; --config FILE is the same"} if self.takes == TAKES_CONFIG else {}
        )
        rows = {**file, **self.rows}
        width = max(map(len, rows), default=0)
        table = "\n".join(
            textwrap.fill(text, 120, initial_indent=f"  {flag:{width}}  ", subsequent_indent=" " * (width + 4))
            for flag, text in rows.items()
        )
        return f"{self._folded_usage()}\n\n{self.about.strip()}\n\n{table}".rstrip()

    @property
    def _own(self) -> dict[str, str]:
        """Return each own flag by its name, with its value if it takes one."""
        file = ["--config FILE"] * (self.takes == TAKES_CONFIG)
        return {row.partition(" ")[0]: row for row in (*file, *self.rows) if row.startswith("-")}

    @property
    def _usage(self) -> str:
        return " ".join(self._usage_parts)

    @property
    def _usage_parts(self) -> list[str]:
        own = [f"[{row}]" for name, row in self._own.items() if name != "--config"]
        return [f"titanlite {self.name}", *filter(None, (self.takes,)), *own]

    def _folded_usage(self) -> str:
        """Return the usage in lines of at most 120 columns, which end between flags, to stand behind "usage: "."""
        space, indent = "\N{NO-BREAK SPACE}", " " * len("usage: ")
        text = " ".join(part.replace(" ", space) for part in self._usage_parts)
        lines = textwrap.wrap(text, 120 - len(indent), break_on_hyphens=False, break_long_words=False)
        return f"\n{indent}".join(lines).replace(space, " ")

    @property
    def _want(self) -> str:
        return f"a flag of this command: {', '.join(self._own)}" if self._own else "no flags"

    def _take(self, argv: Sequence[str]) -> tuple[list[str], dict[str, list[str]]]:
        """Return all other arguments, and the values of own flags by name: `--name VALUE`, `--name=VALUE` or `--name`.

        Refuses a flag without its value, and a misspelt one, as `--wrld`.
        """
        flags, rest, given, left = self._own, list[str](), dict[str, list[str]](), list(argv)
        while left:
            word = left.pop(0)
            name, has_value, value = word.partition("=")
            takes_value = " " in flags.get(name, "")
            if name not in flags or (has_value and not takes_value):
                # With a dot it is a key of the config.
                near = nearest(name.lstrip("-"), [flag.lstrip("-") for flag in flags if ("." in flag) == ("." in name)])
                if word.startswith("-") and near:
                    raise ConfigError.of("command line", name, value, self._want, f"did you mean --{near}?")
                rest.append(word)
                continue
            if takes_value and not has_value:
                value = left.pop(0) if left else ""
            if takes_value and (not value or value.partition("=")[0] in flags):
                raise ConfigError.of("command line", name, "", "a value", flags[name])
            given.setdefault(name, []).append(value)
        return rest, given
