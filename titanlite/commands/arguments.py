"""Parse the arguments of a command (words, the command's own flags, config keys as flags), and write its help page.

Most commands take a config file, as the first argument or after `--config` as in train.py. Flags that a command does
not define are left to `config/command_line.py`. tyro does not parse the command's own flags: it reports a mistake as a
printed box and exits, so that no message with a fix could be made.
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
TARGET = {
    "TARGET": "a run's folder, one of its checkpoints (step-...), a folder with config.json and safetensors, or "
    "hf:OWNER/MODEL[@REVISION]"
}
"""The word of a command that takes a trained model."""
ONE_TARGET = "one folder: of a run, a checkpoint, or a model in Hugging Face's layout; or hf:OWNER/MODEL"
OF_TARGET = {
    "--step N": "step of the run's checkpoint, or best, by its validation loss; default: the newest",
    "--ema": "use the average of weights that optimizer.ema_decay has kept",
    "--tokenizer FILE": "the model's tokenizer.json, or hf:OWNER/MODEL, if the run or the folder does not have it",
}
"""The flags of a command that takes a trained model."""
Number = TypeVar("Number", int, float)


def number_of(
    given: Mapping[str, str], flag: str, kind: type[Number], want: str, fix: str, above: float = 0, below: float = 10**6
) -> Number | None:
    """Return the number that `flag` has in `given`, or None if the flag is absent.

    Refuses a text that is no number of `kind`, or a number that is not between `above` and `below` (both excluded). The
    error shows `want` and `fix`.
    """
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
        flags: the arguments for train.py's parser: `--config`, the file, and the config keys as flags.
        own: values of the command's own flags by name; "" for a flag that takes no value.
        world: the value of `--world`; None if it is absent.
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
    """The description of a command. Its help page, usage, parser and shell completion are made from it.

    Attributes:
        about: the description of the command on its help page.
        rows: help text by flag, as "--world N" if the flag takes a value; of a command without a config, also by word.
        takes: the words in the usage, before the flags.
    """

    name: str
    about: str
    rows: Mapping[str, str]
    takes: str = TAKES_CONFIG

    def read(self, argv: Sequence[str]) -> ParsedArgs:
        """Parse the command line of a command that takes a config.

        Raises:
            ConfigError: there is not exactly one config file, a flag of the command is misspelt or lacks its value, or
                `--world` is no number.
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
            fix += " --world 2" * ("--world" in self._usage)  # a plan of a single process may be empty
            if len(files) > 1:
                fix += f"; in a file, extends = {show(files)} merges several"
            want = "one config, as the first argument or behind --config"
            raise ConfigError.of("command line", "FILE", " ".join(files), want, fix)
        own = {name: values[-1] for name, values in given.items()}
        world = number_of(own, "--world", int, "a number of processes, at least 1", "--world 8", below=10**9)
        return ParsedArgs(["--config", files[0], *rest], own, world)

    def read_words(self, argv: Sequence[str]) -> tuple[list[str], dict[str, str]]:
        """Parse the command line of a command that takes no config.

        Returns:
            The words that belong to no flag, and the values by flag. Of a repeated flag the last value counts.

        Raises:
            ConfigError: a flag lacks its value, or the command has no flag of this name.
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
        """Parse a command line of one word and flags. An error shows `want`, and `example` as a possible word."""
        words, given = self.read_words(argv)
        if len(words) != 1:
            fix = f"titanlite {self.name} {example}"
            raise ConfigError.of("command line", self.takes, " ".join(words), want, fix)
        return words[0], given

    @property
    def help(self) -> str:
        """Return the help page: usage, description and flags, without the sections of the config."""
        file = (
            {"FILE": "a config, as configs/debug.toml; --config FILE is the same"} if self.takes == TAKES_CONFIG else {}
        )
        rows = {**file, **self.rows}
        width = max(map(len, rows), default=0)
        table = "\n".join(
            textwrap.fill(text, 120, initial_indent=f"  {flag:{width}}  ", subsequent_indent=" " * (width + 4))
            for flag, text in rows.items()
        )
        return f"{self.usage(120)}\n\n{self.about.strip()}\n\n{table}".rstrip()

    @property
    def _own(self) -> dict[str, str]:
        """Return a mapping from each flag of this command to its usage, as "--world" to "--world N"."""
        file = ["--config FILE"] * (self.takes == TAKES_CONFIG)
        return {row.partition(" ")[0]: row for row in (*file, *self.rows) if row.startswith("-")}

    @property
    def _usage(self) -> str:
        return " ".join(self._usage_parts)

    @property
    def _usage_parts(self) -> list[str]:
        own = [f"[{row}]" for name, row in self._own.items() if name != "--config"]
        return [f"titanlite {self.name}", *filter(None, (self.takes,)), *own]

    def usage(self, width: int) -> str:
        """Return the usage that follows "usage: ", folded between flags into lines of at most `width` columns."""
        space, indent = "\N{NO-BREAK SPACE}", " " * len("usage: ")
        text = " ".join(part.replace(" ", space) for part in self._usage_parts)
        lines = textwrap.wrap(text, width - len(indent), break_on_hyphens=False, break_long_words=False)
        return f"\n{indent}".join(lines).replace(space, " ")

    @property
    def _want(self) -> str:
        return f"a flag of this command: {', '.join(self._own)}" if self._own else "no flags"

    def _take(self, argv: Sequence[str]) -> tuple[list[str], dict[str, list[str]]]:
        """Split `argv`: return the arguments that are no flags of this command, and the values of its flags by name.

        A flag is `--name VALUE`, `--name=VALUE` or `--name`. Refuses a missing value, and a misspelt flag, as `--wrld`.
        """
        flags, rest, given, left = self._own, list[str](), dict[str, list[str]](), list(argv)
        while left:
            word = left.pop(0)
            name, has_value, value = word.partition("=")
            takes_value = " " in flags.get(name, "")
            if name not in flags or (has_value and not takes_value):
                # A name with a dot is a key of the config: compare it only with flags that have a dot.
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
