"""Write token ids to shards, durably, and hash them meanwhile."""

import os
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from titanlite.data.shards import Shard, block_hashes, token_hash

_SHARD_TOKENS = 1 << 27


class ShardWriter:
    """Writes tokens to shards of equal length. Used as a context manager it leaves no file open, whatever fails."""

    def __init__(self, folder: Path, dtype: str, shard_tokens: int = _SHARD_TOKENS) -> None:
        self.folder, self._dtype, self._shard_tokens = folder, np.dtype(dtype).newbyteorder("<"), shard_tokens
        self._hash = token_hash(dtype)
        self._shards: list[Shard] = []
        self._file: Any = None
        self._tokens, self._max_id, self._max_at = 0, -1, 0
        self.keep()

    def __enter__(self) -> "ShardWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:  # NFS keeps a file that is open, and its folder with it
            self._file.close()

    def write(self, tokens: np.ndarray) -> None:
        """Append tokens, [N], whose ids fit the dtype."""
        tokens = tokens.astype(self._dtype, copy=False)
        while len(tokens):
            if self._file is None:
                self._file = self._path().open("wb")
            piece = tokens[: self._shard_tokens - self._tokens]
            self._file.write(piece.data)
            self._hash.update(piece.data)
            top = int(piece.argmax())
            if piece[top] > self._max_id:
                self._max_id, self._max_at = int(piece[top]), self._tokens + top
            self._tokens += len(piece)
            tokens = tokens[len(piece) :]
            if self._tokens == self._shard_tokens:
                self._end_shard()

    def keep(self) -> None:
        """Let what was written so far stay, whatever `drop` takes back."""
        self._kept = len(self._shards), self._tokens, self._max_id, self._max_at, self._hash.copy()

    def drop(self) -> None:
        """Take back what was written since the last `keep`."""
        if self._file is not None:
            self._file.close()
        n_shards, self._tokens, self._max_id, self._max_at, kept_hash = self._kept
        self._hash, self._file = kept_hash.copy(), None
        del self._shards[n_shards:]
        for path in sorted(self.folder.glob("shard-*.bin"))[n_shards + (self._tokens > 0) :]:
            path.unlink()
        if self._tokens:
            self._file = self._path().open("r+b")
            self._file.truncate(self._tokens * self._dtype.itemsize)
            self._file.seek(0, os.SEEK_END)

    def close(self) -> tuple[tuple[Shard, ...], str]:
        """End the last shard; return the shards and the fingerprint of their tokens."""
        self._end_shard()
        return tuple(self._shards), self._hash.hexdigest()

    def _path(self) -> Path:
        return self.folder / f"shard-{len(self._shards):05d}.bin"

    def _end_shard(self) -> None:
        if self._file is None:
            return
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        path = Path(self._file.name)
        self._shards.append(Shard(path.name, self._tokens, self._max_id, self._max_at, block_hashes(path)))
        self._file, self._tokens, self._max_id, self._max_at = None, 0, -1, 0
