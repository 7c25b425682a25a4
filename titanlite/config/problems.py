"""Record the file and line of each value of a config, and collect all problems with the values into one error.

A config is merged from files and flags, a recipe from a file and those it extends. With the `Origin` of the keys, a
cross-check that runs long after reading still names the line to change.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

from titanlite.errors import ConfigError, Problem, describe, nearest

E = TypeVar("E", bound=ConfigError)


@dataclass(frozen=True)
class Place:
    """The file and line, or the command line, that a value came from."""

    source: str
    line: int | None = None


COMMAND_LINE = Place("command line")


@dataclass(frozen=True)
class Origin:
    """The place of every dotted key that was given. The place of any other key is `source`, without a line."""

    source: str
    places: Mapping[str, Place] = field(default_factory=dict[str, Place])

    def of(self, key: str) -> Place:
        """Return the place where `key` was given, or `source` without a line."""
        return self.places.get(key, Place(self.source))


class Problems:
    """All problems that were found in one config or recipe."""

    def __init__(self, origin: Origin) -> None:
        self.origin = origin
        self._found: list[tuple[Place, Problem]] = []

    def __len__(self) -> int:
        return len(self._found)

    def add(self, where: str, saw: str, want: str, fix: str, at: Place | None = None, against: str = "") -> None:
        """Add one problem.

        Args:
            where: dotted key with the problem.
            saw: the value as the user would write it; "" if there is none to show.
            want: description of the legal values.
            fix: the one change that makes it legal; `key = value` becomes a flag if a flag gave `where` or `against`.
            at: place of the problem; None: the place of `where`.
            against: dotted key of another value that contradicts the one at `where`.
        """
        place, line = at or self.origin.of(where), f"{where.rpartition('.')[2]} = "
        if COMMAND_LINE in (place, self.origin.of(against)) and fix.startswith(line):
            fix = f"--{where} {fix.removeprefix(line)}"
        self._found.append((place, Problem(where, saw, want, fix, place.line)))

    def about(self, table: object, where: str = "") -> Callable[..., None]:
        """Return `refuse(key, want, fix, against="")`, which adds a problem with `key` and shows its value.

        Args:
            table: a config, a recipe or a table of one; keys in it may be dotted, as "data.stage[0].seq_len".
            where: prefix of the keys in the file, as "rules[0].".
        """

        def refuse(key: str, want: str, fix: str, against: str = "") -> None:
            value: Any = table
            for part in re.findall(r"[^.\[\]]+", key):
                if isinstance(value, tuple):
                    value = cast("tuple[Any, ...]", value)[int(part)]
                else:
                    value = getattr(value, part)
            self.add(f"{where}{key}", show(value), want, fix, against=against)

        return refuse

    def is_own(self, key: str) -> bool:
        """Return whether the place of `key` is the source itself, and not a file that it extends or a flag."""
        return self.origin.of(key).source == self.origin.source

    def raise_all(self, error: type[ConfigError] = ConfigError) -> None:
        """Raise one error with every problem, if there is any."""
        if self._found:
            raise self.error(error)

    def found(self) -> list[Problem]:
        """Return every problem, in the order in which they were added."""
        return [problem for _, problem in self._found]

    def wrong_keys(self) -> set[str]:
        """Return the dotted keys that have a problem."""
        return {problem.where.removeprefix("--") for _, problem in self._found}

    def error(self, error: type[E]) -> E:
        """Return an error with every problem, ordered by source and line."""
        by_source: dict[str, list[Problem]] = {}
        for place, problem in self._found:
            by_source.setdefault(place.source, []).append(problem)
        ordered = {s: sorted(found, key=lambda p: p.line or 10**9) for s, found in by_source.items()}
        return error(*(describe(source, _choices_once(found)) for source, found in ordered.items()))


def _choices_once(problems: list[Problem]) -> list[Problem]:
    """Keep a long list of choices only in the first problem that has it."""
    seen, kept = set[str](), list[Problem]()
    for p in problems:
        again = p.want in seen and p.want.startswith("one of ")
        kept.append(p._replace(want="one of the same, above") if again else p)
        seen.add(p.want)
    return kept


def show(value: object) -> str:
    """Return a value in TOML syntax; "" for a table, and "…" for a table in a list."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, list | tuple):
        return f"[{', '.join(show(v) or '…' for v in cast('list[object]', value))}]"
    return "" if isinstance(value, dict) else str(value)


def nearest_layer(name: str, layers: Sequence[str]) -> str | None:
    """Return the linear layer probably meant by `name`: the one that fuses it, as `wqkv` fuses `wk`, or the nearest."""
    last_names = list(dict.fromkeys(layer.rpartition(".")[2] for layer in layers))
    part = name.rpartition(".")[2]
    for whole in last_names:
        if len(part) == 2 < len(whole) and part[0] == whole[0] and part[1] in whole[1:]:
            in_full = f"{name.removesuffix(part)}{whole}"
            return in_full if any(in_full in layer for layer in layers) else whole
    return nearest(name, [*last_names, *layers])
