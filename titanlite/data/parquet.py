"""Read one column of texts from a Parquet file, few values at a time."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from titanlite.data.sources import SourceFile
from titanlite.errors import DataError, nearest

_STRINGS = ("string", "large_string", "string_view", "null")  # types of a text column; "null" has only bad records
_BATCH_BYTES, _BATCH_ROWS = 1 << 26, 256  # bytes and rows that are decoded at once
_BATCH_NUMBERS = 1 << 20  # rows of a dictionary-encoded column decoded at once: a batch copies the dictionary
_NUMBER_BYTES, _HEADER_BYTES = 8, 1 << 13  # most bytes of a dictionary index, and of page headers


@contextmanager
def open_column(file: SourceFile, text_key: str, key: str) -> Iterator[Any]:
    """Open a Parquet file; raise a DataError if it has no string column `text_key`, or if it is found damaged."""
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(_opened(file)) as table:
            names = table.schema_arrow.names
            if text_key not in names:
                raise no_such_field(file, text_key, names)
            kind = table.schema_arrow.field(names.index(text_key)).type
            if pyarrow.types.is_dictionary(kind):
                kind = kind.value_type
            if str(kind) not in _STRINGS:
                want = f"a column of strings; in {file} it is one of {kind}"
                fix = "name a column of strings, or write this one as strings"
                raise DataError.of("data", "data.text_key", repr(text_key), want, fix)
            yield table
    except (pyarrow.ArrowException, UnicodeDecodeError) as e:
        fix = "write the file again, or leave it out of the pattern"
        raise DataError.of("data", key, f"{file}: {e}", "a Parquet file", fix) from e


def column_values(file: SourceFile, table: Any, text_key: str, passed: int) -> Iterator[Any]:
    """Yield the values of the column `text_key` after the first `passed` values; few are decoded at a time."""
    import pyarrow.parquet

    known = table.metadata
    with pyarrow.parquet.ParquetFile(_opened(file), metadata=known, read_dictionary=[text_key]) as by_number:
        for number in range(known.num_row_groups):
            group = known.row_group(number)
            if passed >= group.num_rows:
                passed -= group.num_rows
                continue
            columns = map(group.column, range(known.num_columns))  # includes nested columns
            column = next(c for c in columns if c.path_in_schema == text_key)
            n_bytes, reader = column.total_uncompressed_size, table
            n_rows = min(_BATCH_ROWS, max(1, _BATCH_BYTES * group.num_rows // max(1, n_bytes)))
            if n_bytes <= _BATCH_BYTES and _is_numbers(column):  # the dictionary is in memory once per batch
                reader, n_rows = by_number, _BATCH_NUMBERS
            for batch in reader.iter_batches(batch_size=n_rows, row_groups=[number], columns=[text_key]):
                values, passed = batch.column(0)[passed:], max(0, passed - len(batch))
                yield from values


def _opened(file: SourceFile) -> Any:
    return file if isinstance(file, Path) else file.open("rb")


def _is_numbers(column: Any) -> bool:
    """Return whether a column consists of dictionary indices: few bytes may then stand for gigabytes of text."""
    if not column.has_dictionary_page:
        return False
    behind = column.total_compressed_size - (column.data_page_offset - column.dictionary_page_offset)
    return behind <= _NUMBER_BYTES * column.num_values + _HEADER_BYTES


def text_bytes(value: Any) -> int:
    """Return the size in bytes of an Arrow string without copying it; 0 for null."""
    value = getattr(value, "value", value)  # the string of a dictionary value
    buffer = value.as_buffer() if hasattr(value, "as_buffer") else None
    return buffer.size if buffer else 0


def no_such_field(file: SourceFile, text_key: str, names: list[str]) -> DataError:
    """Return the error for a file whose fields, `names`, do not include the field of the text, `text_key`."""
    near = nearest(text_key, names)
    fix = f"text_key = {json.dumps(near)}" if near else "name the one that holds the text"
    want = f"one of the fields of {file}: {', '.join(names) or 'none'}"
    return DataError.of("data", "data.text_key", repr(text_key), want, fix)
