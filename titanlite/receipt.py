"""receipt.json: what the config asked for and what was done about it.

Each feature gives one entry when it has been applied, and says how often it was (`count`), what it left out for a
reason that is declared somewhere (a recipe, a filter, a committed tuning table: `skipped`), and what it should have
covered and did not (`missed`). In the file both are under `skipped`, with their reasons; `enforce` is where they
differ: something requested and applied nowhere, or a case that was missed, ends the run under `job.strict` and is a
warning otherwise. Whether a reason counts as declared is for the feature to say, which alone knows its rules.

Each rank has the same entries, so that all of them stop together; rank 0 writes the file.
"""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path

from titanlite.durable import write_durably
from titanlite.errors import Problem, StrictError, describe
from titanlite.redact import redact_tree

_SHOWN, _NAMED = 8, 3  # cases named in a message, and in a line of the console; the file has all
_BLOCK = re.compile(r"^layers\.\d+(?=(\.\w+)+$)")  # of a module's name alone: a file may have a number in its name, too
_NOT_REQUESTED = (None, False, 0, "", "none", "off", "disabled")


@dataclass(frozen=True)
class Skipped:
    """One case that a feature did not cover."""

    what: str  # module, matmul, collective, …
    why: str
    is_told: bool = field(default=False, compare=False)  # on the console already, in other words


@dataclass(frozen=True)
class Entry:
    """One feature's report.

    Attributes:
        feature: its name in the file, as "float8".
        requested: the value of the user's key, as in the config. None, False, 0, "", "none", "off" and "disabled" mean
            that it was not asked for.
        applied: what was done, as JSON: a number, a name, or a dict of details
            (`{"layers": 224, "lowering": "torchao"}`).
        count: in how many places it was done.
        skipped: cases left out for a declared reason.
        missed: eligible cases left out, with what stood in the way.
        key: the dotted key of the config that asked for it, as "float8.recipe"; not given: `feature` is that key.
    """

    feature: str
    requested: object
    applied: object
    _: KW_ONLY
    count: int
    skipped: Sequence[Skipped] = ()
    missed: Sequence[Skipped] = ()
    key: str = ""

    def summary(self) -> str:
        """Say in one line what was applied, and what was not and why; each layer, rule and shape is in the file."""
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
    """Collects the features' reports, writes them, and holds them against what was asked for."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self._later: list[Callable[[], Entry]] = []
        self._file: Path | None = None  # that was written

    def add(self, entry: Entry) -> None:
        """Add what a feature has done."""
        self.entries.append(entry)

    def add_later(self, entry: Callable[[], Entry]) -> None:
        """Add what a feature can say of itself when it has run: `complete` calls it."""
        self._later.append(entry)

    def complete(self) -> None:
        """Add the entries that were to come later, behind all that are there."""
        self.entries += [entry() for entry in self._later]
        self._later.clear()

    def replace(self, entry: Entry) -> None:
        """Put an entry in the place of the one of its feature, in the file too if that is written."""
        self.entries = [entry if there.feature == entry.feature else there for there in self.entries]
        if self._file is not None:
            self.write(self._file)

    def write(self, path: Path) -> None:
        """Write the file, replacing it as a whole."""
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
        """Hold what was applied against what was requested.

        Args:
            strict: `job.strict`.
            warn: called with the message, once, if something is wrong and `strict` is False.

        Raises:
            StrictError: `strict` is True, and a requested feature was applied nowhere or missed an eligible case.
        """
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
    """Return what is wrong with an entry, in the words of the user's key; None if nothing is."""
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
