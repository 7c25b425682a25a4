"""Read the command line: `FILE` or `--config FILE`, and flags. A flag is a dotted TOML key, and wins over the file.

Booleans take `--x`, `--x=false` and `--x true`. Lists take several words, or one word in TOML syntax. All bad flags are
reported at once, together with the errors of the file.
"""

import os
import re
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import tomli

from titanlite.config.build import describe_type, options_of, repair
from titanlite.config.explain import overview, section_page, table_of
from titanlite.config.problems import COMMAND_LINE, Origin, Problems
from titanlite.config.read import read_what_is_right, suggest_key
from titanlite.config.schema import Config, schema_keys, sections
from titanlite.config.torchtitan import answer_to_key
from titanlite.config.torchtitan_config import TorchtitanConfig
from titanlite.errors import ConfigError, Problem, describe, nearest

_OF_TEXTS = ("validation.samples",)


def parse_what_is_right(argv: Sequence[str], usage: str) -> tuple[Config, Problems]:
    """Read the config file that the arguments `argv` name, and apply the flags.

    Returns:
        The config without wrong keys and values, and the problems with these. Values are not yet checked against each
        other.

    Raises:
        ConfigError: no file or several files are named, or the file is missing or not TOML.
        SystemExit: with 0, after printing the page of `--help`. It begins with `usage`, such as "train.py FILE".
    """
    if broken := [a for a in argv if not a.isascii() and any("\ud800" <= letter <= "\udfff" for letter in a)]:
        fix = "write it in UTF-8, and rename the file if it is the name of one"
        raise ConfigError(describe("command line", [Problem(a, "", "a word in UTF-8", fix) for a in broken]))
    answer_help(argv, usage)
    try:
        os.getcwd()  # in a deleted folder, every search for a file would fail with another message
    except OSError as error:
        saw, want = error.strerror or str(error), "one that exists"
        raise ConfigError.of("this process", "working directory", saw, want, "cd to another") from None
    flags = _flags(argv)
    files = flags.pop("config", [])
    is_named = files not in ([], [""])  # "": an unset shell variable
    unread: tuple[str, ...] = ()
    config, problems = Config(), Problems(Origin("".join(files)))
    try:
        if is_named:
            config, problems = read_what_is_right(Path(files[0]))
    except ConfigError as error:
        unread = error.args
    # A typing mistake on the command line is reported together with those in the file.
    origin = problems.origin
    problems.origin = Origin(origin.source, {**origin.places, **dict.fromkeys(flags, COMMAND_LINE)})
    config = _apply(flags, config, problems)
    if not is_named:
        problems.add("--config", "", "one TOML file", "name it: train.py configs/debug.toml", at=COMMAND_LINE)
        problems.raise_all()
    if unread:
        raise ConfigError(*unread, *problems.error(ConfigError).args)
    return config, problems


def answer_help(argv: Sequence[str], usage: str) -> None:
    """If `argv` asks for help, print the page of a section, or the list of sections, and exit with 0.

    Raises:
        ConfigError: there is no such section.
    """
    args = [word for a in argv for word in (a.split("=", 1) if a.startswith("--help=") else [a])]
    args = ["--help" if a == "-h" else a for a in args]
    if "--help" not in args:
        return
    asked = args[args.index("--help") + 1 :]
    topic = asked[0].removeprefix("--").replace("-", "_") if asked else ""
    if asked and topic not in sections() and topic not in schema_keys():
        want = f"one of {', '.join(sections())}"
        fix = suggest_key(topic) or "--help alone lists what they are for"
        raise ConfigError.of("command line", "--help", asked[0], want, fix)
    sys.stdout.write(section_page(topic.partition(".")[0]) if asked else overview(usage))
    raise SystemExit(0)


def _flags(args: Sequence[str]) -> dict[str, list[str]]:
    """Group arguments by flag. A single dash begins a negative number, not a flag. The last of repeated flags wins."""
    flags: dict[str, list[str]] = {}
    key = ""
    for arg in args:
        if arg.startswith("--") and len(arg) > 2:
            name, has_value, value = arg[2:].partition("=")
            key = name.replace("-", "_")
            if key == "config" and key in flags:
                fix = 'extends = ["a.toml", "b.toml"] in a file merges several'
                raise ConfigError.of("command line", "--config", value, "one TOML file", fix)
            flags[key] = [value] if has_value else []
        elif _is_flag_without_dashes(arg, first=not (key and flags[key])):
            fix = f"--{arg.lstrip('-')}"
            raise ConfigError.of("command line", arg, "", "flags that begin with two dashes", fix)
        elif key and not (key == "config" and flags[key]):
            flags[key].append(arg)
        elif not flags:
            key, flags["config"] = "config", [arg]
        else:
            want = "a flag, such as --training.steps 100"
            fix = "leave it out, or write the flag whose value it is"
            raise ConfigError.of("command line", arg, "", want, fix)
    return flags


def _is_flag_without_dashes(arg: str, first: bool) -> bool:
    """Return whether a word is a flag without its dashes (`training.steps=5`). `first`: a bare key may be a value."""
    name, has_value, _ = arg.lstrip("-").partition("=")
    return name.replace("-", "_") in schema_keys() and (bool(has_value) or arg.startswith("-") or not first)


def _apply(flags: dict[str, list[str]], config: Config, problems: Problems) -> Config:
    """Return `config` with the flags applied. Unknown keys and wrong values are added to `problems`."""
    for key, words in flags.items():
        hint, saw, (section, _, name) = schema_keys().get(key), " ".join(words), key.partition(".")
        if hint is None:
            want, fix = _key_that_was_meant(key, words)
        elif table_of(hint) is not None:
            want, fix = "tables in the config file, and no flag", f"write [[{key}]] there, as often as there are tables"
        else:
            try:
                value = _texts_of_flag(words) if key in _OF_TEXTS else _value_of_flag(hint, words)
                table = replace(getattr(config, section), **{name: value})
                config = replace(config, **{section: table})
                continue
            except ValueError:
                want, fix = describe_type(hint), repair(hint, saw, key, attrgetter(key)(Config()))
            fix = fix.replace(f"{name} = ", f"--{key} ", 1)
            if hint is str and len(words) > 1 and all(map(os.path.exists, words)):
                saw = f"{words[0]} and {len(words) - 1} more"
                fix = f"put the pattern in quotes, as --{key} '*.txt': the shell gives the files that match it instead"
        problems.add(f"--{key}", saw, want, fix, at=COMMAND_LINE)
    return config


def _key_that_was_meant(key: str, words: list[str]) -> tuple[str, str]:
    """Return two parts of the message about an unknown flag: the legal keys, and the key that was probably meant."""
    section, positive = key.partition(".")[0], key.removeprefix("no_").replace(".no_", ".")
    own = [k.partition(".")[2] for k in schema_keys() if k.startswith(f"{section}.")]
    want = f"one of {', '.join(own)}" if own else f"--section.key; sections are {', '.join(sections())}"
    if nearest(key, ("config",)):
        return want, "did you mean --config?"
    if positive != key and schema_keys().get(positive) is bool:
        return want, f"--{positive} false"
    if (answer_to_key(key) or "").startswith("use "):  # torchtitan's; `titanlite convert` takes no flags
        value = _value_of_flag(bool | int | float | str, words[:1] or ["true"])
        return want, re.sub(r"(\w+\.\w+) = ", r"--\1 ", TorchtitanConfig({key: value}).answer(key))
    meant = None if key in sections() else suggest_key(key)
    return want, meant or f"see --help {section if own else ''}".rstrip()


def _texts_of_flag(words: list[str]) -> tuple[str, ...]:
    """Return the texts of a flag whose values may have commas: each word is one, unless a word is a list in TOML."""
    if len(words) != 1 or not words[0].startswith("["):
        return tuple(words)
    items = tomli.loads(f"items = {words[0]}")["items"]  # a TOMLDecodeError is a ValueError
    if not all(isinstance(item, str) for item in items):
        raise ValueError(words[0])
    return tuple(items)


def _value_of_flag(hint: Any, words: list[str]) -> Any:
    """Convert the words of a flag to its type, or raise ValueError. "None" is legal if the type includes None."""
    options = options_of(hint)
    if get_origin(hint) is tuple:
        text = ",".join(words)
        if text.startswith("[") and text.endswith("]"):  # TOML syntax; the shell may have removed its quotes
            text = text[1:-1]
        return tuple(part for p in text.split(",") if (part := p.strip(" \"'")))
    (word,) = words or (["true"] if hint is bool else [])
    if word == "None" and type(None) in get_args(hint):
        return None
    for option in options:
        if option is str or (get_origin(option) is Literal and word in get_args(option)):
            return word
        if option is bool and word.lower() in ("true", "false"):
            return word.lower() == "true"
        with suppress(ValueError):
            if option is float or (option is int and int(word).bit_length() < 64):  # the limit of a file, too
                return option(word)
    raise ValueError(word)
