"""Choose the cache folder of a source's shards by everything that determines their content, and check the cache."""

import errno
import glob
import hashlib
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from titanlite.config.schema import Data
from titanlite.data.shards import VERSION, Meta
from titanlite.data.sources import Source
from titanlite.data.tally import Tally
from titanlite.data.token_files import check_ids
from titanlite.data.tokenizer import Tokenizer
from titanlite.durable import disk_space_in
from titanlite.errors import DataError
from titanlite.file_system import is_url
from titanlite.hub import is_hub_name, read_name
from titanlite.redact import redact_urls


@dataclass(frozen=True)
class Preparation:
    """The plan for preparing a source: its files, the way to tokenize them, and the folder of its shards."""

    source: Source
    data: Data
    vocab_size: int
    tokenizer: Tokenizer | None  # None: the source is token files
    dtype: str
    stamps: list[tuple[str, int, int]]  # path, size and time of each file, by `Source.stamps`

    @cached_property
    def folder(self) -> Path:
        """Return the folder of the shards, which may not exist yet."""
        source, name = redact_urls(self.source.name), self.dtype
        if self.tokenizer:  # without the commit of a name of the hub: the key has what the tokenizer does
            given = self.tokenizer.name
            name = read_name(given, "").repo if is_hub_name(given) else Path(given).stem
        key = self._hash(source, self.stamps)
        return Path(os.path.expanduser(self.data.cache_dir)) / f"{slug(source)}-{slug(name)}-{key}"

    @property
    def inputs(self) -> str:
        """Return a hash of the tokenizer and of the files' names and sizes, used until the tokens have a fingerprint.

        The hash is equal on other hosts and after the files have moved.
        """
        sizes = [(os.path.basename(file), size, 0) for file, size, _ in self.stamps]
        return self._hash("" if sizes else redact_urls(self.source.name), sizes)

    @property
    def terms(self) -> str:
        """Return the settings that decide whether the preparation fails but do not change its folder."""
        limits = f"data.max_bad_records = {self.data.max_bad_records}, max_record_mib = {self.data.max_record_mib}"
        return f"{self.source.key}, {limits}"

    @property
    def separator(self) -> int | None:
        """Return the id that ends each document; None: not known."""
        return self.tokenizer.separator_id if self.tokenizer else self.data.separator_id

    @property
    def max_tokens(self) -> int:
        """Return the number of tokens at which reading ends; 0: the whole source is read."""
        return max_tokens_of(self.source, self.data)

    def check(self, meta: Meta) -> None:
        """Check shards, which another run may have made, against this run's limits.

        Raises:
            DataError: too many bad records, ids beyond the vocabulary, or no text.
        """
        key, limit = self.source.key, self.data.max_bad_records
        Tally(meta.source, key, limit, n_bad=meta.n_bad_records, bad=list(meta.bad_records)).check()
        check_ids(meta, self.vocab_size, key)
        if not meta.tokens:
            raise no_text(meta.source, key, meta.bad_records)

    def _hash(self, name: str, stamps: list[tuple[str, int, int]]) -> str:
        source, data = self.source, self.data
        identity = f"{self.tokenizer.fingerprint} {data.text_key}" if self.tokenizer else self.dtype
        cut = f" {self.max_tokens} by pieces" if self.max_tokens else ""
        cut += f" records to {data.max_record_mib}" if data.max_record_mib != Data.max_record_mib else ""
        cut += " by file" if source.dataset and source.files else ""  # titanlite reads these files, not `datasets`
        text = f"{VERSION} {source.kind} {name} {identity} {stamps}{cut}"
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def slug(name: str) -> str:
    """Turn a name into a part of a file name. A long name keeps its end, where paths differ most."""
    return re.sub(r"[^A-Za-z0-9._]+", "-", name).strip("-.")[-40:] or "source"


def max_tokens_of(source: Source, data: Data) -> int:
    """Return the number of tokens at which reading ends; 0: all is read, as for every key except data.source."""
    return max(0, data.max_tokens) if source.key == "data.source" else 0  # a negative number is reported elsewhere


def no_text(source: str, key: str, bad: Sequence[str]) -> DataError:
    """Return the error for a source without text."""
    saw = f"{source!r}, which holds no text" + (f" but bad records, as {bad[0]}" if bad else "")
    return DataError.of("data", key, saw, "at least one document", "give another source")


def check_cache_is_folder(data: Data) -> None:
    """Check that `data.cache_dir` is a folder, or that no file prevents its creation."""
    folder = Path(os.path.expanduser(data.cache_dir))
    for path in (folder, *folder.parents):
        if os.path.lexists(path) and not os.path.isdir(path):
            saw, fix = f"{data.cache_dir!r}: {path} is no folder", "set data.cache_dir to a folder"
            raise DataError.of("data", "data.cache_dir", saw, "a folder for token shards", fix)


def check_cache_is_outside(source: Source, data: Data) -> None:
    """Refuse a cache inside the folder of a source: the next run would read the shards as part of the source."""
    pattern = name = source.dataset[0] if source.dataset else source.name
    if "**" in name and not os.path.isdir(os.path.expanduser(name)):
        name = name.partition("**")[0] or os.curdir
    folder, cache = (Path(os.path.realpath(os.path.expanduser(path))) for path in (name, data.cache_dir))
    is_inside = os.path.isdir(folder) and cache.is_relative_to(folder)
    is_matched = any(place.match(str(folder)) for place in (cache, *cache.parents))
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
    """Return whether `cache` lies in a hidden folder that `pattern` does not search."""
    path = Path(os.path.expanduser(pattern))
    wild = [] if os.path.lexists(path) else [n for n, part in enumerate(path.parts) if glob.has_magic(part)]
    n_fixed = min(wild, default=len(path.parts))
    start = os.path.realpath(Path(*path.parts[:n_fixed]))
    below = cache.relative_to(start).parts if cache.is_relative_to(start) else ()
    return any(p.startswith(".") for p in below) and not any(p.startswith(".") for p in path.parts[n_fixed:])


def unusable_cache(data: Data, e: OSError) -> DataError:
    """Return the error for a cache that cannot be used."""
    want = "a folder for token shards, on a file system with locks and enough room"
    fix = disk_space_in(Path(os.path.expanduser(data.cache_dir)))[1]
    if e.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        want, fix = "a folder for token shards that can be entered and written", "make it writable"
    fix = f"{fix}, or set data.cache_dir to a folder on a local disk"
    return DataError.of("data", "data.cache_dir", f"{data.cache_dir!r}: {e}", want, fix)
