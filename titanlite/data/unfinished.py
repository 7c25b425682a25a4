"""The progress of a folder of token shards that is still being made, for its readers and for a restart.

Its `progress.json`, replaced as a whole, has the number of tokens that are there for good, and what reading the source
had met by then. Each full shard has a `.json` with its hashes; both kinds of file have a hash of themselves. Tokens are
on disk before `progress.json` counts them: it ends with a good document. What lies behind is written again after a
restart. These files are deleted when the folder is complete.
"""

import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titanlite.data.shards import VERSION, Shard
from titanlite.durable import read_plain, write_durably
from titanlite.json_file import parse_json, without_hash

PROGRESS = "progress.json"


@dataclass(frozen=True)
class Made:
    """The content of progress.json."""

    dtype: str
    n_shards: int  # full ones
    tokens: int  # of the shard after these, as `max_id`, `max_at` and `content`
    max_id: int
    max_at: int
    content: str  # xxh3 of its bytes
    all_tokens: int
    read: dict[str, Any]  # `Tally.kept`
    version: int = VERSION

    @property
    def last(self) -> Shard:
        """Return the shard after the full ones, which has no hashes yet."""
        return Shard(shard_name(self.n_shards), self.tokens, self.max_id, self.max_at, ())


def shard_name(number: int) -> str:
    """Return the name of a shard's file."""
    return f"shard-{number:05d}.bin"


def read_shard(folder: Path, number: int) -> Shard:
    """Read the .json of a full shard.

    Raises:
        OSError: it is not there, or cannot be read.
        ValueError, TypeError or KeyError: it is damaged.
    """
    return Shard.of(without_hash(parse_json(read_plain((folder / shard_name(number)).with_suffix(".json")))))


def read_made(folder: Path) -> Made | None:
    """Read progress.json; None before the first document, and when the folder is complete."""
    try:
        made = Made(**without_hash(parse_json(read_plain(folder / PROGRESS))))
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return made if made.version == VERSION else None


def read_wanted(unfinished: Path) -> int:
    """Return how many tokens of an unfinished folder readers have asked for."""
    try:
        return int(read_plain(wanted_of(unfinished)))
    except (OSError, ValueError):
        return 0


def want(unfinished: Path, tokens: int) -> None:
    """Ask the maker of an unfinished folder for so many tokens: it waits for readers if its lead is limited."""
    if read_wanted(unfinished) < tokens:
        write_durably(wanted_of(unfinished), str(tokens), by=f".{os.getpid()}", on_disk=False)


def wanted_of(unfinished: Path) -> Path:
    """Return the file with the number of tokens that readers have asked for."""
    return unfinished.with_name(f"{unfinished.name}.wanted")


def empty(folder: Path) -> None:
    """Delete what a folder holds."""
    shutil.rmtree(folder)
    folder.mkdir()


def end(folder: Path) -> None:
    """Delete the files of progress. Any number of processes may do this at once."""
    for path in folder.glob("shard-*.json"):
        path.unlink(missing_ok=True)
    (folder / PROGRESS).unlink(missing_ok=True)
