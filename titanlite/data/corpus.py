"""Read a corpus of token ids: whole, or while another process still tokenizes it (`background.py`).

Each sample is read where it lies, through the page cache, which all ranks of a host share, and its file closed again: a
corpus of thousands of files needs no more descriptors and address space than one of a single file. Mapped into memory,
each would keep both, and one that shrinks would kill the process with SIGBUS, without a word. A file that has changed
at equal size trains on, or has ids that the model has no row for; so a block of it is held against its hash before its
first token is read.

What is asked for and not there yet is waited for. How much is there is said by the folder that is being made
(`unfinished.py`); that somebody still makes it, by the lock that he holds (`cache.py`).
"""

import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from titanlite.config.schema import Data
from titanlite.data import shards
from titanlite.data.cache import lock_of, maker_failed, unfinished_of
from titanlite.data.cache_folder import unusable_cache
from titanlite.data.shards import Meta, Shard, damaged, n_blocks, shard_unreadable
from titanlite.data.unfinished import read_made, read_shard, shard_name, want, wanted_of
from titanlite.errors import NoMoreDataError

POLL_SECONDS = 0.1
_LOOK_SECONDS = 1.0  # between looks at whether somebody still works
_ALONE_SECONDS = 4.0  # in which nobody works, before it is an error: another process may be about to go on


class _There(NamedTuple):
    """The shards that are there at one moment."""

    folder: Path
    shards: Sequence[Shard]  # of a corpus that grows, the last one has no hashes yet
    dtype: np.dtype[Any]
    starts: np.ndarray  # [shards + 1] tokens before each
    blocks: np.ndarray  # [shards + 1] blocks before each
    checked: np.ndarray  # [blocks] bool, whether each is known to be right


class Corpus:
    """Read a corpus of token ids, from any thread and any process.

    Args:
        folder: of its shards.
        grows: whether it is still being made, and its folder not there.
        source: as the user wrote it; "" where that is not known.
        key: the config key of the source.
        terms: what decides whether its making fails, as `make_once` has it.
        data: the config of it.
        tokenizer: fingerprint of the tokenizer that made the ids; "" where that is not known.
        files: of its source that were taken, passed over and met twice, in words.
        separator: id that ends each document; None where that is not known.
        inputs: hash of what its tokens are made of, where that is known.
        check: called with its meta.json when it is whole.

    Raises:
        DataError: meta.json cannot be read, or a shard is missing or has another size than it says.
    """

    def __init__(
        self,
        folder: Path,
        *,
        grows: bool = False,
        source: str = "",
        key: str = "data.source",
        terms: str = "",
        data: Data | None = None,
        tokenizer: str = "",
        files: str = "",
        separator: int | None = None,
        inputs: str = "",
        check: Callable[[Meta], object] = lambda meta: None,
    ) -> None:
        self.folder, self.source, self.key, self.terms = folder, source, key, terms
        self.tokenizer, self.files, self.separator, self.inputs = tokenizer, files, separator, inputs
        self.wanted = 0  # tokens that were asked for so far, while it grows
        self._data, self._check_meta, self._unfinished = data or Data(), check, unfinished_of(folder)
        self._meta: Meta | None = None
        self._there = _seen(self._unfinished, (), "uint16")
        self._alone_since, self._looked = math.inf, -math.inf
        self._lock = threading.RLock()
        self._closed = threading.Event()
        if grows:
            self._look_at_made()
        else:
            self._open()

    @property
    def is_whole(self) -> bool:
        """Return whether all of it is there."""
        return self._meta is not None

    @property
    def meta(self) -> Meta:
        """Return what meta.json says; only of one that is whole."""
        assert self._meta is not None  # noqa: S101
        return self._meta

    @property
    def tokens(self) -> int:
        """Return the tokens that are there to stay."""
        return int(self._there.starts[-1])

    @property
    def fingerprint(self) -> str:
        """Return the fingerprint of all tokens; "": not known yet."""
        return self._meta.fingerprint if self._meta else ""

    @property
    def checked(self) -> np.ndarray:
        """Return which blocks are known to be right, of all shards in a row."""
        return self._there.checked

    @property
    def activity(self) -> tuple[int, int]:
        """Return what changes as long as somebody works."""
        with suppress(OSError):
            return self.tokens, lock_of(self.folder).stat().st_mtime_ns
        return self.tokens, 0

    def wait(self, tokens: int) -> int | None:
        """Wait until so many tokens are there, or all are.

        Returns:
            The number of all tokens; None if it is not known yet.

        Raises:
            NoMoreDataError: they will not come: the process that makes them has failed, or this is closed.
        """
        while not self.is_whole:
            self.poll()
            if self.is_whole or self.tokens >= tokens:
                break
            if self._closed.is_set():
                raise NoMoreDataError(f"{self.source!r}: closed while token {tokens:,} was waited for")
            self.wanted = 0  # look again: another reader may have written a smaller number over this one's
            self._want(tokens)
            time.sleep(POLL_SECONDS)
        if not self.is_whole:
            self._want(tokens)
        return self.tokens if self.is_whole else None

    def read(self, start: int, count: int) -> np.ndarray:
        """Copy some tokens, across shard boundaries; wait for those that are not there yet.

        Returns:
            [count] int64.

        Raises:
            IndexError: there are no such tokens.
            NoMoreDataError: they will not come.
            DataError: a shard has changed, or cannot be read.
        """
        self.wait(start + count)
        if start < 0 or count < 0 or start + count > self.tokens:
            raise IndexError(f"tokens {start} … {start + count} of {self.tokens}")
        with self._explained():
            try:
                return self._copy(self._there, start, count)
            except FileNotFoundError:  # the folder may have got its name meanwhile
                self.poll()
                if not self.is_whole:
                    raise
                return self._copy(self._there, start, count)

    def check(self, block: int) -> None:
        """Hold a block against its hash, once; without one, against the largest id that its shard should have.

        Raises:
            DataError: the shard has changed, or cannot be read.
        """
        self._check(self._there, block)

    def poll(self) -> None:
        """Look how far it is.

        Raises:
            NoMoreDataError: nobody makes it any more, or the cache cannot be read.
        """
        with self._lock, self._explained():
            if self.is_whole:
                return
            self._look_at_made()
            if time.monotonic() - self._looked < _LOOK_SECONDS and self._unfinished.exists():
                return
            self._looked = time.monotonic()
            said = maker_failed(self.folder, self.terms)  # before: who has ended has given it its name
            if self.folder.exists():
                self._open()
                wanted_of(self._unfinished).unlink(missing_ok=True)
            elif said:
                raise NoMoreDataError(said)
            elif said is None:
                self._alone_since = math.inf
            else:
                self._alone_since = min(self._alone_since, self._looked)
                if self._looked - self._alone_since >= _ALONE_SECONDS:
                    raise self._abandoned()

    def close(self) -> None:
        """Let nobody wait any longer."""
        self._closed.set()

    def _open(self) -> None:
        meta = Meta.read(self.folder)
        there = _seen(self.folder, meta.shards, meta.dtype)
        for i, shard in enumerate(meta.shards):
            _check_size(there, i, _file_size(self.folder, self.folder / shard.path))
        self._check_meta(meta)
        self._there, self._meta = there, meta

    def _look_at_made(self) -> None:
        """Take note of what is there of a folder that is being made."""
        made, known = read_made(self._unfinished), self._there
        if made is None or made.all_tokens == self.tokens:
            return
        found = [shard for shard in known.shards[: made.n_shards] if shard.hashes]
        n_checked = known.blocks[len(found)]
        with suppress(OSError, ValueError, TypeError, KeyError):  # it got its name, or what follows is damaged
            found += [read_shard(self._unfinished, n) for n in range(len(found), made.n_shards)]
            found += [Shard(shard_name(made.n_shards), made.tokens, made.max_id, made.max_at)] * (made.tokens > 0)
        there = _seen(self._unfinished, found, made.dtype)
        there.checked[:n_checked] = known.checked[:n_checked]
        self._there = there

    def _want(self, tokens: int) -> None:
        """Tell who makes it how many tokens are needed: he does not go too far ahead."""
        if tokens > self.wanted:
            with self._explained():
                want(self._unfinished, tokens)
        self.wanted = max(tokens, self.wanted)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Make what the system says of a cache that is being written the error that all ranks are told of."""
        try:
            yield
        except OSError as e:
            raise NoMoreDataError(*unusable_cache(self._data, e).args) from e

    def _copy(self, there: _There, start: int, count: int) -> np.ndarray:
        out, done, item = np.empty(count, np.int64), 0, there.dtype.itemsize
        shard = int(np.searchsorted(there.starts, start, side="right")) - 1
        while done < count:
            at = start + done - int(there.starts[shard])
            n = min(count - done, there.shards[shard].tokens - at)
            if n:
                for block in range(at * item // shards.BLOCK_BYTES, -(-(at + n) * item // shards.BLOCK_BYTES)):
                    self._check(there, int(there.blocks[shard]) + block)
                content = self._bytes(there, shard, at * item, n * item)
                out[done : done + n] = np.frombuffer(content, there.dtype, count=n)
            done, shard = done + n, shard + 1
        return out

    def _check(self, there: _There, block: int) -> None:
        if there.checked[block]:
            return
        at = int(np.searchsorted(there.blocks, block, side="right")) - 1
        shard, number = there.shards[at], block - int(there.blocks[at])
        start, end = number * shards.BLOCK_BYTES, shard.tokens * there.dtype.itemsize
        content = self._bytes(there, at, start, min(shards.BLOCK_BYTES, end - start))
        if shard.hashes:
            is_right = shards.block_hash(content) == shard.hashes[number]
        else:
            is_right = int(np.frombuffer(content, there.dtype).max(initial=0)) <= shard.max_id
        if not is_right:
            path, meta = there.folder / shard.path, there.folder / "meta.json"
            saw = f"{path} has changed: bytes {start} to {start + len(content)} are not those that were written"
            raise damaged(there.folder, saw, f"the content that {meta} was written for")
        there.checked[block] = True

    def _bytes(self, there: _There, shard: int, start: int, size: int) -> bytes:
        """Read bytes of one shard."""
        path = there.folder / there.shards[shard].path
        try:
            with open(path, "rb", buffering=0) as file:
                content = os.pread(file.fileno(), size, start)
                is_now = os.fstat(file.fileno()).st_size  # after reading: what was read is whole
        except OSError as e:
            if there.folder == self._unfinished:
                raise
            _check_size(there, shard, _file_size(there.folder, path))
            raise shard_unreadable(there.folder, e) from e
        if there.folder != self._unfinished or is_now < start + size:  # of the last one that grows, more may be there
            _check_size(there, shard, is_now)
        return content

    def _abandoned(self) -> NoMoreDataError:
        saw = f"{self.source!r}: the process that tokenizes it has ended without a word, killed perhaps"
        fix = f"look for what ended it, such as a lack of memory; the next start goes on from {self.tokens:,} tokens"
        return NoMoreDataError.of("data", self.key, saw, "one that goes on to the end of the source", fix)


def _seen(folder: Path, found: Sequence[Shard], dtype: str) -> _There:
    starts = np.cumsum([0] + [shard.tokens for shard in found])
    blocks = np.cumsum([0] + [n_blocks(shard, dtype) for shard in found])
    return _There(folder, found, np.dtype(dtype).newbyteorder("<"), starts, blocks, np.zeros(blocks[-1], bool))


def _check_size(there: _There, shard: int, size: int | None) -> None:
    path, expected = there.folder / there.shards[shard].path, there.shards[shard].tokens * there.dtype.itemsize
    if size != expected:
        saw = f"{path} is missing" if size is None else f"{path} has {size} bytes"
        raise damaged(there.folder, saw, f"{expected} bytes, as {there.folder / 'meta.json'} says")


def _file_size(folder: Path, path: Path) -> int | None:
    try:
        return path.stat().st_size if path.is_file() else None
    except OSError as e:  # before Python 3.14, of a folder that may not be entered
        raise shard_unreadable(folder, e) from e
