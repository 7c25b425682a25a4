"""Count bytes, documents and unusable records while a source is read."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from titanlite.config.schema import Data
from titanlite.errors import DataError

_REPORT_BYTES = 1 << 22  # bytes of text between two reports of progress
_LISTED = 10  # bad records that an error message lists
_TOO_LARGE = "larger than data.max_record_mib"
_KEPT = (  # fields stored in progress.json
    *("file", "start", "record", "n_bytes", "n_documents", "n_tokens", "n_text_bytes", "n_unknown"),
    *("n_bad", "bad", "skipped", "revision"),
)
_RUNAWAY = 1000  # bad records beyond the limit that end reading before the next check between batches


@dataclass
class Tally:
    """Counts of the bytes, documents and bad records of a source that were read so far."""

    source: str
    key: str  # the config key of the source
    limit: int  # data.max_bad_records
    file: int = 0  # number of the current file
    start: int = 0  # n_bytes at the beginning of the current file
    record: int = 0  # records of the current file that were read
    is_between: bool = True  # the counts end with a complete document
    n_bytes: int = 0  # bytes of the input that were read
    n_documents: int = 0  # good documents
    n_tokens: int = 0  # of good documents, with separators
    n_text_bytes: int = 0  # of good documents, in UTF-8
    n_unknown: int = 0  # tokens of good documents for text that the tokenizer does not know
    is_cut: bool = False  # data.max_tokens left documents out
    n_bad: int = 0
    bad: list[str] = field(default_factory=list)  # "place: reason" of the first bad records
    skipped: list[str] = field(default_factory=list)  # notes on files and rows that were left out but are no errors
    max_record_mib: int = Data.max_record_mib
    on_progress: Callable[[], object] = lambda: None  # called every few MB
    revision: str = ""  # revision of a dataset on the hub
    all_bytes: int = 0  # of the files of a local dataset, 0: not known
    all_rows: int = 0  # of a dataset that the `datasets` library reads; 0: not known
    is_ended: bool = False  # reading must end: a record that is too large exceeded the limit of bad records
    _passed: int = 0  # bytes since `on_progress` was called

    def kept(self) -> dict[str, Any]:
        """Return the counts from which a restart continues; only valid while `is_between` is true."""
        return {name: getattr(self, name) for name in _KEPT}

    def go_on(self, kept: dict[str, Any]) -> None:
        """Continue from `kept`, the counts that an earlier start has stored.

        Raises:
            DataError: the earlier start had more than `limit` bad records.
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
        """Count a record that is too large as bad; beyond the limit this ends reading, as the record may be endless."""
        self.add_bad(place, self.too_large())
        self.is_ended = self.n_bad > max(0, self.limit)

    def too_large(self) -> str:
        """Return the reason why a record that is too large is bad."""
        return f"{_TOO_LARGE} = {self.max_record_mib}"

    def begin(self, number: int) -> int:
        """Make file `number` the current file; return how many of its records were read by an earlier start."""
        if number != self.file:
            self.file, self.start, self.record = number, self.n_bytes, 0
        return self.record

    def read(self, n_bytes: int) -> None:
        """Count bytes of text as read, even if a restart skips them; call `on_progress` every few MB."""
        self._passed += n_bytes
        if self._passed >= _REPORT_BYTES:
            self._passed = 0
            self.on_progress()

    def take_back(self, first: int, end: int) -> bool:
        """Forget the bad records with the numbers `first` … `end - 1`; return whether there are any."""
        del self.bad[first:end]
        self.n_bad -= end - first
        return end > first

    def check(self) -> None:
        """Raise a DataError if more than `limit` records are bad; called between batches, so that it lists several."""
        limit = max(0, self.limit)  # a negative limit is refused elsewhere
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
