"""Write token ids to shards, durably, and hash them."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from titanlite.data import unfinished
from titanlite.data.shards import Shard, block_hashes, token_hash

_SHARD_TOKENS = 1 << 27


class ShardWriter:
    """Writes tokens to shards of equal length; a context manager that leaves no file open."""

    def __init__(self, folder: Path, dtype: str, shard_tokens: int = 0) -> None:
        self.folder, self._dtype = folder, np.dtype(dtype).newbyteorder("<")
        self._shard_tokens = shard_tokens or _SHARD_TOKENS
        self._hash, self._content = token_hash(dtype), xxhash.xxh3_64()  # of all tokens; of this shard's
        self._shards: list[Shard] = []
        self._said = 0  # shards whose .json is written
        self._file: Any = None
        self._tokens, self._max_id, self._max_at = 0, -1, 0
        self.keep()

    def __enter__(self) -> "ShardWriter":
        return self

    def __exit__(self, *error: object) -> None:
        if self._file is not None:  # NFS keeps an open file's folder
            self._file.close()

    @property
    def tokens(self) -> int:
        """Return the tokens written so far."""
        return sum(shard.tokens for shard in self._shards) + self._tokens

    def write(self, tokens: np.ndarray) -> None:
        """Append tokens, [N], whose ids fit the dtype."""
        tokens = tokens.astype(self._dtype, copy=False)
        while len(tokens):
            if self._file is None:
                self._file = self._path().open("wb")
            piece = tokens[: self._shard_tokens - self._tokens]
            self._file.write(piece.data)
            self._hash.update(piece.data)
            self._content.update(piece.data)
            top = int(piece.argmax())
            if piece[top] > self._max_id:
                self._max_id, self._max_at = int(piece[top]), self._tokens + top
            self._tokens += len(piece)
            tokens = tokens[len(piece) :]
            if self._tokens == self._shard_tokens:
                self._end_shard()

    def keep(self) -> None:
        """Keep what was written so far: `drop` goes back to here."""
        hashes = self._hash.copy(), self._content.copy()
        self._kept = len(self._shards), self._tokens, self._max_id, self._max_at, *hashes

    def drop(self) -> None:
        """Take back what was written since the last `keep`."""
        if self._file is not None:
            self._file.close()
        n_shards, self._tokens, self._max_id, self._max_at, kept_hash, kept_content = self._kept
        self._hash, self._content, self._file = kept_hash.copy(), kept_content.copy(), None
        del self._shards[n_shards:]
        unfinished.clear(self.folder, n_shards, is_begun=self._tokens > 0)
        self._reopen()

    def publish(self, read: dict[str, Any]) -> None:
        """Write what is kept to disk, then progress.json; nothing was written since `keep`.

        `read` is what reading the source has met, for a restart.
        """
        if self._file is not None:
            self._file.flush()
            os.fsync(self._file.fileno())
        for shard in self._shards[self._said :]:
            unfinished.write_shard(self.folder, shard)
        self._said = len(self._shards)
        n, content = len(self._shards), self._content.hexdigest()
        made = unfinished.Made(
            self._dtype.name, n, self._tokens, self._max_id, self._max_at, content, self.tokens, read
        )
        made.write(self.folder)

    def go_on(self, alive: Callable[[], object]) -> dict[str, Any] | None:
        """Go on from progress.json; `alive` is called again and again while shards are held against their hashes.

        Returns:
            What `publish` got last; None, with the folder emptied, if there is no such file or it is damaged.
        """
        made = unfinished.read_made(self.folder)
        try:
            shards = [unfinished.read_shard(self.folder, n) for n in range(made.n_shards)] if made else []
            hashes = made and unfinished.hashes_of(self.folder, made, shards, alive)
        except (FileNotFoundError, ValueError, TypeError, KeyError):
            hashes = None
        if not made or not hashes or made.dtype != self._dtype.name:
            unfinished.empty(self.folder)
            return None
        self._hash, self._content = hashes
        self._shards, self._tokens, self._max_id, self._max_at = shards, made.tokens, made.max_id, made.max_at
        self._said = len(shards)
        unfinished.clear(self.folder, made.n_shards, is_begun=made.tokens > 0)
        self._reopen()
        self.keep()
        return made.read

    def close(self) -> tuple[tuple[Shard, ...], str]:
        """End the last shard; return all shards and the fingerprint of their tokens."""
        self._end_shard()
        return tuple(self._shards), self._hash.hexdigest()

    def _path(self) -> Path:
        return self.folder / unfinished.shard_name(len(self._shards))

    def _reopen(self) -> None:
        if self._tokens:
            self._file = self._path().open("r+b")
            self._file.truncate(self._tokens * self._dtype.itemsize)
            self._file.seek(0, os.SEEK_END)

    def _end_shard(self) -> None:
        if self._file is None:
            return
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        path = Path(self._file.name)
        self._shards.append(Shard(path.name, self._tokens, self._max_id, self._max_at, block_hashes(path)))
        self._file, self._tokens, self._max_id, self._max_at = None, 0, -1, 0
        self._content = xxhash.xxh3_64()
