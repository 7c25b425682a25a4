"""Read a corpus while another process still tokenizes it (`background.py`).

What is asked for and not there yet is waited for. How much is there is said by the folder that is being made
(`unfinished.py`); that somebody still makes it, by the lock that he holds (`cache.py`). When the folder has got its
name, its shards are read as those of any other.
"""

import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np

from titanlite.data.cache import lock_of, maker_failed, unfinished_of
from titanlite.data.cache_folder import unusable_cache
from titanlite.data.prepare import Preparation
from titanlite.data.shards import BLOCK_BYTES, Shard, TokenShards, block_hash
from titanlite.data.unfinished import read_made, read_shard, shard_name, want, wanted_of
from titanlite.errors import DataError, NoMoreDataError

_POLL_SECONDS = 0.1
_LOOK_SECONDS = 1.0  # between looks at whether somebody still works
_ALONE_SECONDS = 4.0  # in which nobody works, before it is an error: another process may be about to go on


class GrowingShards:
    """A corpus of token ids that is still being made. Any thread may read it.

    Args:
        planned: what is being made.
    """

    def __init__(self, planned: Preparation) -> None:
        self.planned, self.folder = planned, planned.folder
        self.tokenizer = planned.tokenizer.fingerprint if planned.tokenizer else ""
        self.files, self.separator, self.inputs = planned.source.count, planned.separator, planned.inputs
        self.finished: TokenShards | None = None
        self.is_told_of = False  # to who reports what came of it
        self._unfinished = unfinished_of(planned.folder)
        self._made = read_made(self._unfinished)
        self._full: dict[int, Shard] = {}  # by number
        self._checked: set[tuple[int, int]] = set()  # blocks of these that are right
        self.wanted = 0  # tokens that were asked for so far
        self._alone_since, self._looked = math.inf, -math.inf
        self._lock = threading.RLock()
        self._closed = threading.Event()

    @property
    def tokens(self) -> int | None:
        """Return the number of all tokens; None: not known yet."""
        return self.finished.tokens if self.finished else None

    @property
    def fingerprint(self) -> str:
        """Return the fingerprint of all tokens; "": not known yet."""
        return self.finished.fingerprint if self.finished else ""

    @property
    def there(self) -> int:
        """Tokens that are there to stay."""
        return self.finished.tokens if self.finished else self._made.all_tokens if self._made else 0

    @property
    def activity(self) -> tuple[int, int]:
        """Return what changes as long as somebody works."""
        with suppress(OSError):
            return self.there, lock_of(self.folder).stat().st_mtime_ns
        return self.there, 0

    def wait(self, tokens: int) -> int | None:
        """Wait until so many tokens are there, or all are.

        Returns:
            The number of all tokens; None if it is not known yet.

        Raises:
            NoMoreDataError: they will not come: the process that makes them has failed, or this is closed.
        """
        while self.finished is None:
            self.poll()
            if self.finished is not None or self.there >= tokens:
                break
            if self._closed.is_set():
                raise NoMoreDataError(f"{self.planned.source.name!r}: closed while token {tokens:,} was waited for")
            self.wanted = 0  # look again: another reader may have written a smaller number over this one's
            self._want(tokens)
            time.sleep(_POLL_SECONDS)
        if self.finished is None:
            self._want(tokens)
        return self.finished.tokens if self.finished else None

    def read(self, start: int, count: int) -> np.ndarray:
        """Copy some tokens; wait for those that are not there yet.

        Returns:
            [count] int64.

        Raises:
            IndexError: there are no such tokens.
            NoMoreDataError: they cannot be read, or will not come.
            DataError: a shard has changed.
        """
        self.wait(start + count)
        with self._lock, self._explained():
            if self.finished is None:
                try:
                    return self._read(start, count)
                except FileNotFoundError:
                    self.poll()
                    if self.finished is None:
                        raise
            return self.finished.read(start, count)

    def poll(self) -> None:
        """Look how far it is.

        Raises:
            NoMoreDataError: nobody makes it any more, or the cache cannot be read.
        """
        with self._lock, self._explained():
            if self.finished is not None:
                return
            self._made = read_made(self._unfinished) or self._made
            if time.monotonic() - self._looked < _LOOK_SECONDS and self._unfinished.exists():
                return
            self._looked = time.monotonic()
            said = maker_failed(self.folder, self.planned.terms)  # before: who has ended has given it its name
            if self.folder.exists():
                self.finished = self.planned.open()
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

    def _want(self, tokens: int) -> None:
        """Tell who makes it how many tokens are needed: he does not go too far ahead."""
        if tokens > self.wanted:
            with self._explained():
                want(self._unfinished, tokens)
        self.wanted = max(tokens, self.wanted)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Make what the system says of the cache the error that all ranks are told of."""
        try:
            yield
        except OSError as e:
            raise NoMoreDataError(*unusable_cache(self.planned.data, e).args) from e

    def _read(self, start: int, count: int) -> np.ndarray:
        assert self._made is not None  # noqa: S101  # or there would be no token
        made, out, done = self._made, list[np.ndarray](), 0
        dtype = np.dtype(made.dtype).newbyteorder("<")
        each = self._shard(0).tokens if made.n_shards else made.tokens
        while done < count:
            number, at = divmod(start + done, each)
            n = min(count - done, each - at)
            path, offset, size = self._unfinished / shard_name(number), at * dtype.itemsize, n * dtype.itemsize
            with open(path, "rb", buffering=0) as file:
                if number < made.n_shards:
                    self._check(file.fileno(), number, offset, offset + size)
                content = os.pread(file.fileno(), size, offset)
            if len(content) < size:
                raise self._damaged(path, f"{path} ends before byte {offset + size}, which was there")
            out.append(np.frombuffer(content, dtype).astype(np.int64))
            done += n
        return np.concatenate(out) if out else np.empty(0, np.int64)

    def _check(self, file: int, number: int, start: int, end: int) -> None:
        """Hold the blocks of a full shard against their hashes, each once."""
        for block in range(start // BLOCK_BYTES, -(-end // BLOCK_BYTES)):
            if (number, block) not in self._checked:
                content = os.pread(file, BLOCK_BYTES, block * BLOCK_BYTES)
                if block_hash(content) != self._shard(number).hashes[block]:
                    path = self._unfinished / shard_name(number)
                    raise self._damaged(path, f"{path} has changed in its block {block}")
                self._checked.add((number, block))

    def _shard(self, number: int) -> Shard:
        if number not in self._full:
            try:
                self._full[number] = read_shard(self._unfinished, number)
            except (ValueError, TypeError, KeyError) as e:
                path = (self._unfinished / shard_name(number)).with_suffix(".json")
                raise self._damaged(path, f"{path}, which is damaged: {e}") from e
        return self._full[number]

    def _damaged(self, path: Path, saw: str) -> DataError:
        fix = f"delete {self._unfinished}; it is made again at the next start"
        return DataError.of(str(path), "token shards", saw, "the content that was written", fix)

    def _abandoned(self) -> NoMoreDataError:
        saw = f"{self.planned.source.name!r}: the process that tokenizes it has ended without a word, killed perhaps"
        fix = f"look for what ended it, such as a lack of memory; the next start goes on from {self.there:,} tokens"
        want = "one that goes on to the end of the source"
        return NoMoreDataError.of("data", self.planned.source.key, saw, want, fix)


def wait_for(corpora: "dict[str, GrowingShards]", is_held: Callable[[], bool]) -> None:
    """Wait until each is there or being made by somebody.

    Args:
        corpora: by the key of the source.
        is_held: returns whether somebody may still begin.
    """
    for shards in corpora.values():
        while not shards.folder.exists():
            said = maker_failed(shards.folder, shards.planned.terms)
            if said is None or not is_held():
                break
            time.sleep(_POLL_SECONDS)
