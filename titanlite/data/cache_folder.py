"""Name the folder of a source's shards, and check that the cache can hold it and is no part of the source."""

import errno
import glob
import hashlib
import os
import re
from pathlib import Path

from titanlite.config.schema import Data
from titanlite.data.remote import is_url
from titanlite.data.shards import VERSION
from titanlite.data.sources import Source
from titanlite.data.tokenizer import Tokenizer
from titanlite.durable import disk_space_in
from titanlite.errors import DataError
from titanlite.redact import redact_urls

Stamps = list[tuple[str, int, int]]
"""Path or URL, size in bytes and time of each file, as `Source.stamps` returns them."""


def shard_folder(source: Source, data: Data, tokenizer: Tokenizer | None, dtype: str, stamps: Stamps) -> Path:
    """Return the place of a source's shards, there or not."""
    source_name, name = redact_urls(source.name), dtype if tokenizer is None else Path(tokenizer.name).stem
    key = _hash(f"{source.kind} {source_name} {_ways(source, data, tokenizer, dtype, stamps)}")
    return Path(os.path.expanduser(data.cache_dir)) / f"{_slug(source_name)}-{_slug(name)}-{key}"


def inputs_hash(source: Source, data: Data, tokenizer: Tokenizer | None, dtype: str, stamps: Stamps) -> str:
    """Return a hash of what a source's tokens are made of, the same on other hosts and after a move of the files.

    It takes the place of the tokens' fingerprint as long as that is not known.
    """
    sizes = [(os.path.basename(file), size, 0) for file, size, _ in stamps]
    name = "" if sizes else redact_urls(source.name)
    return _hash(f"{source.kind} {name} {_ways(source, data, tokenizer, dtype, sizes)}")


def _ways(source: Source, data: Data, tokenizer: Tokenizer | None, dtype: str, stamps: Stamps) -> str:
    """Say which files a source's tokens are made of, and how."""
    identity = dtype if tokenizer is None else f"{tokenizer.fingerprint} {data.text_key}"
    max_tokens = max_tokens_of(source, data)
    cut = f" {max_tokens} by pieces" if max_tokens else ""
    cut += f" records to {data.max_record_mib}" if data.max_record_mib != Data.max_record_mib else ""
    cut += " by file" if source.dataset and source.files else ""  # once, it was what `datasets` made of them
    return f"{identity} {stamps}{cut}"


def _hash(text: str) -> str:
    return hashlib.blake2b(f"{VERSION} {text}".encode(), digest_size=8).hexdigest()


def _slug(name: str) -> str:
    """Make a name part of a file name, its end kept: that is where paths differ."""
    return re.sub(r"[^A-Za-z0-9._]+", "-", name).strip("-.")[-40:] or "source"


def max_tokens_of(source: Source, data: Data) -> int:
    """Return the tokens at which reading ends; 0: it does not. Held-out text is always read whole."""
    return max(0, data.max_tokens) if source.key == "data.source" else 0  # less is out of range, and reported


def is_folder(path: Path, unknown: bool = False) -> bool:
    """Return whether a path is a folder; `unknown` where that may not be read, which concerns only who writes there."""
    try:
        return path.is_dir()
    except OSError:  # before Python 3.14, of a folder above that may not be entered
        return unknown


def check_cache_is_folder(data: Data) -> None:
    """Check that the cache is a folder, or can become one."""
    folder = Path(os.path.expanduser(data.cache_dir))
    for path in (folder, *folder.parents):
        if os.path.lexists(path) and not is_folder(path, unknown=True):
            saw, fix = f"{data.cache_dir!r}: {path} is no folder", "set data.cache_dir to a folder"
            raise DataError.of("data", "data.cache_dir", saw, "a folder for token shards", fix)


def check_cache_is_outside(source: Source, data: Data) -> None:
    """Refuse a cache in the folder of a source, whose shards would be part of it the next time."""
    pattern = name = source.dataset[0] if source.dataset else source.name
    if "**" in name and not os.path.isdir(os.path.expanduser(name)):
        name = name.partition("**")[0] or os.curdir
    folder, cache = (Path(os.path.realpath(os.path.expanduser(path))) for path in (name, data.cache_dir))
    is_inside = os.path.isdir(folder) and cache.is_relative_to(folder)
    is_matched = any(place.match(str(folder)) for place in (cache, *cache.parents))  # and a folder is read
    if (
        not is_url(source.name)
        and source.kind in ("text", "dataset")
        and (is_inside or is_matched)
        and not _is_hidden(cache, pattern)
    ):
        want = f"a folder outside of {source.key} = {source.name!r}, which shards would be part of the next time"
        fix = "set data.cache_dir to another folder, or leave it out for the default"
        raise DataError.of("data", "data.cache_dir", repr(data.cache_dir), want, fix)


def _is_hidden(cache: Path, pattern: str) -> bool:
    """Return whether a folder lies in a hidden one below where a pattern starts: none such is entered unasked."""
    path = Path(os.path.expanduser(pattern))
    wild = [] if os.path.lexists(path) else [n for n, part in enumerate(path.parts) if glob.has_magic(part)]
    n_fixed = min(wild, default=len(path.parts))
    start = os.path.realpath(Path(*path.parts[:n_fixed]))
    below = cache.relative_to(start).parts if cache.is_relative_to(start) else ()
    return any(p.startswith(".") for p in below) and not any(p.startswith(".") for p in path.parts[n_fixed:])


def unusable_cache(data: Data, e: OSError) -> DataError:
    """Make the error to raise where the cache cannot be used."""
    want = "a folder for token shards, on a file system with locks and enough room"
    fix = disk_space_in(Path(os.path.expanduser(data.cache_dir)))[1]
    if e.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        want, fix = "a folder for token shards that can be entered and written", "make it writable"
    fix = f"{fix}, or set data.cache_dir to a folder on a local disk"
    return DataError.of("data", "data.cache_dir", f"{data.cache_dir!r}: {e}", want, fix)
