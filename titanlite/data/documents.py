"""Read the documents (texts) of a source.

The `Tally` counts records that cannot be used, and lists the first of them; more than `data.max_bad_records` end the
reading. One process reads the source once, from its beginning (prepare.py). A restart continues after the records that
the tally has counted: it reads the earlier records of the same file again and skips them.
"""

import codecs
import io
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from typing import Any, BinaryIO, NamedTuple, cast

from titanlite.config.schema import Data
from titanlite.data.dataset_folder import builder_of, left_out, own_files
from titanlite.data.parquet import column_values, no_such_field, open_column, text_bytes
from titanlite.data.sources import BEGINNINGS, CODECS, JSON_LINES, Source, SourceFile, ending, unreadable
from titanlite.data.tally import Tally
from titanlite.data.tokenizer import is_panic
from titanlite.errors import DataError
from titanlite.json_file import parse_json

_BLOCK_BYTES = 1 << 22  # bytes of a text file that are read at once
_OTHER_KINDS = (
    *((begin.lower(), kind) for begin, kind in BEGINNINGS),
    *((b"<!doctype html", "a page of HTML"), (b"<html", "a page of HTML"), (b"\xff\xfe", "UTF-16")),
)
_START_BYTES = 1 << 20  # bytes of a .jsonl file that `check_text_key` reads


class Document(NamedTuple):
    """One text, and the place in the source that it is from."""

    place: str  # `file`, `file:line` or `file:row`, counted from 1
    blocks: Iterable[str]  # the text in parts that are not empty; iterate once, before the next document is read


def documents(source: Source, text_key: str, tally: Tally) -> Iterator[Document]:
    """Yield the documents of a text source that are not empty, in order.

    Bytes, bad records and skipped files are counted in `tally` meanwhile; the caller must call `tally.check`.

    Raises:
        DataError: a file cannot be read, or has no column `text_key`.
    """
    if source.dataset:
        yield from _dataset_documents(source, text_key, tally)
        return
    for number, file in enumerate(source.files):
        if number < tally.file:
            continue
        passed = tally.begin(number)
        try:
            if ending(file) in JSON_LINES:
                yield from _jsonl_documents(file, text_key, tally, passed)
            elif ending(file) == ".parquet":
                yield from _parquet_documents(file, text_key, tally, source.key, passed)
            elif not passed:
                yield from _text_document(file, tally, skip=source.kind == "python")
            if tally.is_ended:
                return
            tally.n_bytes = tally.start + file.stat().st_size
        except OSError as e:
            raise unreadable(source.name, source.key, file, e) from e


def check_text_key(source: Source, data: Data) -> None:
    """Check that the first .parquet file and the first MiB of the first .jsonl file have the field `data.text_key`."""
    if source.kind != "text":
        return
    of_each_kind = ([f for f in source.files if ending(f) in kinds][:1] for kinds in ((".parquet",), JSON_LINES))
    for file in chain(*of_each_kind):
        try:
            if ending(file) in JSON_LINES:
                _check_records(file, data)
            else:
                with open_column(file, data.text_key, source.key):
                    pass
        except OSError as e:
            raise unreadable(source.name, source.key, file, e) from e


def _check_records(file: SourceFile, data: Data) -> None:
    without: list[dict[str, object]] = []
    with _json_lines(file) as (lines, _):
        start = lines.read(_START_BYTES)
        whole = start if not lines.read(1) else start[: start.rfind(b"\n") + 1]
    for line in whole.removeprefix(codecs.BOM_UTF8).split(b"\n"):
        try:
            record = parse_json(line)
        except ValueError:  # bad records are counted later, when the source is read
            continue
        if isinstance(record, dict) and data.text_key in record:
            return
        without += [record] * isinstance(record, dict)
    if len(without) > max(0, data.max_bad_records):
        raise no_such_field(file, data.text_key, list(without[0]))


def _text_document(file: SourceFile, tally: Tally, skip: bool) -> Iterator[Document]:
    if error := _first_error(file):
        if skip:  # Python's standard library has a few such files on purpose
            tally.skipped.append(f"{file}: not UTF-8")
        else:
            tally.add_bad(*error)
        return
    blocks = _blocks(file, tally)
    first = next(blocks, "")  # also empty if the file is only a byte-order mark
    if first:
        tally.record = 1
        yield Document(str(file), chain([first], blocks))


def _first_error(file: SourceFile) -> tuple[str, str] | None:
    """Return (place, reason) of the first byte of a file that is not UTF-8, or None if the whole file is UTF-8."""
    decoder, n_bytes, n_lines = codecs.getincrementaldecoder("utf-8")(), 0, 0
    with file.open("rb") as data:
        is_last = False
        while not is_last:
            chunk = data.read(_BLOCK_BYTES)
            is_last, n_bytes = not chunk, n_bytes + len(chunk)
            try:
                n_lines += decoder.decode(chunk, final=is_last).count("\n")
            except UnicodeDecodeError as e:  # `e.object` begins with bytes kept from the last chunk
                line = n_lines + e.object.count(b"\n", 0, e.start) + 1
                return f"{file}:{line}", _not_utf8(e, before := n_bytes - len(e.object)) + _kind(e.object, before)
    return None


def _blocks(file: SourceFile, tally: Tally) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder("utf-8-sig")("replace")  # `_first_error` has found no error
    with file.open("rb") as data:
        while chunk := data.read(_BLOCK_BYTES):
            tally.n_bytes += len(chunk)
            tally.read(len(chunk))
            yield decoder.decode(chunk)


@contextmanager
def _json_lines(file: SourceFile) -> Iterator[tuple[BinaryIO, Callable[[], int]]]:
    """Open a file of JSON lines, compressed or not; yield it and a function that returns the bytes read so far."""
    with file.open("rb") as data:
        codec = CODECS.get(os.path.splitext(ending(file))[1])
        if codec is None:
            yield data, data.tell
            return
        import pyarrow

        stream = pyarrow.CompressedInputStream(pyarrow.PythonFile(data), codec)  # raises OSError if damaged
        with io.BufferedReader(cast(io.RawIOBase, stream)) as lines:
            yield lines, data.tell


def _record_lines(file: SourceFile, tally: Tally, passed: int) -> Iterator[tuple[int, bytes | None]]:
    """Yield (number, line) for the lines after the first `passed`; the line is None if it exceeds the record limit."""
    number, most, is_rest = 0, tally.max_record_mib << 20, False
    with _json_lines(file) as (stream, n_read):
        while piece := stream.readline(_BLOCK_BYTES if is_rest else most + 1):
            number += not is_rest
            is_large = (is_rest or len(piece) > most) and not piece.endswith(b"\n")
            tally.read(len(piece))
            if number > passed:
                tally.n_bytes = tally.start + n_read()
                if not is_rest:
                    yield number, None if is_large else piece
            is_rest = is_large


def _jsonl_documents(file: SourceFile, text_key: str, tally: Tally, passed: int) -> Iterator[Document]:
    for number, line in _record_lines(file, tally, passed):
        tally.record = number
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
                text.encode()  # raises for half a surrogate pair: valid JSON, but no text
        except UnicodeDecodeError as e:
            tally.add_bad(f"{file}:{number}", _not_utf8(e) + _kind(line, number - 1))
        except UnicodeEncodeError:
            tally.add_bad(f"{file}:{number}", f"field {text_key!r} holds half a surrogate pair")
        except ValueError as e:
            tally.add_bad(f"{file}:{number}", f"not JSON: {e}{_kind(line, number - 1)}")
        else:
            yield from _record_document(f"{file}:{number}", record, text_key, tally)


def _record_document(place: str, record: Any, text_key: str, tally: Tally) -> Iterator[Document]:
    most = tally.max_record_mib << 20
    if not isinstance(record, dict):
        tally.add_bad(place, f"a {type(record).__name__}, not an object with field {text_key!r}")
    elif text_key not in record:
        tally.add_bad(place, f"no field {text_key!r} among {', '.join(map(str, record)) or 'none'} (data.text_key)")
    elif not isinstance(record[text_key], str):
        kind = "null" if record[text_key] is None else f"of type {type(record[text_key]).__name__}"
        tally.add_bad(place, f"field {text_key!r} is {kind}, not a string")
    elif len(text := record[text_key]) > most // 4 and len(text.encode()) > most:
        tally.add_large(place)
    elif text:
        yield Document(place, (text,))


def _parquet_documents(file: SourceFile, text_key: str, tally: Tally, key: str, passed: int) -> Iterator[Document]:
    import pyarrow

    with open_column(file, text_key, key) as table:
        size, row, n_rows = file.stat().st_size, passed, table.metadata.num_rows
        for value in column_values(file, table, text_key, passed):
            row += 1
            n_bytes, tally.record = text_bytes(value), row
            tally.n_bytes = tally.start + size * row // max(row, n_rows)
            tally.read(n_bytes)
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
        if row != n_rows:  # damage inside a column may end it early without an error
            raise pyarrow.ArrowInvalid(f"{row} rows, where its end says {n_rows}")


def _dataset_documents(source: Source, text_key: str, tally: Tally) -> Iterator[Document]:
    assert source.dataset  # noqa: S101  # set by `resolve`
    path, config, split = source.dataset
    try:
        if os.path.isdir(path):
            tally.skipped += [] if tally.record or tally.file else left_out(source)
        builder = builder_of(source)
        if source.files and (files := own_files(builder, split)):
            tally.all_bytes = sum(file.stat().st_size for file in files)
            yield from documents(replace(source, kind="text", files=files, dataset=None), text_key, tally)
            return
        number, revision = tally.record, str(builder.hash)
        if number and tally.revision != revision:
            what = f", of which {number:,} rows are of revision {tally.revision}; now it is {revision}"
            fix = "delete its folder in data.cache_dir that ends in .unfinished, and run again"
            raise source.refused(what, "one revision of the dataset", fix)
        tally.revision = revision
        stated = (builder.info.splits or {}).get(split)
        tally.all_rows = (stated and stated.num_examples) or 0
        rows: Any = builder.as_streaming_dataset(split=split)
        for row in rows.skip(number) if number else rows:
            tally.record = number = number + 1
            for document in _record_document(f"{source.name}:{number}", row, text_key, tally):
                n_bytes = sum(len(text.encode()) for text in document.blocks)
                tally.n_bytes += n_bytes
                tally.read(n_bytes)
                yield document
            if tally.is_ended:
                return
        if number < tally.all_rows:
            missing = tally.all_rows - number
            tally.skipped.append(f"{missing:,} of the {tally.all_rows:,} rows that the dataset is said to have")
    except DataError:
        raise
    except BaseException as e:  # errors of the library, its back ends and the network have no common class
        if not isinstance(e, Exception) and not is_panic(e):
            raise
        fix = "correct the name, config or split; without a network give a folder, as hf:/data/name, or files"
        if source.files:
            fix = "correct config, split or file; or name the files without hf:, where data.max_bad_records skips some"
        want = f"dataset {path!r}, config {config or 'default'!r}, split {split!r}, readable through `datasets`"
        raise source.refused(f": {type(e).__name__}: {e}", want, fix) from e


def _kind(content: bytes, before: int) -> str:
    """Return a note on the kind of file that begins with `content`; "" if unknown, or if `before` bytes precede it."""
    found = next((kind for begin, kind in _OTHER_KINDS if content[:32].lower().startswith(begin)), "")
    return f"; it begins as {found}" if found and not before else ""


def _not_utf8(e: UnicodeDecodeError, before: int = 0) -> str:
    return f"not UTF-8: byte 0x{e.object[e.start]:02x} at byte {before + e.start}"
