"""Store a corpus as token shards: one long sequence of token ids, in flat files.

A folder of shards has `shard-00000.bin`, … (little-endian uint16, or uint32 for vocabularies above 65,536) and a
`meta.json`. Token files of other tools are not copied; the folder then has only a `meta.json` with their paths. There
is no index of documents. Sample i is tokens[i·S : i·S + S + 1] (S = seq_len); its last token is only a target.
"""

import dataclasses
import hashlib
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from titanlite.durable import write_durably
from titanlite.errors import DataError
from titanlite.json_file import read_json, with_hash, without_hash
from titanlite.redact import redact_tree

VERSION = 1
BLOCK_BYTES = 1 << 19  # size of a block, which has one hash


@dataclass(frozen=True)
class Shard:
    """One file of token ids."""

    path: str  # relative to the folder of meta.json, or absolute
    tokens: int
    max_id: int  # the largest id; -1 if there are no tokens
    max_at: int  # position of the first `max_id` in the file, in tokens
    hashes: tuple[str, ...]  # xxh3 of each block

    @classmethod
    def of(cls, content: dict[str, Any]) -> "Shard":
        """Make a shard from its JSON object."""
        return cls(**{**content, "hashes": tuple(content["hashes"])})


@dataclass(frozen=True)
class Meta:
    """The content of meta.json."""

    source: str
    tokenizer: str  # "" for token files
    dtype: str  # "uint16" or "uint32"
    shards: tuple[Shard, ...]
    fingerprint: str  # hash of the tokens alone: equal on all machines
    documents: int = 0
    input_bytes: int = 0
    text_bytes: int = 0  # of the documents in UTF-8; 0: not known, as for token files
    n_bad_records: int = 0
    bad_records: tuple[str, ...] = ()  # the first bad records
    skipped: tuple[str, ...] = ()
    max_tokens: int = 0  # data.max_tokens, if text was left out because of it
    n_unknown: int = 0  # tokens for text that the tokenizer does not know
    version: int = VERSION

    @property
    def tokens(self) -> int:
        """Return the number of tokens in all shards, with separators."""
        return sum(s.tokens for s in self.shards)

    @property
    def tokens_per_byte(self) -> float | None:
        """Return the number of tokens, with separators, per byte of the documents' text; None: not known."""
        return self.tokens / self.text_bytes if self.text_bytes else None

    def write(self, folder: Path) -> None:
        """Write meta.json into `folder` durably, with secrets replaced by `***`."""
        content = dataclasses.asdict(self)
        content = redact_tree(content) | {"shards": content["shards"]}  # shard paths stay as they are
        write_durably(folder / "meta.json", with_hash(content, indent=1))

    @classmethod
    def read(cls, folder: Path) -> "Meta":
        """Read meta.json; raise a DataError if it is missing, damaged or of another version."""
        try:
            content = without_hash(read_json(folder / "meta.json"))
            if content["version"] != VERSION:
                raise ValueError(f"version {content['version']}")
            for name in ("bad_records", "skipped"):
                content[name] = tuple(content[name])
            content["shards"] = tuple(map(Shard.of, content["shards"]))
            return cls(**content)
        except (OSError, ValueError, TypeError, KeyError) as e:
            if isinstance(e, OSError) and not isinstance(e, FileNotFoundError):
                raise shard_unreadable(folder, e) from e
            want = f"a folder of token shards with a meta.json of version {VERSION}"
            raise damaged(folder, f"{type(e).__name__}: {e}", want) from e


class ChangedFileError(ValueError):
    """A file does not have the content that was written."""


class HashedFile:
    """A file of `n` numbers; each block is checked against its hash once, before its first use.

    `hashes` is empty while the file is being written. `n` is None if the length of the file is not known.
    """

    def __init__(self, path: Path, dtype: np.dtype[Any], hashes: Sequence[str], n: int | None = None) -> None:
        self.path, self._dtype, self._hashes = path, dtype, hashes
        self._size = None if n is None else n * dtype.itemsize
        self.checked = np.zeros(len(hashes), bool)  # blocks that were found right

    def read(self, first: int, count: int) -> np.ndarray:
        """Read `count` numbers, beginning with number `first`.

        Raises:
            ChangedFileError: the file does not have the content that was written.
            OSError: the file cannot be read.
        """
        offset, size = first * self._dtype.itemsize, count * self._dtype.itemsize
        with open(self.path, "rb", buffering=0) as file:
            if self._hashes:
                for block in range(offset // BLOCK_BYTES, -(-(offset + size) // BLOCK_BYTES)):
                    self._check(file.fileno(), block)
            content = os.pread(file.fileno(), size, offset)
            self._check_size(os.fstat(file.fileno()).st_size)  # after reading, so that the content is complete
        return np.frombuffer(content, self._dtype, count=count)

    def check(self, block: int) -> None:
        """Check a block against its hash; raises as `read`."""
        self.read(block * BLOCK_BYTES // self._dtype.itemsize, 1)

    def check_size(self) -> None:
        """Check the size of the file; raises as `read`."""
        self._check_size(self.path.stat().st_size)

    def _check_size(self, size: int) -> None:
        if self._size is not None and (size < self._size or (size > self._size and self._hashes)):
            raise ChangedFileError(f"{self.path} has {size} bytes, where {self._size} were written")

    def _check(self, file: int, block: int) -> None:
        if self.checked[block]:
            return
        start = block * BLOCK_BYTES
        content = os.pread(file, BLOCK_BYTES, start)
        self._check_size(os.fstat(file).st_size)
        if block_hash(content) != self._hashes[block]:
            what = f"bytes {start} to {start + len(content)} are not those that were written"
            raise ChangedFileError(f"{self.path} has changed: {what}")
        self.checked[block] = True


def hashed_files(folder: Path, shards: Iterable[Shard], dtype: str) -> list[HashedFile]:
    """Return the file of each shard, with its hashes; `folder` is the folder of meta.json."""
    kind = np.dtype(dtype).newbyteorder("<")
    return [HashedFile(folder / shard.path, kind, shard.hashes, shard.tokens) for shard in shards]


def token_hash(dtype: str) -> "hashlib.blake2b":
    """Return the hash object that makes the fingerprint of a corpus, without any token so far."""
    return hashlib.blake2b(dtype.encode(), digest_size=16)


def block_hashes(path: Path) -> tuple[str, ...]:
    """Return the hash of each block of a shard."""
    with path.open("rb") as file:
        return tuple(map(block_hash, iter(lambda: file.read(BLOCK_BYTES), b"")))


def block_hash(content: bytes) -> str:
    """Return the hash of a block of a shard. It is a fast hash, as it protects against accidents only."""
    return xxhash.xxh3_64_hexdigest(content)


def sample_count(
    source: str, tokens: int, seq_len: int, at_least: int = 1, key: str = "data.source", max_tokens: int = 0
) -> int:
    """Return the number of samples in a source, each of S tokens and a last target; raise a DataError below `at_least`.

    `key` is the config key of the source; `max_tokens` is data.max_tokens, if text was left out because of it.
    """
    n_samples = (tokens - 1) // seq_len
    if n_samples < at_least:
        cut = f", cut by data.max_tokens = {max_tokens}" if max_tokens else ""
        saw = f"{source!r}, which has {tokens:,} tokens{cut}"
        samples = f"{at_least} sample{'s' * (at_least > 1)}"
        want = f"at least {at_least * seq_len + 1:,} tokens: {samples} of training.seq_len = {seq_len}, and 1"
        more = "raise data.max_tokens" if max_tokens else "give more text"
        or_batch = " or batch (training.local_batch_size, training.global_batch_size)" if at_least > 1 else ""
        fix = f"{more}, or a smaller training.seq_len{or_batch}"
        raise DataError.of("data", key, saw, want, fix)
    return n_samples


def shard_unreadable(folder: Path, e: OSError) -> DataError:
    """Return the error for shards that the operating system fails to read."""
    want, fix = "folders and files that can be read", "make it readable, or set data.cache_dir to another folder"
    return DataError.of(str(folder), e.filename or "a file", e.strerror or str(e), want, fix)


def damaged(folder: Path, saw: str, want: str, what: str = "token shards") -> DataError:
    """Return the error for a folder whose content is not what was written."""
    fix = f"delete {folder}; it is made again from the source at the next run"
    return DataError.of(str(folder), what, saw, want, fix)
