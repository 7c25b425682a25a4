"""Read a corpus of token ids, complete or while another process still tokenizes it (`background.py`).

Each sample is read through the page cache, which all ranks of a host share, and its file is closed again. So a corpus
of thousands of files needs no open descriptors or mappings, and a file that shrinks kills no process with SIGBUS. Each
block is checked against its hash before its first use, as a file may change without a change of size.

Reading waits for tokens that are not written yet. The `progress.json` of the unfinished folder has the number of tokens
written (`shard_writer.py`). The folder's lock shows whether a process still works on it (`cache.py`).
"""

import math
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np

from titanlite.data.cache import POLL_SECONDS, lock_of, maker_failed, unfinished_of
from titanlite.data.cache_folder import Preparation, unusable_cache
from titanlite.data.shard_writer import read_made, read_shard, shard_name, want, wanted_of
from titanlite.data.shards import ChangedFileError, HashedFile, Meta, Shard, damaged, hashed_files, shard_unreadable
from titanlite.errors import DataError, NoMoreDataError

_LOOK_SECONDS = 1.0  # between checks whether a process still makes the shards
_ALONE_SECONDS = 4.0  # without a process that makes the shards, before an error: another may be about to continue


class Corpus:
    """A corpus of token ids, which any thread and any process can read.

    `planned`: the plan by which its shards are made, if known. `grows`: the shards are still being made.

    Raises:
        DataError: meta.json cannot be read, a shard is missing or does not have the size that meta.json states, or the
            corpus violates a limit of `planned`.
    """

    def __init__(self, folder: Path, planned: Preparation | None = None, grows: bool = False) -> None:
        self.folder, self._planned, self._unfinished = folder, planned, unfinished_of(folder)
        self.source, self._key, self.files = "", "data.source", ""
        if planned:
            self.source, self._key, self.files = planned.source.name, planned.source.key, planned.source.count
        self.tokenizer = planned.tokenizer.fingerprint if planned and planned.tokenizer else ""
        self.separator = planned.separator if planned else None
        self.inputs, self.terms = (planned.inputs, planned.terms) if planned else ("", "")
        self.wanted = 0  # tokens requested from the process that makes the shards
        self._meta: Meta | None = None
        self._full: list[Shard] = []  # the full shards of an incomplete corpus
        self._damage: DataError | None = None  # damage of the first shard after `_full`
        self._there: tuple[list[HashedFile], np.ndarray] = [], np.zeros(1, np.int64)  # files; tokens before each
        self._alone_since, self._looked = math.inf, -math.inf
        self._lock = threading.RLock()
        self._closed = threading.Event()
        if grows:
            self._look_at_made()
        else:
            self._open()

    @property
    def is_whole(self) -> bool:
        """Return whether the corpus is complete."""
        return self._meta is not None

    @property
    def meta(self) -> Meta:
        """Return the content of meta.json; only a complete corpus has it."""
        assert self._meta is not None  # noqa: S101
        return self._meta

    @property
    def tokens(self) -> int:
        """Return the number of tokens that can be read so far."""
        return int(self._there[1][-1])

    @property
    def fingerprint(self) -> str:
        """Return the fingerprint of all tokens; "" until the corpus is complete."""
        return self._meta.fingerprint if self._meta else ""

    @property
    def activity(self) -> tuple[int, int]:
        """Return the number of tokens and the time of the lock file, which change while a process makes the shards."""
        with suppress(OSError):
            return self.tokens, lock_of(self.folder).stat().st_mtime_ns
        return self.tokens, 0

    def wait(self, tokens: int) -> int | None:
        """Wait until `tokens` tokens can be read or the corpus is complete; return its size if complete, else None.

        Raises:
            NoMoreDataError: the tokens will not come: the process that makes them has failed, or `close` was called.
            DataError: the .json file of a shard is damaged.
        """
        while not self.is_whole:
            self.poll()
            if self.is_whole or self.tokens >= tokens:
                break
            if damage := self._damage:
                raise damage
            if self._closed.is_set():
                raise NoMoreDataError(f"{self.source!r}: closed while token {tokens:,} was waited for")
            self.wanted = 0  # repeat the request: another reader may have overwritten it with less
            self._want(tokens)
            time.sleep(POLL_SECONDS)
        if not self.is_whole:
            self._want(tokens)
        return self.tokens if self.is_whole else None

    def read(self, start: int, count: int) -> np.ndarray:
        """Return the tokens `start` … `start + count - 1` of the corpus, [count] int64; wait until they are written.

        Raises:
            IndexError: the corpus ends before these tokens, or an argument is negative.
            NoMoreDataError: the tokens will not come, see `wait`.
            DataError: a shard has changed, or cannot be read.
        """
        self.wait(start + count)
        if start < 0 or count < 0 or start + count > self.tokens:
            raise IndexError(f"tokens {start} … {start + count} of {self.tokens}")
        with self._explained():
            was_whole = self.is_whole
            try:
                return self._copy(start, count)
            except FileNotFoundError:  # the folder may have been renamed meanwhile
                if was_whole:
                    raise
                self.poll()
                return self._copy(start, count)

    def blocks(self) -> Iterator[tuple[HashedFile, int]]:
        """Yield the file and number of each block of the shards, the arguments of `check`."""
        return ((file, block) for file in self._there[0] for block in range(len(file.checked)))

    def check(self, file: HashedFile, block: int) -> None:
        """Check a block against its hash, unless it was checked before.

        Raises:
            DataError: the shard has changed, or cannot be read.
        """
        with self._explained():
            file.check(block)

    def poll(self) -> None:
        """Update the number of tokens that can be read.

        Raises:
            NoMoreDataError: no process makes more, or the cache cannot be read.
        """
        with self._lock, self._explained():
            if self.is_whole:
                return
            self._look_at_made()
            if time.monotonic() - self._looked < _LOOK_SECONDS and self._unfinished.exists():
                return
            self._looked = time.monotonic()
            said = maker_failed(self.folder, self.terms)  # call before `exists`: a maker renames the folder, then ends
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
        """Make `wait` raise an error, also for threads that wait already."""
        self._closed.set()

    def _open(self) -> None:
        meta = Meta.read(self.folder)
        files = hashed_files(self.folder, meta.shards, meta.dtype)
        with self._explained(self.folder):
            for file in files:
                file.check_size()
        if self._planned:
            self._planned.check(meta)
        self._there, self._meta = (files, _starts(meta.shards)), meta

    def _look_at_made(self) -> None:
        made, self._damage = read_made(self._unfinished), None
        if made is None or made.all_tokens == self.tokens:
            return
        shards = self._full[: made.n_shards]
        files = self._there[0][: len(shards)]
        try:
            while len(shards) < made.n_shards:
                shards.append(read_shard(self._unfinished, len(shards)))
        except (ValueError, TypeError, KeyError) as e:
            path = (self._unfinished / shard_name(len(shards))).with_suffix(".json")
            self._damage = damaged(self._unfinished, f"{path}, which is damaged: {e}", "the content that was written")
        except OSError:  # the folder was renamed
            pass
        self._full = [*shards]
        if made.tokens and len(shards) == made.n_shards:
            shards.append(made.last)
        files += hashed_files(self._unfinished, shards[len(files) :], made.dtype)
        self._there = files, _starts(shards)

    def _want(self, tokens: int) -> None:
        """Request tokens from the process that makes the shards, which may go only a limited number beyond requests."""
        if tokens > self.wanted:
            with self._explained():
                want(self._unfinished, tokens)
        self.wanted = max(tokens, self.wanted)

    @contextmanager
    def _explained(self, folder: Path | None = None) -> Iterator[None]:
        """Turn errors from reading files in the block into a DataError that names the fix."""
        folder = folder or (self.folder if self.is_whole else self._unfinished)
        want = f"the content that {folder / 'meta.json'} was written for"
        try:
            yield
        except ChangedFileError as e:
            raise damaged(folder, str(e), want) from e
        except OSError as e:
            if folder == self._unfinished and self._planned:  # this type of error reaches all ranks
                raise NoMoreDataError(*unusable_cache(self._planned.data, e).args) from e
            if isinstance(e, FileNotFoundError):
                raise damaged(folder, f"{e.filename} is missing", want) from e
            raise shard_unreadable(folder, e) from e

    def _copy(self, start: int, count: int) -> np.ndarray:
        (files, starts), out, done = self._there, np.empty(count, np.int64), 0
        shard = int(np.searchsorted(starts, start, side="right")) - 1
        while done < count:
            at = start + done - int(starts[shard])
            n = min(count - done, int(starts[shard + 1] - starts[shard]) - at)
            if n:
                out[done : done + n] = files[shard].read(at, n)
            done, shard = done + n, shard + 1
        return out

    def _abandoned(self) -> NoMoreDataError:
        saw = f"{self.source!r}: the process that tokenizes it has ended without a word, killed perhaps"
        fix = f"look for what ended it, such as a lack of memory; the next start goes on from {self.tokens:,} tokens"
        return NoMoreDataError.of("data", self._key, saw, "one that goes on to the end of the source", fix)


def _starts(shards: Sequence[Shard]) -> np.ndarray:
    """Return the number of tokens before each shard, and at the end the number of all tokens."""
    return np.cumsum([0] + [shard.tokens for shard in shards])
