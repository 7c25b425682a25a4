"""Read a corpus of token ids: whole, or while another process still tokenizes it (`background.py`).

Each sample is read through the page cache, which all ranks of a host share, and its file is closed again: a corpus of
thousands of files keeps no descriptors and mappings, and one that shrinks kills no process with SIGBUS. Each block is
held against its hash before its first token is read, as a file may change at equal size.

Reading waits for tokens that are not there yet. The folder that is being made says how many are there
(`shard_writer.py`); its lock, whether a process still makes it (`cache.py`).
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

_LOOK_SECONDS = 1.0  # between looks at whether somebody still works
_ALONE_SECONDS = 4.0  # without a maker, before it is an error: another process may be about to go on


class Corpus:
    """Read a corpus of token ids, from any thread and any process.

    `planned` is how its shards are made, if known; one that `grows` is still being made.

    Raises:
        DataError: meta.json cannot be read, a shard is missing or has another size than it says, or `planned` allows
            less than is there.
    """

    def __init__(self, folder: Path, planned: Preparation | None = None, grows: bool = False) -> None:
        self.folder, self._planned, self._unfinished = folder, planned, unfinished_of(folder)
        self.source, self._key, self.files = "", "data.source", ""
        if planned:
            self.source, self._key, self.files = planned.source.name, planned.source.key, planned.source.count
        self.tokenizer = planned.tokenizer.fingerprint if planned and planned.tokenizer else ""
        self.separator = planned.separator if planned else None
        self.inputs, self.terms = (planned.inputs, planned.terms) if planned else ("", "")
        self.wanted = 0  # tokens that were asked for, while it grows
        self._meta: Meta | None = None
        self._full: list[Shard] = []  # while it grows
        self._damage: DataError | None = None  # of the shard behind these
        self._there: tuple[list[HashedFile], np.ndarray] = [], np.zeros(1, np.int64)  # files, and tokens before each
        self._alone_since, self._looked = math.inf, -math.inf
        self._lock = threading.RLock()
        self._closed = threading.Event()
        if grows:
            self._look_at_made()
        else:
            self._open()

    @property
    def is_whole(self) -> bool:
        """Return whether all tokens are there."""
        return self._meta is not None

    @property
    def meta(self) -> Meta:
        """Return the meta.json of a whole corpus."""
        assert self._meta is not None  # noqa: S101
        return self._meta

    @property
    def tokens(self) -> int:
        """Return the number of tokens that are there."""
        return int(self._there[1][-1])

    @property
    def fingerprint(self) -> str:
        """Return the fingerprint of all tokens; "" until it is whole."""
        return self._meta.fingerprint if self._meta else ""

    @property
    def activity(self) -> tuple[int, int]:
        """Return numbers that change while a process makes it."""
        with suppress(OSError):
            return self.tokens, lock_of(self.folder).stat().st_mtime_ns
        return self.tokens, 0

    def wait(self, tokens: int) -> int | None:
        """Wait until so many tokens are there, or all; return the number of all tokens, or None if not yet known.

        Raises:
            NoMoreDataError: they will not come: the process that makes them has failed, or this is closed.
            DataError: the .json of their shard is damaged.
        """
        while not self.is_whole:
            self.poll()
            if self.is_whole or self.tokens >= tokens:
                break
            if damage := self._damage:
                raise damage
            if self._closed.is_set():
                raise NoMoreDataError(f"{self.source!r}: closed while token {tokens:,} was waited for")
            self.wanted = 0  # another reader may have overwritten it with a smaller number
            self._want(tokens)
            time.sleep(POLL_SECONDS)
        if not self.is_whole:
            self._want(tokens)
        return self.tokens if self.is_whole else None

    def read(self, start: int, count: int) -> np.ndarray:
        """Copy tokens across shard boundaries, [count] int64; wait for those that are not there yet.

        Raises:
            IndexError: there are no such tokens.
            NoMoreDataError: they will not come.
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
        """Return the blocks of all shards, as `check` takes them."""
        return ((file, block) for file in self._there[0] for block in range(len(file.checked)))

    def check(self, file: HashedFile, block: int) -> None:
        """Hold a block against its hash, once.

        Raises:
            DataError: the shard has changed, or cannot be read.
        """
        with self._explained():
            file.check(block)

    def poll(self) -> None:
        """Look how many tokens are there.

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
            said = maker_failed(self.folder, self.terms)  # before `exists`: a maker renames the folder, then ends
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
        """End all waits with an error."""
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
        """Tell the maker how many tokens are needed: it limits its lead by that."""
        if tokens > self.wanted:
            with self._explained():
                want(self._unfinished, tokens)
        self.wanted = max(tokens, self.wanted)

    @contextmanager
    def _explained(self, folder: Path | None = None) -> Iterator[None]:
        """Turn errors of files into a DataError that says what to do."""
        folder = folder or (self.folder if self.is_whole else self._unfinished)
        want = f"the content that {folder / 'meta.json'} was written for"
        try:
            yield
        except ChangedFileError as e:
            raise damaged(folder, str(e), want) from e
        except OSError as e:
            if folder == self._unfinished and self._planned:  # an error that all ranks hear of
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
    """Return the number of tokens before each shard, and of all."""
    return np.cumsum([0] + [shard.tokens for shard in shards])
