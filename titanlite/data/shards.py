"""Store a corpus as token shards: one long row of token ids, in flat files.

A folder of shards holds `shard-00000.bin`, … (little-endian uint16, or uint32 for vocabularies above 65,536) and
`meta.json`, which says what is in them. Token files that somebody else made stay where they are; their folder holds a
`meta.json` alone, with their paths. There is no index of documents: sample i is tokens[i·S : i·S + S + 1], the row cut
into equal pieces, its last token being the target of the one before.

Each sample is read where it lies, through the page cache, which all ranks of a host share, and its file closed again: a
corpus of thousands of files needs no more descriptors and address space than one of a single file. Mapped into memory,
each would keep both, and one that shrinks would kill the process with SIGBUS, without a word. A file that has changed
at equal size trains on, or has ids that the model has no row for; so a block of it is held against its hash before its
first token is read.
"""

import dataclasses
import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar, get_origin

import numpy as np
import xxhash

from titanlite.durable import write_durably
from titanlite.errors import DataError
from titanlite.json_file import read_json, with_hash, without_hash
from titanlite.redact import redact_tree

VERSION = 1
BLOCK_BYTES = 1 << 19  # that have a hash: read and hashed for one sample of a few KiB


@dataclass(frozen=True)
class Shard:
    """One file of token ids."""

    path: str  # relative to the folder of meta.json, or absolute
    tokens: int
    max_id: int  # -1 if there are no tokens
    max_at: int  # where it occurs first in the file, in tokens
    hashes: tuple[str, ...] = ()  # xxh3 of each block; none in files of before they were written


@dataclass(frozen=True)
class Meta:
    """The content of meta.json."""

    source: str
    tokenizer: str  # "" for token files
    dtype: str  # "uint16" or "uint32"
    shards: tuple[Shard, ...]
    fingerprint: str  # of the tokens alone: equal on every machine that holds the same corpus
    documents: int = 0
    input_bytes: int = 0
    text_bytes: int = 0  # of the documents in UTF-8; 0: not known, as of token files
    n_bad_records: int = 0
    bad_records: tuple[str, ...] = ()  # the first ones
    skipped: tuple[str, ...] = ()
    max_tokens: int = 0  # data.max_tokens, if it left something out
    n_unknown: int = 0  # tokens that stand for text which the tokenizer does not know
    version: int = VERSION

    @property
    def tokens(self) -> int:
        """Tokens of all shards, separators included."""
        return sum(s.tokens for s in self.shards)

    @property
    def tokens_per_byte(self) -> float | None:
        """Return tokens, separators included, per byte of the documents' text, which has none; None: not known."""
        is_bytes = self.tokenizer == "bytes"  # whose shards know it though they are of before it was written
        n_bytes = self.text_bytes or (self.tokens - self.documents if is_bytes else 0)
        return self.tokens / n_bytes if n_bytes else None

    def write(self, folder: Path) -> None:
        """Write meta.json, to be readable after a power cut."""
        content = dataclasses.asdict(self)
        content = redact_tree(content) | {"shards": content["shards"]}  # whose paths are opened
        write_durably(folder / "meta.json", with_hash(content, indent=1))

    @classmethod
    def read(cls, folder: Path) -> "Meta":
        """Read meta.json.

        Raises:
            DataError: it is missing, or not what this version writes.
        """
        try:
            content = without_hash(read_json(folder / "meta.json"), is_required=False)
            if content["version"] != VERSION:
                raise ValueError(f"version {content['version']}")
            for name in ("bad_records", "skipped"):
                content[name] = tuple(content[name])
            shards = [s | {"hashes": tuple(s.get("hashes", ()))} for s in content["shards"]]
            content["shards"] = tuple(typed(Shard(**s)) for s in shards)
            meta = typed(cls(**content))
            if meta.dtype not in ("uint16", "uint32"):
                raise ValueError(f"dtype {meta.dtype!r}")
            for s in meta.shards:
                if s.hashes and len(s.hashes) != _n_blocks(s, meta.dtype):
                    raise ValueError(f"{len(s.hashes)} hashes of {s.path}")
            return meta
        except (OSError, ValueError, TypeError, KeyError) as e:
            if isinstance(e, OSError) and not isinstance(e, FileNotFoundError):
                raise _shard_unreadable(folder, e) from e
            want = f"a folder of token shards with a meta.json of version {VERSION}"
            raise _damaged(folder, f"{type(e).__name__}: {e}", want) from e


class TokenShards:
    """Read a corpus of token ids, from any thread and any process.

    Args:
        folder: of meta.json.
        tokenizer: fingerprint of the tokenizer that made the ids; "" where that is not known.
        files: of its source that were taken, passed over and met twice, in words.
        separator: id that ends each document; None where that is not known.

    Raises:
        DataError: meta.json cannot be read, or a shard is missing or has another size than it says.
    """

    def __init__(self, folder: Path, tokenizer: str = "", files: str = "", separator: int | None = None) -> None:
        self.folder, self.tokenizer, self.files, self.separator = folder, tokenizer, files, separator
        self.inputs = ""  # hash of what its tokens are made of, where that is known
        self.meta = Meta.read(folder)
        self.tokens = self.meta.tokens
        self.fingerprint = self.meta.fingerprint
        self._dtype = np.dtype(self.meta.dtype).newbyteorder("<")
        self._paths = [folder / s.path for s in self.meta.shards]
        self._starts = np.cumsum([0] + [s.tokens for s in self.meta.shards])
        self._blocks = np.cumsum([0] + [_n_blocks(s, self.meta.dtype) for s in self.meta.shards])
        self.checked = np.zeros(self._blocks[-1], bool)  # blocks known to be right, of all shards in a row
        for i in range(len(self._paths)):
            self._check_size(i, _file_size(folder, self._paths[i]))

    def wait(self, tokens: int) -> int:
        """Return the number of all tokens, at once: they are there."""
        return self.tokens

    def read(self, start: int, count: int) -> np.ndarray:
        """Copy some tokens, across shard boundaries.

        Returns:
            [count] int64.

        Raises:
            IndexError: there are no such tokens.
            DataError: a shard has changed, or cannot be read.
        """
        if start < 0 or count < 0 or start + count > self.tokens:
            raise IndexError(f"tokens {start} … {start + count} of {self.tokens}")
        out, done = np.empty(count, np.int64), 0
        shard = int(np.searchsorted(self._starts, start, side="right")) - 1
        while done < count:
            at = start + done - int(self._starts[shard])
            n = min(count - done, self.meta.shards[shard].tokens - at)
            if n:
                offset, size = at * self._dtype.itemsize, n * self._dtype.itemsize
                for block in range(offset // BLOCK_BYTES, -(-(offset + size) // BLOCK_BYTES)):
                    self.check(int(self._blocks[shard]) + block)
                out[done : done + n] = np.frombuffer(self._read(shard, offset, size), self._dtype, count=n)
            done, shard = done + n, shard + 1
        return out

    def check(self, block: int) -> None:
        """Hold a block against its hash, once; without one, against the largest id that its shard should have.

        Raises:
            DataError: the shard has changed, or cannot be read.
        """
        if self.checked[block]:
            return
        at = int(np.searchsorted(self._blocks, block, side="right")) - 1
        shard, path, start = self.meta.shards[at], self._paths[at], (block - int(self._blocks[at])) * BLOCK_BYTES
        content = self._read(at, start, BLOCK_BYTES)
        if shard.hashes:
            is_right = block_hash(content) == shard.hashes[start // BLOCK_BYTES]
        else:
            is_right = int(np.frombuffer(content, self._dtype).max(initial=0)) <= shard.max_id
        if not is_right:
            saw = f"{path} has changed: bytes {start} to {start + len(content)} are not those that were written"
            raise _damaged(self.folder, saw, f"the content that {self.folder / 'meta.json'} was written for")
        self.checked[block] = True

    def _read(self, shard: int, start: int, size: int) -> bytes:
        """Read bytes of one shard."""
        try:
            with open(self._paths[shard], "rb", buffering=0) as file:
                content = os.pread(file.fileno(), size, start)
                is_now = os.fstat(file.fileno()).st_size  # after reading: what was read is whole
        except OSError as e:
            self._check_size(shard, _file_size(self.folder, self._paths[shard]))
            raise _shard_unreadable(self.folder, e) from e
        self._check_size(shard, is_now)
        return content

    def _check_size(self, shard: int, size: int | None) -> None:
        path, expected = self._paths[shard], self.meta.shards[shard].tokens * self._dtype.itemsize
        if size != expected:
            saw = f"{path} is missing" if size is None else f"{path} has {size} bytes"
            raise _damaged(self.folder, saw, f"{expected} bytes, as {self.folder / 'meta.json'} says")


def token_hash(dtype: str) -> "hashlib.blake2b":
    """Return the hash that makes a corpus' fingerprint, to be updated with its tokens in order."""
    return hashlib.blake2b(dtype.encode(), digest_size=16)


def block_hashes(path: Path) -> tuple[str, ...]:
    """Return the hash of each block of a shard."""
    with path.open("rb") as file:
        return tuple(map(block_hash, iter(lambda: file.read(BLOCK_BYTES), b"")))


def block_hash(content: bytes) -> str:
    """Return the hash of a block of a shard: it is for accidents, so that it may be faster than a disk."""
    return xxhash.xxh3_64_hexdigest(content)


def sample_count(
    source: str, tokens: int, seq_len: int, at_least: int = 1, key: str = "data.source", max_tokens: int = 0
) -> int:
    """Samples of a corpus.

    Args:
        source: its name, for the message.
        tokens: of all of it.
        seq_len: tokens per sample (S); a sample reads one more, the last target.
        at_least: samples needed, those of one global batch in training.
        key: the config key of the source, for the message.
        max_tokens: data.max_tokens, if it left something out.

    Returns:
        (tokens - 1) // seq_len.

    Raises:
        DataError: there are fewer than `at_least`.
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


def _n_blocks(shard: Shard, dtype: str) -> int:
    return -(-shard.tokens * np.dtype(dtype).itemsize // BLOCK_BYTES)


def _file_size(folder: Path, path: Path) -> int | None:
    try:
        return path.stat().st_size if path.is_file() else None
    except OSError as e:  # before Python 3.14, of a folder that may not be entered
        raise _shard_unreadable(folder, e) from e


T = TypeVar("T")


def typed(read: T) -> T:
    """Return a dataclass that was read, if its values have the types of their fields.

    Raises:
        TypeError: one has not.
    """
    for field in dataclasses.fields(read):  # pyright: ignore[reportArgumentType]
        value, kind = getattr(read, field.name), get_origin(field.type) or field.type
        if type(value) is not kind:
            raise TypeError(f"{field.name} is {value!r}")
    return read


def _shard_unreadable(folder: Path, e: OSError) -> DataError:
    want, fix = "folders and files that can be read", "make it readable, or set data.cache_dir to another folder"
    return DataError.of(str(folder), e.filename or "a file", e.strerror or str(e), want, fix)


def _damaged(folder: Path, saw: str, want: str) -> DataError:
    fix = f"delete {folder}; it is made again from the source at the next run"
    return DataError.of(str(folder), "token shards", saw, want, fix)
