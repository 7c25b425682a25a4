"""receipt.json: the requests of a config, and how each was applied.

Each feature adds one entry: in how many places it was applied (`count`), cases left out for a declared reason (a
recipe, a filter, a committed tuning table: `skipped`), and eligible cases left out (`missed`). In the file both are
under `skipped`, with reasons. A request that was applied nowhere, or missed a case, ends the run under `job.strict` and
is a warning otherwise.

Each rank has the same entries, so that all stop together; rank 0 writes the file.
"""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path

from titanlite.durable import write_durably
from titanlite.errors import Problem, StrictError, describe
from titanlite.redact import redact_tree

_SHOWN, _NAMED = 8, 3  # cases in a message, and in a line of the console; the file has all
_BLOCK = re.compile(r"^layers\.\d+(?=(\.\w+)+$)")
_NOT_REQUESTED = (None, False, 0, "", "none", "off", "disabled")


@dataclass(frozen=True)
class Skipped:
    """One case that a feature did not cover."""

    what: str  # module, matmul, collective, …
    why: str
    is_told: bool = field(default=False, compare=False)  # on the console already, in other words


@dataclass(frozen=True)
class Entry:
    """One feature's report."""

    feature: str  # its name in the file, as "float8"
    requested: object  # value of the user's key; one of `_NOT_REQUESTED`: it was not asked for
    applied: object  # as JSON: a number, a name, or details, as {"layers": 224, "lowering": "torchao"}
    _: KW_ONLY
    count: int  # of places where it was applied
    skipped: Sequence[Skipped] = ()  # for a declared reason
    missed: Sequence[Skipped] = ()  # eligible cases
    key: str = ""  # of the config, as "float8.recipe"; "": it is `feature`

    def summary(self) -> str:
        """Return one line: what was applied, what was not, and why."""
        text = str(self.applied)
        if isinstance(self.applied, dict):
            totals = {name: value for name, value in self.applied.items() if not isinstance(value, dict)}
            text = ", ".join(f"{name} {value}" for name, value in totals.items())
        return f"{self.feature}: {text}{self._left_out()}"

    def _left_out(self) -> str:
        by_why: dict[str, dict[str, None]] = {}  # of layers of one name in every block, that name
        for case in (case for case in (*self.skipped, *self.missed) if not case.is_told):
            by_why.setdefault(case.why, {})[_BLOCK.sub("layers.*", case.what)] = None
        text = [f"{_few(list(names))} ({why})" for why, names in by_why.items()]
        return f"; except {_few(text)}" if text else ""


class Receipt:
    """Collects the features' entries, writes them, and enforces them."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self._later: list[Callable[[], Entry]] = []
        self._file: Path | None = None  # once it is written

    def add(self, entry: Entry) -> None:
        """Add an entry."""
        self.entries.append(entry)

    def add_later(self, entry: Callable[[], Entry]) -> None:
        """Add an entry that `complete` makes after a step."""
        self._later.append(entry)

    def complete(self) -> None:
        """Make and append the later entries."""
        self.entries += [entry() for entry in self._later]
        self._later.clear()

    def replace(self, entry: Entry) -> None:
        """Replace the entry of a feature, also in the file if it is written."""
        self.entries = [entry if there.feature == entry.feature else there for there in self.entries]
        if self._file is not None:
            self.write(self._file)

    def write(self, path: Path) -> None:
        """Write the file as a whole."""
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
        """Raise StrictError if a request was applied nowhere or missed a case; without `job.strict` warn once."""
        problems = [problem for entry in self.entries if (problem := _problem(entry))]
        if not problems:
            return
        message = describe("a requested feature was not fully applied", problems)
        if strict:
            raise StrictError(message)
        warn(message)


def _few(names: list[str]) -> str:
    more = [f"{len(names) - _NAMED} more"] if len(names) > _NAMED else []
    return ", ".join(names[:_NAMED] + more)


def _problem(entry: Entry) -> Problem | None:
    """Return the problem of an entry, in the words of the user's key, or None."""
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
    """List the first few cases, one per line."""
    lines = [f"\n          {case.what}: {case.why}" for case in cases[:_SHOWN]]
    if len(cases) > _SHOWN:
        lines.append(f"\n          and {len(cases) - _SHOWN} more, all in receipt.json")
    return "".join(lines)
