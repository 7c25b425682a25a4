"""Write token ids to shards durably, and publish the progress for readers and for a restart.

A folder that is still being made has a `progress.json`, which is replaced atomically. It has the number of tokens that
are final, and the counts of the source's `Tally` at that point. Each full shard has a `.json` file with its hashes.
Both kinds of file contain a hash of their content. Tokens are on disk before `progress.json` counts them, and it counts
complete good documents only. All later tokens are written again after a restart. A complete folder has neither kind.
"""

import os
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from titanlite.data.shards import BLOCK_BYTES, VERSION, Shard, block_hashes, hashed_files, token_hash
from titanlite.durable import read_plain, write_durably
from titanlite.json_file import parse_json, with_hash, without_hash

_SHARD_TOKENS = 1 << 27
_HASHED_TOKENS = BLOCK_BYTES // 2  # tokens that a restart reads at once: one block of uint16, or two of uint32
PROGRESS = "progress.json"


@dataclass(frozen=True)
class Made:
    """The content of progress.json."""

    dtype: str
    n_shards: int  # number of full shards
    tokens: int  # of the shard after the full ones, like `max_id`, `max_at` and `content`
    max_id: int
    max_at: int
    content: str  # xxh3 of this shard's bytes
    all_tokens: int
    read: dict[str, Any]  # the result of `Tally.kept`
    version: int = VERSION

    @property
    def last(self) -> Shard:
        """Return the shard after the full ones, which has no hashes yet."""
        return Shard(shard_name(self.n_shards), self.tokens, self.max_id, self.max_at, ())


def shard_name(number: int) -> str:
    """Return the name of a shard's file."""
    return f"shard-{number:05d}.bin"


def read_shard(folder: Path, number: int) -> Shard:
    """Read the .json file of a full shard.

    Raises:
        OSError: the file does not exist, or cannot be read.
        ValueError, TypeError or KeyError: the file is damaged.
    """
    return Shard.of(without_hash(parse_json(read_plain((folder / shard_name(number)).with_suffix(".json")))))


def read_made(folder: Path) -> Made | None:
    """Read progress.json; None if it is damaged or missing, as before the first document and in a complete folder."""
    try:
        made = Made(**without_hash(parse_json(read_plain(folder / PROGRESS))))
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return made if made.version == VERSION else None


class ShardWriter:
    """Writes tokens to shards of equal length. As a context manager it closes its open file at the end."""

    def __init__(self, folder: Path, dtype: str, shard_tokens: int = 0) -> None:
        self.folder, self._dtype = folder, np.dtype(dtype).newbyteorder("<")
        self._shard_tokens = shard_tokens or _SHARD_TOKENS
        self._hash, self._content = token_hash(dtype), xxhash.xxh3_64()  # of all tokens; of the current shard
        self._shards: list[Shard] = []
        self._said = 0  # number of shards whose .json file is written
        self._file: Any = None
        self._tokens, self._max_id, self._max_at = 0, -1, 0
        self.keep()

    def __enter__(self) -> "ShardWriter":
        return self

    def __exit__(self, *error: object) -> None:
        if self._file is not None:  # NFS cannot delete the folder of an open file
            self._file.close()

    @property
    def tokens(self) -> int:
        """Return the number of tokens written so far."""
        return sum(shard.tokens for shard in self._shards) + self._tokens

    def write(self, tokens: np.ndarray) -> None:
        """Append `tokens`, [N] ids that fit the dtype of the shards."""
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
        """Mark all tokens written so far as good: `drop` returns to this point."""
        hashes = self._hash.copy(), self._content.copy()
        self._kept = len(self._shards), self._tokens, self._max_id, self._max_at, *hashes

    def drop(self) -> None:
        """Remove the tokens written since the last `keep`."""
        if self._file is not None:
            self._file.close()
        n_shards, self._tokens, self._max_id, self._max_at, kept_hash, kept_content = self._kept
        self._hash, self._content, self._file = kept_hash.copy(), kept_content.copy(), None
        del self._shards[n_shards:]
        self._reopen()

    def publish(self, read: dict[str, Any]) -> None:
        """Force all tokens to disk, then write progress.json. Call it only right after `keep`.

        `read`: the counts of reading the source (`Tally.kept`), from which a restart continues.
        """
        if self._file is not None:
            self._file.flush()
            os.fsync(self._file.fileno())
        for shard in self._shards[self._said :]:
            write_durably((self.folder / shard.path).with_suffix(".json"), with_hash(asdict(shard)))
        self._said, content = len(self._shards), self._content.hexdigest()
        last = self._tokens, self._max_id, self._max_at, content
        made = Made(self._dtype.name, self._said, *last, self.tokens, read)
        write_durably(self.folder / PROGRESS, with_hash(asdict(made)))

    def go_on(self, alive: Callable[[], object]) -> dict[str, Any] | None:
        """Continue from progress.json; `alive` is called repeatedly while shards are checked against their hashes.

        Returns:
            The argument of the last `publish`; None if progress.json or a shard is missing, damaged or of another
            dtype. The folder is empty then.
        """
        made, tokens, content = read_made(self.folder), self._hash.copy(), self._content
        try:
            if made is None or made.dtype != self._dtype.name:
                raise ValueError
            shards = [read_shard(self.folder, n) for n in range(made.n_shards)]
            for shard in (*shards, made.last):
                (file,), content = hashed_files(self.folder, [shard], made.dtype), xxhash.xxh3_64()
                for first in range(0, shard.tokens, _HASHED_TOKENS):
                    alive()
                    ids = file.read(first, min(_HASHED_TOKENS, shard.tokens - first)).data
                    tokens.update(ids)
                    content.update(ids)
            if content.hexdigest() != made.content:
                raise ValueError
        except (FileNotFoundError, ValueError, TypeError, KeyError):
            empty(self.folder)
            return None
        self._hash, self._content, self._shards, self._said = tokens, content, shards, len(shards)
        self._tokens, self._max_id, self._max_at = made.tokens, made.max_id, made.max_at
        self._reopen()
        self.keep()
        return made.read

    def close(self) -> tuple[tuple[Shard, ...], str]:
        """Complete the last shard; return all shards and the fingerprint of their tokens."""
        self._end_shard()
        return tuple(self._shards), self._hash.hexdigest()

    def _path(self) -> Path:
        return self.folder / shard_name(len(self._shards))

    def _reopen(self) -> None:
        """Delete all tokens after the current position, and open the shard to which the next tokens are appended."""
        for path in self.folder.glob("shard-*"):
            number = path.stem.removeprefix("shard-").partition(".")[0]
            if number.isdigit() and int(number) >= len(self._shards) + (self._tokens > 0 and path.suffix == ".bin"):
                path.unlink()
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


def read_wanted(unfinished: Path) -> int:
    """Return how many tokens of an unfinished folder readers have requested; 0: none."""
    try:
        return int(read_plain(wanted_of(unfinished)))
    except (OSError, ValueError):
        return 0


def want(unfinished: Path, tokens: int) -> None:
    """Request the first `tokens` tokens of an unfinished folder: its maker may wait for requests."""
    if read_wanted(unfinished) < tokens:
        write_durably(wanted_of(unfinished), str(tokens), by=f".{os.getpid()}", on_disk=False)


def wanted_of(unfinished: Path) -> Path:
    """Return the path of the file with the number of tokens that readers have requested."""
    return unfinished.with_name(f"{unfinished.name}.wanted")


def empty(folder: Path) -> None:
    """Delete the content of a folder."""
    shutil.rmtree(folder)
    folder.mkdir()


def end(folder: Path) -> None:
    """Delete the progress files of a complete folder. Any number of processes may do this at once."""
    for path in folder.glob("shard-*.json"):
        path.unlink(missing_ok=True)
    (folder / PROGRESS).unlink(missing_ok=True)
