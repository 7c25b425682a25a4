"""Count what reading a source has met: bytes, documents, and records that cannot be used."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from titanlite.config.schema import Data
from titanlite.errors import DataError

_REPORT_BYTES = 1 << 22  # of text, after which progress is reported
_LISTED = 10  # bad records that are named
_TOO_LARGE = "larger than data.max_record_mib"
_KEPT = (  # in progress.json
    *("file", "start", "record", "n_bytes", "n_documents", "n_tokens", "n_text_bytes", "n_unknown"),
    *("n_bad", "bad", "skipped", "revision"),
)
_RUNAWAY = 1000  # bad records past the limit that end reading, though no batch of good ones was full


@dataclass
class Tally:
    """The counts of what reading has met so far."""

    source: str
    key: str  # the config key of the source
    limit: int  # data.max_bad_records
    file: int = 0  # number of the file that is read
    start: int = 0  # n_bytes at its beginning
    record: int = 0  # records of it that were read
    is_between: bool = True  # these counts end with a document
    n_bytes: int = 0  # of the input
    n_documents: int = 0  # good ones
    n_tokens: int = 0  # of these, with separators
    n_text_bytes: int = 0  # of these, in UTF-8
    n_unknown: int = 0  # tokens of these for text that the tokenizer does not know
    is_cut: bool = False  # data.max_tokens leaves documents out
    n_bad: int = 0
    bad: list[str] = field(default_factory=list)  # "place: reason" of the first ones
    skipped: list[str] = field(default_factory=list)  # files left out by rule
    max_record_mib: int = Data.max_record_mib
    on_progress: Callable[[], object] = lambda: None  # called every few MB
    revision: str = ""  # of a dataset on the hub
    is_ended: bool = False  # reading ends at a record that is too large, one bad record too many
    _passed: int = 0  # bytes since `on_progress` was called

    def kept(self) -> dict[str, Any]:
        """Return what a restart goes on from; only where `is_between`."""
        return {name: getattr(self, name) for name in _KEPT}

    def go_on(self, kept: dict[str, Any]) -> None:
        """Go on from where another tally was.

        Raises:
            DataError: more than `limit` records were bad by then.
        """
        for name in _KEPT:
            setattr(self, name, kept[name])
        self.check()

    def add_bad(self, place: str, reason: str) -> None:
        """Count a record that cannot be used."""
        self.n_bad += 1
        if len(self.bad) < _LISTED:
            self.bad.append(f"{place}: {reason}")
        if self.n_bad > self.limit + _RUNAWAY:
            self.check()

    def add_large(self, place: str) -> None:
        """Count a record that is too large, which ends the reading if it is one too many: it may have no end."""
        self.add_bad(place, self.too_large())
        self.is_ended = self.n_bad > max(0, self.limit)

    def too_large(self) -> str:
        """Return the reason why a record that is too large is bad."""
        return f"{_TOO_LARGE} = {self.max_record_mib}"

    def begin(self, number: int) -> int:
        """Note the file that is read from here on; return how many of its records a restart passes over."""
        if number != self.file:
            self.file, self.start, self.record = number, self.n_bytes, 0
        return self.record

    def read(self, n_bytes: int) -> None:
        """Call `on_progress` every few MB of text, also of text that a restart reads again."""
        self._passed += n_bytes
        if self._passed >= _REPORT_BYTES:
            self._passed = 0
            self.on_progress()

    def take_back(self, first: int, end: int) -> bool:
        """Forget the bad records from `first` up to `end`; return whether there were any."""
        del self.bad[first:end]
        self.n_bad -= end - first
        return end > first

    def check(self) -> None:
        """Raise a DataError if more than `limit` records are bad: called between batches, to name several at once."""
        limit = max(0, self.limit)  # less is out of range, and reported
        if self.n_bad <= limit:
            return
        more = [f"and {self.n_bad - len(self.bad)} more"] * (self.n_bad > len(self.bad))
        count = f"{self.n_bad} bad record{'s' * (self.n_bad > 1)} so far:"
        seen = "\n      ".join([f"{self.source!r}: {count}", *self.bad, *more])
        want = f"at most data.max_bad_records = {limit}"
        large = [line for line in self.bad if _TOO_LARGE in line]
        fixes: list[str] = []
        if large:
            fixes.append("raise data.max_record_mib, if there is memory for it, or cut the text into .jsonl records")
        if len(large) < len(self.bad):
            fixes.append("correct these records, or raise data.max_bad_records, so that as many are skipped")
        raise DataError.of("data", self.key, seen, want, "; and ".join(fixes))
