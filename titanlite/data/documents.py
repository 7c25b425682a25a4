"""Documents: the texts of a source, read from its files.

A record that cannot be decoded is never dropped in silence: the `Tally` counts it and names the first ones, and one
more than `data.max_bad_records` ends the reading. The trade-off: a source is always read from its beginning, by one
process; what makes that cheap is that it happens once (prepare.py).
"""

import codecs
import io
import json
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

from titanlite.config.schema import Data
from titanlite.data.dataset_folder import builder_of, left_out, own_files
from titanlite.data.sources import CODECS, JSON_LINES, Source, ending, unreadable
from titanlite.data.tokenizer import is_panic
from titanlite.errors import DataError, Problem, describe, nearest
from titanlite.json_file import parse_json

_BLOCK_BYTES = 1 << 22  # of a text file that are read at once
_START_BYTES = 1 << 20  # of a .jsonl that `check_text_key` looks at
_LISTED = 10  # bad records that a message names
_STRINGS = ("string", "large_string", "string_view", "null")  # of a Parquet column; the last has bad records only
_BATCH_BYTES, _BATCH_ROWS = 1 << 26, 256  # of a Parquet file that are unpacked at once
_BATCH_NUMBERS = 1 << 20  # of texts that many rows have: each batch has a copy of all of these
_NUMBER_BYTES, _HEADER_BYTES = 8, 1 << 13  # that the number of such a text takes, and a page beside them, at most
_NO_TEXT = 200, 1 << 26  # times that no text shrinks when it is packed; and bytes from which on that is looked at
_TOO_LARGE = "larger than data.max_record_mib"
_RUNAWAY = 1000  # bad records past the limit at which reading stops, though no good one was met to stop at


class Document(NamedTuple):
    """One text, and where it is from: `file`, `file:line` or `file:row`, counted from 1."""

    place: str
    blocks: Iterable[str]  # the text in parts, none of them empty; to be read once, before the next document


@dataclass
class Tally:
    """Count what reading has met so far."""

    source: str  # its name
    key: str  # and where it was given, for messages
    limit: int  # bad records that are allowed
    n_bytes: int = 0  # of the input
    n_documents: int = 0  # that were encoded, and are good
    n_tokens: int = 0  # of these, with separators
    n_unknown: int = 0  # of these, that stand for text which the tokenizer does not know
    is_cut: bool = False  # there are more, which data.max_tokens leaves out
    n_bad: int = 0
    bad: list[str] = field(default_factory=list)  # "place: reason" of the first ones
    skipped: list[str] = field(default_factory=list)  # files left out by rule
    max_record_mib: int = Data.max_record_mib
    tell: Callable[[], object] = lambda: None  # called every few MB
    say: Callable[[str], object] = lambda line: None  # called with what the user is to know at once
    n_unpacked: int = 0  # bytes of text or records, after decompression
    is_ended: bool = False  # by a record that is too large, and one too many
    _file: Path | None = None  # that is read, until something is said of it
    _before: tuple[int, int] = 0, 0  # n_bytes and n_unpacked at its beginning
    _told: int = 0  # n_unpacked when `tell` was called

    def add_bad(self, place: str, reason: str) -> None:
        """Count a record that cannot be used."""
        self.n_bad += 1
        if len(self.bad) < _LISTED:
            self.bad.append(f"{place}: {reason}")
        if self.n_bad > self.limit + _RUNAWAY:
            self.check()

    def add_large(self, place: str) -> None:
        """Count a record that is too large; what follows is not read if it is one too many: it may have no end."""
        self.add_bad(place, self.too_large())
        self.is_ended = self.n_bad > max(0, self.limit)

    def too_large(self) -> str:
        """Return the reason why a record that is too large is bad."""
        return f"{_TOO_LARGE} = {self.max_record_mib}"

    @property
    def is_full(self) -> bool:
        """Return whether there are as many bad records as a message names."""
        return len(self.bad) == _LISTED

    def begin(self, file: Path) -> None:
        """Note the file that is read from here on."""
        self._file, self._before = file, (self.n_bytes, self.n_unpacked)

    def unpack(self, n_bytes: int) -> None:
        """Count bytes that were read, after decompression; say so if they come of too few."""
        self.n_unpacked += n_bytes
        if self.n_unpacked - self._told < _BLOCK_BYTES:
            return
        self._told = self.n_unpacked
        self.tell()
        packed, unpacked = (now - then for now, then in zip((self.n_bytes, self.n_unpacked), self._before, strict=True))
        times, least = _NO_TEXT
        if self._file and unpacked > max(least, times * packed):
            what = f"{packed / 1e6:.2f} MB are {unpacked / 1e6:,.0f} MB unpacked so far, as no real text is"
            self.say(f"{self._file}: {what}; if it is not what you meant, interrupt this or set data.max_tokens")
            self._file = None

    def take_back(self, first: int, end: int) -> bool:
        """Forget the bad records with numbers from `first` up to `end`. Returns whether there were any."""
        del self.bad[first:end]
        self.n_bad -= end - first
        return end > first

    def check(self) -> None:
        """Raise if there are too many bad records. Called between batches, so that a message names several at once.

        Raises:
            DataError: more than `limit` records are bad.
        """
        limit = max(0, self.limit)  # less is out of range, and reported
        if self.n_bad <= limit:
            return
        more = [f"and {self.n_bad - len(self.bad)} more"] * (self.n_bad > len(self.bad))
        count = f"{self.n_bad} bad record{'s' * (self.n_bad > 1)} so far:"
        seen = "\n      ".join([f"{self.source!r}: {count}", *self.bad, *more])
        want = f"at most data.max_bad_records = {limit}"
        large = [line for line in self.bad if _TOO_LARGE in line]
        fix = (
            "raise data.max_record_mib, if there is memory for it, or cut the text into .jsonl records" if large else ""
        )
        if len(large) < len(self.bad):
            fix += "; and " if large else ""
            fix += "correct these records, or raise data.max_bad_records, so that as many are skipped"
        raise DataError(describe("data", [Problem(self.key, seen, want, fix)]))


def documents(source: Source, text_key: str, tally: Tally) -> Iterator[Document]:
    """Read the documents of a source, in order; empty ones are left out.

    Args:
        source: of kind "python", "text" or "dataset".
        text_key: the field of a record that holds its text.
        tally: counts bytes, bad records and skipped files as they are met. The caller calls its `check`.

    Raises:
        DataError: a file cannot be read, or a record's field is in none of a file's columns.
    """
    if source.dataset:
        yield from _dataset_documents(source, text_key, tally)
        return
    for file in source.files:
        start = tally.n_bytes
        tally.begin(file)
        try:
            if ending(file) in JSON_LINES:
                yield from _jsonl_documents(file, text_key, tally)
            elif ending(file) == ".parquet":
                yield from _parquet_documents(file, text_key, tally, source.key)
            else:
                yield from _text_document(file, tally, skip=source.kind == "python")
            if tally.is_ended:
                return
            tally.n_bytes = start + file.stat().st_size
        except OSError as e:
            raise unreadable(source.name, source.key, file, e) from e


def check_text_key(source: Source, data: Data) -> None:
    """Look for the field of the text at the beginning of a source: in a fraction of a second, whatever its size.

    Of the .parquet files the first one's columns are looked at, of the .jsonl files the first one's first mebibyte.

    Raises:
        DataError: it is not there, more often than data.max_bad_records allows, or that file cannot be read.
    """
    if source.kind != "text":
        return
    of_each_kind = ([f for f in source.files if ending(f) in kinds][:1] for kinds in ((".parquet",), JSON_LINES))
    for file in chain(*of_each_kind):
        try:
            if ending(file) in JSON_LINES:
                _check_records(file, data)
            else:
                with _parquet(file, data.text_key, source.key):
                    pass
        except OSError as e:
            raise unreadable(source.name, source.key, file, e) from e


def _check_records(file: Path, data: Data) -> None:
    without: list[dict[str, object]] = []
    with _json_lines(file) as (lines, _):
        start = lines.read(_START_BYTES)
        whole = start if not lines.read(1) else start[: start.rfind(b"\n") + 1]
    for line in whole.removeprefix(codecs.BOM_UTF8).split(b"\n"):
        try:
            record = parse_json(line)
        except ValueError:  # a bad record, or none: for those who read them all
            continue
        if isinstance(record, dict) and data.text_key in record:
            return
        without += [record] * isinstance(record, dict)
    if len(without) > max(0, data.max_bad_records):
        raise _no_field(file, data.text_key, list(without[0]))


def _no_field(file: Path, text_key: str, names: list[str]) -> DataError:
    near = nearest(text_key, names)
    fix = f"text_key = {json.dumps(near)}" if near else "name the one that holds the text"
    want = f"one of the fields of {file}: {', '.join(names) or 'none'}"
    return DataError(describe("data", [Problem("data.text_key", repr(text_key), want, fix)]))


def _text_document(file: Path, tally: Tally, skip: bool) -> Iterator[Document]:
    if error := _first_error(file):
        if skip:  # the standard library has a few on purpose: test data of the source decoder
            tally.skipped.append(f"{file}: not UTF-8")
        else:
            tally.add_bad(*error)
        return
    blocks = _blocks(file, tally)
    first = next(blocks, "")  # of nothing but a mark of the byte order, too
    if first:
        yield Document(str(file), chain([first], blocks))


def _first_error(file: Path) -> tuple[str, str] | None:
    """Place and reason of the first byte that is not UTF-8. Beforehand: a tokenizer takes a hundred times as long."""
    decoder, n_bytes, n_lines = codecs.getincrementaldecoder("utf-8")(), 0, 0
    with file.open("rb") as data:
        is_last = False
        while not is_last:
            chunk = data.read(_BLOCK_BYTES)
            is_last, n_bytes = not chunk, n_bytes + len(chunk)
            try:
                n_lines += decoder.decode(chunk, final=is_last).count("\n")
            except UnicodeDecodeError as e:  # of the chunk and the half of a character that was left before it
                line = n_lines + e.object.count(b"\n", 0, e.start) + 1
                return f"{file}:{line}", _not_utf8(e, n_bytes - len(e.object))
    return None


def _blocks(file: Path, tally: Tally) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder("utf-8-sig")("replace")  # it is UTF-8; one that changes is refused later
    with file.open("rb") as data:
        while chunk := data.read(_BLOCK_BYTES):
            tally.n_bytes += len(chunk)
            tally.unpack(len(chunk))
            yield decoder.decode(chunk)


@contextmanager
def _json_lines(file: Path) -> Iterator[tuple[BinaryIO, Callable[[], int]]]:
    """Open a file of lines, compressed or not; the second tells how many of its bytes have been read."""
    with file.open("rb") as data:
        codec = CODECS.get(file.suffix.lower())
        if codec is None:
            yield data, data.tell
            return
        import pyarrow

        stream = pyarrow.CompressedInputStream(pyarrow.PythonFile(data), codec)  # damage is an OSError
        with io.BufferedReader(cast(io.RawIOBase, stream)) as lines:
            yield lines, data.tell


def _lines(file: Path, tally: Tally) -> Iterator[bytes | None]:
    """Yield the lines of a file; None in place of one that is too large, whose rest is passed over."""
    start, most, is_rest = tally.n_bytes, tally.max_record_mib << 20, False
    with _json_lines(file) as (stream, n_read):
        while piece := stream.readline(_BLOCK_BYTES if is_rest else most + 1):
            tally.n_bytes = start + n_read()
            tally.unpack(len(piece))
            is_large = (is_rest or len(piece) > most) and not piece.endswith(b"\n")
            if not is_rest:
                yield None if is_large else piece
            is_rest = is_large


def _jsonl_documents(file: Path, text_key: str, tally: Tally) -> Iterator[Document]:
    for number, line in enumerate(_lines(file, tally), 1):
        if line is None:
            tally.add_large(f"{file}:{number}")
            if tally.is_ended:
                return
            continue
        if number == 1:
            line = line.removeprefix(codecs.BOM_UTF8)
        if not line.strip():
            continue
        try:
            record = parse_json(line.decode())
            text = record.get(text_key) if isinstance(record, dict) else None
            if isinstance(text, str):
                text.encode()  # JSON can spell half a surrogate pair, which is no text
        except UnicodeDecodeError as e:
            tally.add_bad(f"{file}:{number}", _not_utf8(e))
        except UnicodeEncodeError:
            tally.add_bad(f"{file}:{number}", f"field {text_key!r} holds half a surrogate pair")
        except ValueError as e:
            tally.add_bad(f"{file}:{number}", f"not JSON: {e}")
        else:
            yield from _record_document(f"{file}:{number}", record, text_key, tally)


def _record_document(place: str, record: Any, text_key: str, tally: Tally) -> Iterator[Document]:
    if not isinstance(record, dict):
        tally.add_bad(place, f"a {type(record).__name__}, not an object with field {text_key!r}")
    elif text_key not in record:
        tally.add_bad(place, f"no field {text_key!r} among {', '.join(map(str, record)) or 'none'} (data.text_key)")
    elif not isinstance(record[text_key], str):
        kind = "null" if record[text_key] is None else f"of type {type(record[text_key]).__name__}"
        tally.add_bad(place, f"field {text_key!r} is {kind}, not a string")
    elif _is_large(record[text_key], tally.max_record_mib << 20):
        tally.add_large(place)
    elif record[text_key]:
        yield Document(place, (record[text_key],))


def _is_large(text: str, n_bytes: int) -> bool:
    """Return whether a text has more bytes; few need to be encoded for that."""
    return len(text) > n_bytes // 4 and len(text.encode()) > n_bytes


def _parquet_documents(file: Path, text_key: str, tally: Tally, key: str) -> Iterator[Document]:
    import pyarrow

    with _parquet(file, text_key, key) as table:
        start, size, row, n_rows = tally.n_bytes, file.stat().st_size, 0, table.metadata.num_rows
        for value in _parquet_values(file, table, text_key):
            row += 1
            n_bytes = _size_of(value)
            tally.n_bytes = start + size * row // max(row, n_rows)
            tally.unpack(n_bytes)
            if n_bytes > tally.max_record_mib << 20:
                tally.add_large(f"{file}:{row}")
                if tally.is_ended:
                    return
                continue
            try:
                record = {text_key: value.as_py()}
            except UnicodeDecodeError as e:
                tally.add_bad(f"{file}:{row}", _not_utf8(e))
            else:
                yield from _record_document(f"{file}:{row}", record, text_key, tally)
        if row != n_rows:  # some damage inside a column ends it early, without an error
            raise pyarrow.ArrowInvalid(f"{row} rows, where its end says {n_rows}")


def _parquet_values(file: Path, table: Any, text_key: str) -> Iterator[Any]:
    """Yield a column's values, few at a time."""
    import pyarrow.parquet

    known = table.metadata
    with pyarrow.parquet.ParquetFile(file, metadata=known, read_dictionary=[text_key]) as by_number:
        for number in range(known.num_row_groups):
            group = known.row_group(number)
            columns = map(group.column, range(known.num_columns))  # those inside of others, too
            column = next(c for c in columns if c.path_in_schema == text_key)
            n_bytes, reader = column.total_uncompressed_size, table
            n_rows = min(_BATCH_ROWS, max(1, _BATCH_BYTES * group.num_rows // max(1, n_bytes)))
            if n_bytes <= _BATCH_BYTES and _is_numbers(column):  # all different values stay in memory, once a batch
                reader, n_rows = by_number, _BATCH_NUMBERS
            for batch in reader.iter_batches(batch_size=n_rows, row_groups=[number], columns=[text_key]):
                yield from batch.column(0)


def _is_numbers(column: Any) -> bool:
    """Return whether rows are but numbers of texts in a dictionary: a few bytes may stand for gigabytes of text."""
    if not column.has_dictionary_page:
        return False
    behind = column.total_compressed_size - (column.data_page_offset - column.dictionary_page_offset)
    return behind <= _NUMBER_BYTES * column.num_values + _HEADER_BYTES


def _size_of(value: Any) -> int:
    """Return the bytes of a text of a Parquet file, without a copy of it."""
    value = getattr(value, "value", value)  # of a dictionary's
    buffer = value.as_buffer() if hasattr(value, "as_buffer") else None
    return buffer.size if buffer else 0


@contextmanager
def _parquet(file: Path, text_key: str, key: str) -> Iterator[Any]:
    """Open a Parquet file that has the column; what is wrong with it while it is read is a mistake of the user's."""
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(file) as table:
            names = table.schema_arrow.names
            if text_key not in names:
                raise _no_field(file, text_key, names)
            kind = table.schema_arrow.field(names.index(text_key)).type
            if pyarrow.types.is_dictionary(kind):
                kind = kind.value_type
            if str(kind) not in _STRINGS:
                want = f"a column of strings; in {file} it is one of {kind}"
                fix = "name a column of strings, or write this one as strings"
                raise DataError(describe("data", [Problem("data.text_key", repr(text_key), want, fix)]))
            yield table
    except (pyarrow.ArrowException, UnicodeDecodeError) as e:
        problem = Problem(key, f"{file}: {e}", "a Parquet file", "write the file again, or leave it out of the pattern")
        raise DataError(describe("data", [problem])) from e


def _dataset_documents(source: Source, text_key: str, tally: Tally) -> Iterator[Document]:
    assert source.dataset  # noqa: S101  # by `resolve`
    path, config, split = source.dataset
    try:
        if os.path.isdir(path):
            tally.skipped += left_out(source)
        builder = builder_of(source)
        if source.files and (files := own_files(builder, split)):
            yield from documents(replace(source, kind="text", files=files, dataset=None), text_key, tally)
            return
        number = 0
        for number, row in enumerate(builder.as_streaming_dataset(split=split), 1):
            for document in _record_document(f"{source.name}:{number}", row, text_key, tally):
                n_bytes = sum(len(text.encode()) for text in document.blocks)
                tally.n_bytes += n_bytes
                tally.unpack(n_bytes)
                yield document
            if tally.is_ended:
                return
        stated = (builder.info.splits or {}).get(split)
        if stated is not None and number < (stated.num_examples or 0):
            missing = stated.num_examples - number
            tally.skipped.append(f"{missing:,} of the {stated.num_examples:,} rows that the dataset is said to have")
    except DataError:
        raise
    except BaseException as e:  # the library raises its own, its back ends' and the network's
        if not isinstance(e, Exception) and not is_panic(e):
            raise
        fix = "correct the name, config or split; without a network give a folder, as hf:/data/name, or files"
        if source.files:
            fix = "correct config, split or file; or name the files without hf:, where data.max_bad_records skips some"
        problem = Problem(
            source.key,
            f"{source.name!r}: {type(e).__name__}: {e}",
            f"dataset {path!r}, config {config or 'default'!r}, split {split!r}, readable through `datasets`",
            fix,
        )
        raise DataError(describe("data", [problem])) from e


def _not_utf8(e: UnicodeDecodeError, before: int = 0) -> str:
    return f"not UTF-8: byte 0x{e.object[e.start]:02x} at byte {before + e.start}"
