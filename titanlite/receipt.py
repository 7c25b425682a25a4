"""receipt.json: the requests of a config, and how each was applied.

Each feature adds one entry. `count` is the number of places where it was applied. `skipped` lists cases left out for a
declared reason, such as a recipe or a filter. `missed` lists eligible cases that were left out. The file has both
lists, with reasons, under "skipped". A request that was applied nowhere, or missed a case, ends the run under
`job.strict` and is a warning otherwise.

All ranks have the same entries, so that they stop together; rank 0 writes the file.
"""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from operator import attrgetter
from pathlib import Path

from titanlite.config.schema import Config, schema_keys
from titanlite.durable import write_durably
from titanlite.errors import Problem, StrictError, describe
from titanlite.redact import redact_tree

_SHOWN, _NAMED = 8, 3  # cases listed in a message, and in a console line
_BLOCK = re.compile(r"^layers\.\d+(?=(\.\w+)+$)")
_NOT_REQUESTED = (None, False, 0, "", "none", "off", "disabled")


@dataclass(frozen=True)
class Skipped:
    """A case in which a feature was not applied, and the reason."""

    what: str  # module, matmul, collective, …
    why: str
    is_told: bool = field(default=False, compare=False)  # whether the console has shown it, in other words


@dataclass(frozen=True)
class Entry:
    """A feature's entry in the receipt: what was requested, and what was applied."""

    feature: str  # its name in receipt.json, e.g. "float8"
    requested: object  # value of the config key; a value of `_NOT_REQUESTED` is no request
    applied: object  # number, name, or JSON object, e.g. {"layers": 224, "lowering": "torchao"}
    _: KW_ONLY
    count: int  # number of places where the feature was applied
    skipped: Sequence[Skipped] = ()  # cases left out for a declared reason
    missed: Sequence[Skipped] = ()  # eligible cases that were left out
    key: str = ""  # config key, e.g. "float8.recipe"; "" if `feature` is the key
    default: object = None  # `requested` of a config that sets nothing; None: the default of the config key

    def summary(self, is_brief: bool = False) -> str:
        """Return one line: what was applied, what was not, and why. `is_brief`: without zeros, files as a number."""
        text = str(self.applied)
        if isinstance(self.applied, dict):
            totals = {name: value for name, value in self.applied.items() if not isinstance(value, dict)}
            if is_brief:
                some = {name: value for name, value in totals.items() if value not in _NOT_REQUESTED}
                totals = {name: f"{v:,}" if type(v) is int else v for name, v in (some or totals).items()}
            text = ", ".join(f"{name} {value}" for name, value in totals.items())
        return f"{self.feature}: {text}{self._left_out(is_brief)}"

    @property
    def is_news(self) -> bool:
        """Return whether something was requested that is not the default, or left out."""
        key = self.key or self.feature
        default = attrgetter(key)(Config()) if self.default is None and key in schema_keys() else self.default
        return bool(self._left_out()) or self.requested not in (*_NOT_REQUESTED, default)

    def _left_out(self, is_brief: bool = False) -> str:
        by_why: dict[str, dict[str, None]] = {}  # reason → cases, with "*" for numbers of blocks
        for case in (case for case in (*self.skipped, *self.missed) if not case.is_told):
            by_why.setdefault(case.why, {})[_BLOCK.sub("layers.*", case.what)] = None
        text = [f"{_few([*names], is_brief)} ({why})" for why, names in by_why.items()]
        return f"; except {_few(text)}" if text else ""


class Receipt:
    """Collects entries of features, writes them to a file, and checks that requests were applied."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self._later: list[Callable[[], Entry]] = []
        self._file: Path | None = None  # path of the file once it is written

    def add(self, entry: Entry) -> None:
        """Add an entry."""
        self.entries.append(entry)

    def add_later(self, entry: Callable[[], Entry]) -> None:
        """Register a function that makes an entry; `complete` calls it after the first step."""
        self._later.append(entry)

    def complete(self) -> None:
        """Make the entries that were registered with `add_later`, and append them."""
        self.entries += [entry() for entry in self._later]
        self._later.clear()

    def replace(self, entry: Entry) -> None:
        """Replace the entry of the same feature, and rewrite the file if it exists."""
        self.entries = [entry if there.feature == entry.feature else there for there in self.entries]
        if self._file is not None:
            self.write(self._file)

    def write(self, path: Path) -> None:
        """Write all entries to a file, which `replace` rewrites."""
        self._file = path
        rows = [
            {
                "feature": entry.feature,
                "requested": entry.requested,
                "applied": entry.applied,
                "skipped": [{"what": case.what, "why": case.why} for case in (*entry.skipped, *entry.missed)],
            }
            for entry in self.entries
        ]
        write_durably(path, json.dumps(redact_tree(rows), indent=2) + "\n")

    def enforce(self, strict: bool, warn: Callable[[str], object]) -> None:
        """Raise StrictError, or `warn` if not `strict`, about requests that were applied nowhere or missed a case."""
        problems = [problem for entry in self.entries if (problem := _problem(entry))]
        if not problems:
            return
        message = describe("a requested feature was not fully applied", problems)
        if strict:
            raise StrictError(message)
        warn(message)


def _few(names: list[str], counts_files: bool = False) -> str:
    if counts_files and (files := [name for name in names if name.startswith("/")]):
        names = [*(name for name in names if name not in files), f"{len(files)} file{'s' * (len(files) > 1)}"]
    more = [f"{len(names) - _NAMED} more"] if len(names) > _NAMED else []
    return ", ".join(names[:_NAMED] + more)


def _problem(entry: Entry) -> Problem | None:
    """Return a problem about the config key if its request was applied nowhere or missed a case, else None."""
    if entry.requested in _NOT_REQUESTED:
        return None
    if entry.count == 0:
        want = "applied at least once; it was never applied" + _cases((*entry.missed, *entry.skipped))
    elif entry.missed:
        total = entry.count + len(entry.missed)
        want = f"applied to all {total} eligible cases; it missed {len(entry.missed)}" + _cases(entry.missed)
    else:
        return None
    key = entry.key or entry.feature
    fix = f"change {key} or what the reason names; job.strict = false trains with what was applied"
    return Problem(key, json.dumps(entry.requested), want, fix)


def _cases(cases: Sequence[Skipped]) -> str:
    """Return the first few cases as text, one per line."""
    lines = [f"\n          {case.what}: {case.why}" for case in cases[:_SHOWN]]
    if len(cases) > _SHOWN:
        lines.append(f"\n          and {len(cases) - _SHOWN} more, all in receipt.json")
    return "".join(lines)
