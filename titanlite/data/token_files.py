"""Token files that somebody else made: flat ids, little-endian uint16 or uint32, without a header.

Such a file does not say what it is, and read as the wrong type it is a corpus of nonsense that trains without an
error. The rule: uint32 if `model.vocab_size` exceeds 65,536, else uint16, unless a `meta.json` in the file's folder has
a "dtype" (titanlite's own shards do). The first use reads every file once: an id that the model has no row for is an
error, and so are 32-bit ids under a 16-bit rule, which show as a zero in every second place.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from titanlite.data.shards import Meta, Shard, token_hash
from titanlite.data.sources import Source
from titanlite.errors import DataError, Problem, describe

_CHUNK_BYTES = 1 << 24


def token_dtype(source: Source, vocab_size: int) -> str:
    """The type of the ids in token files, by the rule above.

    Args:
        source: of kind "tokens".
        vocab_size: of the model.

    Returns:
        "uint16" or "uint32".

    Raises:
        DataError: folders disagree, or a file's size is not a whole number of ids.
    """
    rule = "uint32" if vocab_size > 1 << 16 else "uint16"
    dtypes = {folder: _stated_dtype(folder) or rule for folder in dict.fromkeys(f.parent for f in source.files)}
    if len(set(dtypes.values())) > 1:
        seen = ", ".join(f"{d} in {f}" for f, d in dtypes.items())
        problem = Problem(source.key, f"{source.name!r}: {seen}", "one type of ids", "convert the files to one type")
        raise DataError(describe("data", [problem]))
    dtype = next(iter(dtypes.values()))
    item = np.dtype(dtype).itemsize
    odd = [(f, n) for f, n, _ in source.stamps() if n % item]
    if odd:
        seen = "\n      ".join(f"{f} has {n} bytes" for f, n in odd[:10])
        want = f"{dtype} ids ({item} bytes each) for model.vocab_size = {vocab_size}"
        fix = "write the files again"
        if dtype == "uint32":
            fix += '; if they hold uint16, put {"dtype": "uint16"} in a meta.json beside them'
        raise DataError(describe("data", [Problem(source.key, f"{source.name!r}:\n      {seen}", want, fix)]))
    return dtype


def scan(source: Source, dtype: str, report: Callable[[int], object]) -> Meta:
    """Read token files once, to know their ids and their fingerprint.

    Args:
        source: of kind "tokens".
        dtype: of the ids.
        report: called with the bytes read so far.

    Returns:
        What meta.json of these files is to say; the files stay where they are.

    Raises:
        DataError: what is said to be uint16 is uint32, or a file cannot be read.
    """
    digest, n_bytes, shards = token_hash(dtype), 0, list[Shard]()
    for file in source.files:
        tokens, max_id, max_at, wide = 0, -1, 0, dtype == "uint16"
        for ids in _chunks(file, dtype, source):
            digest.update(ids.data)
            top = int(ids.argmax())
            if ids[top] > max_id:
                max_id, max_at = int(ids[top]), tokens + top
            wide = wide and not ids[1::2].any()
            tokens += len(ids)
            n_bytes += ids.nbytes
            report(n_bytes)
        if wide and tokens >= 64 and max_id > 0:
            saw = f"{source.name!r}: every second id of {file} is 0, as if it held uint32"
            fix = f'put {{"dtype": "uint32"}} in {file.parent / "meta.json"}, or write the file as uint16'
            raise DataError(describe("data", [Problem(source.key, saw, "uint16 ids", fix)]))
        shards.append(Shard(str(file), tokens, max_id, max_at))
    return Meta(source.name, "", dtype, tuple(shards), digest.hexdigest(), input_bytes=n_bytes)


def check_ids(meta: Meta, vocab_size: int, key: str) -> None:
    """Check that the model has a row for every id.

    Args:
        meta: of the corpus.
        vocab_size: of the model.
        key: the config key of the source.

    Raises:
        DataError: an id is too large; the message names file and place.
    """
    largest = max(meta.shards, key=lambda s: s.max_id, default=None)
    if largest is not None and largest.max_id >= vocab_size:
        saw = f"{meta.source!r}: id {largest.max_id} at token {largest.max_at} of {largest.path}"
        want = f"ids below model.vocab_size = {vocab_size}, in a file of {meta.dtype}"
        fix = "set model.vocab_size to that of the tokenizer that made the file"
        if meta.dtype == "uint32":
            fix += ', or, if it holds uint16, put {"dtype": "uint16"} in meta.json beside it'
        raise DataError(describe("data", [Problem(key, saw, want, fix)]))


def _stated_dtype(folder: Path) -> str | None:
    try:
        stated = json.loads((folder / "meta.json").read_text(encoding="utf-8"))["dtype"]
    except (OSError, ValueError, TypeError, KeyError):  # not there, or somebody else's
        return None
    return stated if stated in ("uint16", "uint32") else None


def _chunks(file: Path, dtype: str, source: Source) -> Iterator[np.ndarray]:
    try:
        with file.open("rb") as data:
            while chunk := data.read(_CHUNK_BYTES):
                yield np.frombuffer(chunk, np.dtype(dtype).newbyteorder("<"))
    except (OSError, ValueError) as e:
        problem = Problem(source.key, f"{file}: {e}", "a file of whole ids that can be read", "write the file again")
        raise DataError(describe("data", [problem])) from e
