"""Convert a config of torchtitan to a config of titanlite with the same meaning.

`torchtitan_config.py` gives the counterpart of each key. A key with a counterpart becomes a line, with a comment if its
name, default or meaning differs. A key without a counterpart becomes a comment with the reason. A key that would change
nothing is left out and counted. Comments of the original are not kept: they explain torchtitan's choices.
"""

import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any, cast

import tomli

from titanlite.config.build import from_table
from titanlite.config.problems import Origin, Problems, show
from titanlite.config.read import suggest_key
from titanlite.config.schema import Config, schema_keys, sections
from titanlite.config.toml_file import read_merged
from titanlite.config.torchtitan import ASKED_BY_DEFAULT, MODELS, answer_to_key, answer_to_value, flavor
from titanlite.config.torchtitan_config import BATCH, BOS, SETS, TorchtitanConfig, default_there, stands_for
from titanlite.errors import ConfigError

_WIDTH = 100  # characters of a line with its comment
_WARMUP = "lr_scheduler.warmup_steps"


@dataclass(frozen=True)
class _Line:
    """The value of a key in TOML syntax, and the comment on it."""

    value: str
    why: str = ""


@dataclass
class ConvertedConfig:
    """A config of torchtitan, converted to one of titanlite."""

    origin: Origin  # file and line of each key of the original
    given: Mapping[str, Any]  # values of the original by dotted key
    lines: dict[str, _Line] = field(default_factory=dict[str, _Line])  # of the result, by key of titanlite
    kept: list[str] = field(default_factory=list[str])  # keys with the same name and value
    renamed: list[str] = field(default_factory=list[str])  # torchtitan's keys whose name or value changes
    defaults: list[str] = field(default_factory=list[str])  # keys added with torchtitan's default
    off: dict[str, _Line] = field(default_factory=dict[str, _Line])  # keys of features that are off, as comments
    lost: dict[str, str] = field(default_factory=dict[str, str])  # torchtitan's key → why it has no counterpart
    idle: list[str] = field(default_factory=list[str])  # torchtitan's keys that would change nothing

    def summary(self) -> str:
        """Return a text with the number of keys for each outcome, and a list of the keys without a counterpart."""
        counts = {
            "as they were": self.kept,
            "under another name or value": self.renamed,
            "left out, which asked for nothing": self.idle,
            "added, torchtitan's defaults that differ here": self.defaults,
            "without a counterpart, now comments:": self.lost,
        }
        lines = [f"  {len(keys):3} {what}" for what, keys in counts.items() if keys]
        lost = [f"        line {self.origin.of(key).line}  {self.reason(key)}" for key in self.lost]
        return "\n".join([f"{self.origin.source}: its keys", *lines, *lost])

    def config(self) -> Config:
        """Return the result as a `Config`. Raise a ConfigError if a value has not the type of its key."""
        problems = Problems(self.origin)
        table = tomli.loads("\n".join(f"{key} = {line.value}" for key, line in self.lines.items()))
        config = from_table(Config, table, problems)
        problems.raise_all()
        return cast("Config", config)

    def to_toml(self) -> str:
        """Return the result as the text of a TOML file."""
        head = [
            f"# Made by `titanlite convert` from {Path(self.origin.source).name}, a config of torchtitan v0.2.",
            "# `was` names the key, and the value if it differs, that torchtitan has for it.",
            "# Initial weights and the order of the data are titanlite's: losses follow another curve.",
        ]
        if n := len(self.idle):
            head.append(f"# Left out: {n} key{'s' * (n > 1)} that asked for nothing.")
        parts = ["\n".join(head)]
        for section in sections():
            own = [key for key in {**schema_keys(), **self.lost} if key.startswith(f"{section}.")]
            rows = [_row_of_toml(key, self.lines[key]) for key in own if key in self.lines]
            rows += [_row_of_toml(key, self.off[key], "# ") for key in own if key in self.off]
            rows += [_comment(self.reason(key).partition(".")[2]) for key in own if key in self.lost]
            if rows:
                parts.append("\n".join([f"[{section}]", *rows]))
        if elsewhere := [key for key in self.lost if key.partition(".")[0] not in sections()]:
            rows = ["# Of sections that titanlite has not:", *(_comment(self.reason(key)) for key in elsewhere)]
            parts.append("\n".join(rows))
        return "\n\n".join(parts) + "\n"

    def reason(self, key: str) -> str:
        """Return "key = value: reason" for a key of torchtitan without a counterpart."""
        return f"{key} = {show(self.given[key])}: {self.lost[key]}"


def convert_torchtitan(path: Path, name: str, has_bos: Callable[[str], bool]) -> ConvertedConfig:
    """Convert the torchtitan config in the file `path`. The run, which has no name in torchtitan, is called `name`.

    Documents begin with a BOS token, torchtitan's default, if `has_bos` returns True for the path of the tokenizer.

    Raises:
        ConfigError: the file is missing, not TOML or not torchtitan's, or a value has not the type of its key.
    """
    table, places = read_merged(path, find=lambda name, at: Path(at.source).parent / name)
    given = dict(_leaves(table))
    there = TorchtitanConfig(given)
    origin = Origin(str(path), places)
    made, problems = ConvertedConfig(origin, given), Problems(origin)
    own = [key for key in given if key not in schema_keys() and answer_to_key(key)]
    if BATCH in given and there(BATCH) == default_there(BATCH):  # -1, which means "not given"
        own.append(BATCH)
    answered = dict[str, str]()
    for key, value in given.items():
        if key in own and there.asks_nothing(key):
            made.idle.append(key)
        elif key in own and stands_for(key) and not there.fits(key):
            problems.add(
                key, show(value), f"what torchtitan has there, as {show(default_there(key))}", there.answer(key)
            )
        elif key in own:
            answered[key] = there.answer(key)
        elif key not in schema_keys():
            meant = suggest_key(key, value)
            unknown = "neither torchtitan v0.2.2 nor titanlite has this key"
            answered[key] = f"{unknown}; {meant}" if meant else unknown
        elif answer := _other_value(there, key, value):
            answered[key] = answer
        else:
            made.kept.append(key)
            made.lines[key] = _Line(show(value), _other_meaning(there, key))
    problems.raise_all()
    if not own and not any(key in schema_keys() for key in answered):
        want = "a key or a value that only torchtitan has, as model.hf_assets_path; none is: this is no file to convert"
        raise ConfigError.of(str(path), "keys", "", want, f"titanlite validate {path}")
    for key, answer in answered.items():
        _take_answer(made, key, answer)
    if _WARMUP in made.kept and there.fits(_WARMUP) and there(_WARMUP) > (steps := there("training.steps")):
        made.lines[_WARMUP] = _Line(show(steps), f"was {show(there(_WARMUP))}, which torchtitan shortens to the run")
    for key, value in there.left_out({*given, *made.lines}).items():
        if key == BOS and not has_bos(made.config().data.tokenizer):
            continue
        here = attrgetter(key)(Config())
        made.defaults.append(key)
        made.lines[key] = _Line(value, f"torchtitan's default; {'not given' if here is None else show(here)} here")
    if "job.name" not in made.lines:
        made.lines["job.name"] = _Line(show(name), "names the run's folder, in job.dump_folder")
    _add_what_is_off(made, there)
    made.config()
    return made


def _leaves(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted key and the value of each entry that is no table."""
    for name, value in table.items():
        if isinstance(value, dict):
            yield from _leaves(cast("dict[str, Any]", value), f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _other_value(there: TorchtitanConfig, key: str, value: object) -> str | None:
    """Return what to write instead of the value of a key that titanlite has, too; None if the value means the same."""
    if key == "model.flavor" and isinstance(value, str):
        name = there("model.name")
        answer = flavor(MODELS.get(name) or name, value)
    else:
        answer = answer_to_value(key, value)
    # An answer without `key = value` means that titanlite lacks the model. Its name is kept, and refused when read.
    return answer if answer and SETS.search(_in_full(key, answer)) else None


def _other_meaning(there: TorchtitanConfig, key: str) -> str:
    """Return a comment on a key that has another meaning in torchtitan; "" if the meaning is the same."""
    match key:
        case "checkpoint.initial_load_path" if there(key) and there("checkpoint.initial_load_in_hf") is not True:
            return "in Hugging Face's layout here: torchtitan's convert_to_hf.py"
        case "validation.steps" if there(key) > 0 and there("training.global_batch_size") > 0:
            return "each of a global batch here, and of a local batch on every rank there"
        case _:
            return ""


def _in_full(key: str, answer: str) -> str:
    """If an answer begins with a bare key, add the section of `key` to it."""
    name, is_set, _ = answer.partition(" = ")
    return f"{key.rpartition('.')[0]}.{answer}" if is_set and name.isidentifier() else answer


def _take_answer(made: ConvertedConfig, key: str, answer: str) -> None:
    """Add a line for each `key = value` in an answer. If it has none, it is the reason for a missing counterpart."""
    answer = _in_full(key, answer)
    found = list(SETS.finditer(answer))
    if not found:
        made.lost[key] = answer or "not needed here"
        return
    made.renamed.append(key)
    saw, why = show(made.given[key]), answer[found[-1].end() :].strip(" ,;:")
    section = ""
    for match in found:
        target, value = match.groups()
        was = "" if target == key else key
        if value != saw or not was:
            was = f"{was} = {saw}".removeprefix(" = ")
        is_first_of_section = section != (section := target.partition(".")[0])
        parts = [f"was {was}" if is_first_of_section else "", why if match is found[-1] else ""]
        made.lines[target] = _Line(value, ": ".join(filter(None, parts)))
        if target in made.kept:
            made.kept.remove(target)


def _add_what_is_off(made: ConvertedConfig, there: TorchtitanConfig) -> None:
    """Add the keys of features that are off as comments, for a user who switches such a feature on later."""
    for key in [*made.idle]:
        if there.is_off(key) and (there(key) != default_there(key) or key in ASKED_BY_DEFAULT):
            found = {target: value for target, value in SETS.findall(there.answer(key)) if target not in made.lines}
            if found:
                made.idle.remove(key)
            for target, value in found.items():
                made.off[target] = _Line(value, f"was {key}{'' if value == (saw := show(there(key))) else f' = {saw}'}")


def _row_of_toml(key: str, line: _Line, prefix: str = "") -> str:
    """Return the line of a key with its comment: at the end of the line if there is room, otherwise above it."""
    row = f"{prefix}{key.partition('.')[2]} = {line.value}"
    if not line.why:
        return row
    beside = f"{row}  # {line.why}"
    return beside if len(beside) <= _WIDTH else f"{_comment(line.why)}\n{row}"


def _comment(text: str) -> str:
    wrap = textwrap.TextWrapper(_WIDTH, "# ", "#   ", break_long_words=False, break_on_hyphens=False)
    return wrap.fill(text)
