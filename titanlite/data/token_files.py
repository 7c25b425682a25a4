"""Read token files of other tools: flat ids, little-endian uint16 or uint32, without a header.

Ids that are read as the wrong type train without an error. If a file beside the ids states their type, this type is
used: a `meta.json` with a "dtype", as titanlite's shards have, or Megatron's .idx of the same name. Else
`data.token_dtype` decides; with "auto", the type is uint32 if `model.vocab_size` exceeds 65,536, else uint16. Files
with a header are refused. The first use reads every file once, as ids outside the model's vocabulary are refused, too.
"""

import struct
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import cast

import numpy as np

from titanlite.config.schema import Data
from titanlite.data.shards import BLOCK_BYTES, Meta, Shard, block_hash, token_hash
from titanlite.data.sources import BEGINNINGS, Source, unreadable
from titanlite.errors import DataError
from titanlite.json_file import read_json

_CHUNK_BYTES = 4 * BLOCK_BYTES
_HEADERS = (  # first bytes, name, and code that reads the ids after the header
    (b"\x93NUMPY", "numpy's header", "np.load({file!r})"),
    (struct.pack("<2i", 20240520, 1), "llm.c's header", "np.fromfile({file!r}, '<u2', offset=1024)"),
    (struct.pack("<2i", 20240801, 7), "llm.c's header", "np.fromfile({file!r}, '<u4', offset=1024)"),
    (b"LITPKDS", "lit-gpt's header", ""),
    (b"MMIDIDX", "Megatron's index, not its ids", ""),
    *((begin, kind, "") for begin, kind in BEGINNINGS),
)
_HEAD_BYTES = max(len(begin) for begin, _, _ in _HEADERS)
_MEGATRON = "<9sQBQQ"  # .idx: magic, version, type, sequences, documents; then int32 lengths, int64 byte offsets
_MEGATRON_TYPES = {1: "u1", 2: "i1", 3: "i2", 4: "i4", 5: "i8", 6: "f8", 7: "f4", 8: "u2"}


def token_dtype(source: Source, data: Data, vocab_size: int) -> str:
    """Return the type of the ids in token files, "uint16" or "uint32".

    It is the type that a file beside them states, else `data.token_dtype`, for which "auto" goes by `vocab_size`.

    Raises:
        DataError: the files have different types, or one has a header or a size that is no whole number of ids.
    """
    rule = data.token_dtype
    if rule == "auto":
        rule = "uint32" if vocab_size > 1 << 16 else "uint16"
    sizes = {Path(file): n_bytes for file, n_bytes, _ in source.stamps()}
    folders = {folder: _of_meta(folder / "meta.json", source) for folder in dict.fromkeys(f.parent for f in sizes)}
    dtypes: dict[str, Path] = {}
    for file, n_bytes in sizes.items():
        stated = [dtype for dtype in (_of_index(file, n_bytes, source), folders[file.parent]) if dtype]
        for dtype in stated or [rule]:
            dtypes.setdefault(dtype, file)
    if len(dtypes) > 1:
        seen = ", ".join(f"{dtype} for {file}" for dtype, file in dtypes.items())
        raise source.refused(f": {seen}", "one type of ids", "convert the files to one type")
    dtype = next(iter(dtypes))
    item = np.dtype(dtype).itemsize
    for file in source.paths:
        head = next(_file_chunks(file, source, _HEAD_BYTES), b"")
        for magic, what, read in _HEADERS:
            if head.startswith(magic):
                how = f": {read.format(file=str(file))}.astype('{_code(dtype)}').tofile('ids.bin')" if read else ""
                fix = f"write the ids alone{how}"
                raise source.refused(f": {file} begins with {what}", f"{dtype} ids, no header", fix)
    odd = [(f, n) for f, n in sizes.items() if n % item]
    if odd:
        seen = "\n      ".join(f"{f} has {n} bytes" for f, n in odd[:10])
        want = f"{dtype} ids ({item} bytes each) for model.vocab_size = {vocab_size}"
        fix = "write the files again"
        if dtype == "uint32":
            fix += f"; {_other_type('uint16', 'they hold')}"
        raise source.refused(f":\n      {seen}", want, fix)
    return dtype


def first_ids(source: Source, dtype: str, count: int) -> Iterator[np.ndarray]:
    """Yield the first `count` ids of token files, in parts."""
    for file in source.paths:
        for chunk in _file_chunks(file, source, _CHUNK_BYTES):
            ids = np.frombuffer(chunk, _code(dtype))[:count]
            yield ids
            if not (count := count - len(ids)):
                return


def require_separator(source: Source, dtype: str, separator: int, limit: int | None = None) -> str | None:
    """Search token files for the separator; return None if found, else a warning. Refuse training files without it.

    Only the first `limit` tokens are searched (None: all). If the files have more, a failed search is only a warning.
    """
    tokens = sum(n_bytes for _, n_bytes, _ in source.stamps()) // np.dtype(dtype).itemsize
    if any((ids == separator).any() for ids in first_ids(source, dtype, limit or tokens)):
        return None
    saw, want = f"{separator}, which ends no document", f"the id that ends each document of {source.name!r}"
    if limit and limit < tokens:
        return f"data.separator_id = {saw} in the first {limit:,} tokens of {source.key} = {source.name!r}"
    if source.key.startswith("validation."):  # held-out files may be one document
        return f"data.separator_id = {saw} of {source.key} = {source.name!r}: each of its samples is one"
    fix = "correct it, or leave it out: each sample is one document then"
    raise DataError.of("data", "data.separator_id", saw, want, fix)


def scan(source: Source, dtype: str, report: Callable[[int], object]) -> Meta:
    """Read token files once; return the content of a meta.json for them. `report` is called with the bytes read so far.

    Raises:
        DataError: a file cannot be read, or is a titanlite shard that has changed since it was prepared.
    """
    digest, n_bytes, shards = token_hash(dtype), 0, list[Shard]()
    prepared = _prepared(source)
    for file in source.paths:
        tokens, max_id, max_at, hashes = 0, -1, 0, list[str]()
        for chunk in _file_chunks(file, source, _CHUNK_BYTES):
            ids = np.frombuffer(chunk, _code(dtype))
            digest.update(ids.data)
            hashes += [block_hash(chunk[i : i + BLOCK_BYTES]) for i in range(0, len(chunk), BLOCK_BYTES)]
            top = int(ids.argmax())
            if ids[top] > max_id:
                max_id, max_at = int(ids[top]), tokens + top
            tokens += len(ids)
            n_bytes += ids.nbytes
            report(n_bytes)
        shards.append(Shard(str(file), tokens, max_id, max_at, tuple(hashes)))
        was = prepared.get(file)
        if was is not None and (was.tokens != tokens or was.hashes != tuple(hashes)):
            what = f": {file}, which is not what was prepared as {file.parent / 'meta.json'} says"
            raise source.refused(what, "shards as they were written", "copy them again, or delete that meta.json")
    return Meta(source.name, "", dtype, tuple(shards), digest.hexdigest(), input_bytes=n_bytes)


def _prepared(source: Source) -> dict[Path, Shard]:
    """Return the files that titanlite has made, each with its `Shard` in the meta.json beside it."""
    known: dict[Path, Shard] = {}
    for folder in {file.parent for file in source.paths}:
        with suppress(DataError):  # there is no meta.json, or another tool's
            known |= {folder / shard.path: shard for shard in Meta.read(folder).shards}
    return known


def check_ids(meta: Meta, vocab_size: int, key: str) -> None:
    """Raise a DataError if an id in the shards is outside the model's vocabulary."""
    largest = max(meta.shards, key=lambda s: s.max_id, default=None)
    if largest is not None and largest.max_id >= vocab_size:
        bits = 8 * np.dtype(meta.dtype).itemsize
        negative = f" ({largest.max_id - (1 << bits)} as int{bits})" if largest.max_id >> (bits - 1) else ""
        saw = f"{meta.source!r}: id {largest.max_id}{negative} at token {largest.max_at} of {largest.path}"
        want = f"ids below model.vocab_size = {vocab_size}, in a file of {meta.dtype}"
        fix = "set model.vocab_size to that of the tokenizer that made the file"
        other = "uint16" if meta.dtype == "uint32" else "uint32"
        fix += f", or, {_other_type(other, 'it holds')}"
        raise DataError.of("data", key, saw, want, fix)


def _of_meta(file: Path, source: Source) -> str | None:
    """Return the type of ids that a meta.json states, None without one or with another tool's; refuse a damaged one."""
    try:
        content = read_json(file)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as e:
        raise source.refused(f": {file}: {e}", "a meta.json that can be read", "write it again, or delete it") from e
    stated = cast("dict[str, object]", content).get("dtype") if isinstance(content, dict) else None
    return _readable(source, file, stated) if isinstance(stated, str) else None


def _of_index(file: Path, n_bytes: int, source: Source) -> str | None:
    """Return the type of ids that a file's Megatron index states, None without one; refuse a file of another size."""
    index, size = file.with_suffix(".idx"), struct.calcsize(_MEGATRON)
    try:
        with index.open("rb") as data:
            head = data.read(size)
            if not head.startswith(b"MMIDIDX"):
                return None
            _, _, code, n, _ = struct.unpack(_MEGATRON, head)
            data.seek(size + 4 * max(0, n - 1))
            (length,) = struct.unpack("<i", data.read(4)) if n else (0,)
            data.seek(size + 12 * n - 8)
            (place,) = struct.unpack("<q", data.read(8)) if n else (0,)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, struct.error) as e:
        raise source.refused(f": {index}: {e}", "an index that can be read", "copy it again, or delete it") from e
    dtype = _readable(source, index, _MEGATRON_TYPES.get(code, f"type {code}"))
    end = place + length * np.dtype(dtype).itemsize
    if n_bytes != end:
        want = f"{end} bytes, as {index.name} beside it says"
        raise source.refused(f": {file} has {n_bytes} bytes", want, "copy both files again")
    return dtype


def _readable(source: Source, file: Path, stated: str) -> str:
    """Return the unsigned type for a stated type of ids (uint32 for int32, as ids are not negative); refuse others."""
    try:
        dtype = np.dtype(stated)
    except (TypeError, ValueError, SyntaxError):
        dtype = np.dtype(object)
    if dtype.kind in "iu" and dtype.itemsize in (2, 4) and dtype == dtype.newbyteorder("<"):
        return f"uint{8 * dtype.itemsize}"
    code = dtype.str if dtype.kind in "iuf" else "TYPE"
    fix = f"write the ids again: np.fromfile('FILE', {code!r}).astype('<u4').tofile('ids.bin'), and state uint32"
    raise source.refused(f": {file} states {stated!r}", "ids of 16 or 32 bits, little-endian", fix)


def _other_type(dtype: str, holds: str) -> str:
    return f'if {holds} {dtype}, data.token_dtype = "{dtype}", or correct the meta.json or .idx that says otherwise'


def _code(dtype: str) -> str:
    return np.dtype(dtype).newbyteorder("<").str


def _file_chunks(file: Path, source: Source, size: int) -> Iterator[bytes]:
    try:
        with file.open("rb") as data:
            while chunk := data.read(size):
                yield chunk
    except OSError as e:
        raise unreadable(source.name, source.key, file, e) from e
