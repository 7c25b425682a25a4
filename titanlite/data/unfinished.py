"""Say how far a folder of token shards is that is still being made: to who reads it, and to who goes on with it.

Beside the shards lies `progress.json`, replaced as a whole: which tokens are there to stay, and what reading the source
had met by then. Each shard that is full has a `.json` of its own beside it, with its hashes; both kinds of file have a
hash of themselves. What `progress.json` says is on disk before it says so, and is never taken back: it ends with a
document, and only good documents are counted. What lies behind it is not looked at, and is written again after a
restart. All these files are gone soon after the folder got its name.
"""

import dataclasses
import hashlib
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from titanlite.data.shards import BLOCK_BYTES, VERSION, Shard, block_hash, token_hash
from titanlite.durable import read_plain, write_durably
from titanlite.json_file import parse_json, with_hash, without_hash

PROGRESS = "progress.json"


@dataclass(frozen=True)
class Made:
    """The part of a folder of shards that is there to stay."""

    dtype: str
    n_shards: int  # that are full
    tokens: int  # of the one after these
    max_id: int
    max_at: int
    content: str  # xxh3 of its bytes
    all_tokens: int  # of all shards
    read: dict[str, Any]  # `Tally.kept` of what was read
    version: int = VERSION

    def write(self, folder: Path) -> None:
        """Replace what the folder says, durably."""
        write_durably(folder / PROGRESS, with_hash(dataclasses.asdict(self)))


def shard_name(number: int) -> str:
    """Return the name of a shard's file."""
    return f"shard-{number:05d}.bin"


def write_shard(folder: Path, shard: Shard) -> None:
    """Say what is in a shard that is full."""
    write_durably((folder / shard.path).with_suffix(".json"), with_hash(dataclasses.asdict(shard)))


def read_shard(folder: Path, number: int) -> Shard:
    """Read what is in a shard that is full.

    Raises:
        OSError: it is not there, or cannot be read.
        ValueError: it is damaged, as TypeError and KeyError.
    """
    return Shard.of(without_hash(parse_json(read_plain((folder / shard_name(number)).with_suffix(".json")))))


def read_made(folder: Path) -> Made | None:
    """Read how far a folder is; None if it does not say so, as before its first document and when it is done."""
    try:
        made = Made(**without_hash(parse_json(read_plain(folder / PROGRESS))))
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return made if made.version == VERSION else None


def hashes_of(
    folder: Path, made: Made, shards: list[Shard], alive: Callable[[], object]
) -> "tuple[hashlib.blake2b, xxhash.xxh3_64] | None":
    """Hold what a folder has against what it says; what lies behind that is cut off; `alive` is called meanwhile.

    Returns:
        The hash of all its tokens, and that of the bytes of its last shard; None if they are not those it says.
    """
    tokens, content = token_hash(made.dtype), xxhash.xxh3_64()
    item = np.dtype(made.dtype).itemsize
    for shard in shards:
        if (folder / shard.path).stat().st_size != shard.tokens * item:
            return None
        with (folder / shard.path).open("rb") as file:
            for wanted in shard.hashes:
                block = file.read(BLOCK_BYTES)
                alive()
                if block_hash(block) != wanted:
                    return None
                tokens.update(block)
    if made.tokens:
        with (folder / shard_name(made.n_shards)).open("r+b") as file:
            file.truncate(made.tokens * item)  # of a file that is shorter, zeros are added, which are found
            for block in iter(lambda: file.read(BLOCK_BYTES), b""):
                alive()
                tokens.update(block)
                content.update(block)
        if content.hexdigest() != made.content:
            return None
    return tokens, content


def read_wanted(unfinished: Path) -> int:
    """Return how many tokens of an unfinished folder readers have asked for so far."""
    try:
        return int(read_plain(wanted_of(unfinished)))
    except (OSError, ValueError):
        return 0


def want(unfinished: Path, tokens: int) -> None:
    """Ask whoever makes an unfinished folder for so many tokens: a maker with a limited lead waits for that."""
    if read_wanted(unfinished) < tokens:
        write_durably(wanted_of(unfinished), str(tokens), by=f".{os.getpid()}", on_disk=False)


def wanted_of(unfinished: Path) -> Path:
    """Return the file beside a folder that says how many tokens readers have asked for."""
    return unfinished.with_name(f"{unfinished.name}.wanted")


def clear(folder: Path, n_shards: int, is_begun: bool) -> None:
    """Delete the shards from number `n_shards` on, but for the first of them if it `is_begun`."""
    for path in folder.glob("shard-*"):
        number = path.stem.removeprefix("shard-").partition(".")[0]
        if number.isdigit() and int(number) >= n_shards + (is_begun and path.suffix == ".bin"):
            path.unlink()


def empty(folder: Path) -> None:
    """Delete what a folder holds."""
    shutil.rmtree(folder)
    folder.mkdir()


def end(folder: Path) -> None:
    """Delete what only a folder that is still being made has. Any number of processes may do this at once."""
    for path in folder.glob("shard-*.json"):
        path.unlink(missing_ok=True)
    (folder / PROGRESS).unlink(missing_ok=True)
