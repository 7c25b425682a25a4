"""Resolve the string in `data.source` to files.

    python_stdlib, python_stdlib_held_out   the .py files of this interpreter's standard library
    a path, a folder or a glob              .txt (one document), .jsonl and .parquet (one per record), .bin (token ids);
                                            lines of JSON also compressed, as .jsonl.gz, .json.gz, .jsonl.zst, .json.zst
    s3://, gs://, https://, …               the same files at a URL, except token files (remote.py)
    hf:<dataset>[:<config>[:<split>]]       a dataset of the Hugging Face hub, or a local folder of one

This module finds files by name; documents.py reads them. Each file is taken once, even if several names lead to it.
Files of other types in a folder are counted. torch is not imported, so that a source without files is reported at once.
"""

import fnmatch
import glob
import hashlib
import os
import re
import sysconfig
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

from titanlite.data.remote import RemoteFile, list_files
from titanlite.errors import DataError, nearest
from titanlite.extras import missing_packages
from titanlite.file_system import is_url, refuse_chained
from titanlite.redact import STAR, redact_urls

CODECS = {".gz": "gzip", ".zst": "zstd"}
"""The endings of compressed files of JSON lines, and pyarrow's name for each compression."""
JSON_LINES = (".jsonl", *(f"{name}{end}" for name in (".jsonl", ".json") for end in CODECS))
SUFFIXES = (".txt", *JSON_LINES, ".parquet", ".bin")
# Endings that are refused in a folder, too, where files with other unknown endings are passed over.
_COMPRESSED = tuple(f"{name}{end}" for name in (".txt", ".json", *JSON_LINES) for end in (*CODECS, ".xz", ".bz2"))
_DOWNLOAD = (".aria2", ".crdownload", ".download", ".incomplete", ".part", ".partial", ".tmp")
_UNFINISHED = tuple(f"{name}{end}" for name in SUFFIXES for end in _DOWNLOAD)
_FIXES = (  # advice for files that cannot be read, by their endings
    (_COMPRESSED, "decompress them, or {narrow}"),
    (_UNFINISHED, "end the download, or delete what is left of it; or {narrow}"),
    ("", "{narrow}, or rename the files"),
)
BEGINNINGS = (
    (b"\x1f\x8b\x08", "gzip"),
    (b"\x28\xb5\x2f\xfd", "zstd"),
    (b"PK\3\4", "a zip archive, as torch.save writes one"),
    (b"PAR1", "Parquet"),
    (b"version https://git-lfs", "a pointer of Git LFS, whose file was not fetched"),
)
"""The first bytes of a file, and the kind of file that they indicate."""

_STDLIB = ("python_stdlib", "python_stdlib_held_out")
_HUB_NAME = re.compile(r"[\w-]+(/[\w-]+)?")

SourceFile = Path | RemoteFile


@dataclass(frozen=True)
class Source:
    """The files that a source string stands for; nothing has been read yet."""

    name: str  # the string, as the user wrote it
    key: str  # the config key of the source
    kind: Literal["python", "text", "tokens", "dataset"]
    files: tuple[SourceFile, ...]  # sorted; for a dataset, the files below its folder, none if it is on the hub
    dataset: tuple[str, str | None, str] | None = None  # path or hub name, config, split
    count: str = ""  # message: how many files were taken, passed over and found twice; "" for a dataset

    def stamps(self) -> list[tuple[str, int, int]]:
        """Return path, size [bytes] and modification time [ns] of every file, to detect changed files.

        Raises:
            DataError: a file is gone.
        """
        files = self.files
        if is_url(self.name) and self.kind == "text":  # list the URL again
            files = list_files(self.name, self.key, SUFFIXES)[0]
        try:
            return [(str(f), (s := f.stat()).st_size, s.st_mtime_ns) for f in files]
        except OSError as e:
            raise unreadable(self.name, self.key, e.filename, e) from e

    @property
    def paths(self) -> tuple[Path, ...]:
        """Return the local files; token files are never remote."""
        return tuple(file for file in self.files if isinstance(file, Path))

    def refused(self, what: str, want: str, fix: str) -> DataError:
        """Return the error about this source: its message has the source's name, `what`, `want` and `fix`."""
        return DataError.of("data", self.key, f"{self.name!r}{what}", want, fix)

    @property
    def needs_pyarrow(self) -> bool:
        """Return whether pyarrow reads a file: Parquet, or compressed lines of JSON."""
        return any(ending(file).endswith((".parquet", *CODECS)) for file in self.files)

    def require_packages(self) -> None:
        """Raise a DataError if a package that reads the source's texts is not installed."""
        needed = ["datasets"] if self.kind == "dataset" else ["pyarrow"] if self.needs_pyarrow else []
        if missing := missing_packages(*needed):
            raise self.refused("", *missing)

    def n_bytes(self) -> int | None:
        """Return the number of bytes of all files; None for a dataset."""
        return None if self.kind == "dataset" else sum(size for _, size, _ in self.stamps())


def resolve(source: str, key: str = "data.source") -> Source:
    """Find the files of a source, sorted, so that every host reads them in the same order.

    Raises:
        DataError: nothing matches, a folder cannot be read, a suffix is unknown, or token files are mixed with text.
    """
    if source in _STDLIB:
        files = _stdlib_files(sysconfig.get_path("stdlib"), source.endswith("held_out"))
        return Source(source, key, "python", files, count=_files_taken(len(files)))
    if source.startswith("hf:"):
        return _resolve_dataset(source, key)
    refuse_chained(source, key)
    if f"://{STAR}@" in source or (is_url(source) and f"={STAR}" in source):
        left_out = "user and password" if f"://{STAR}@" in source else "a token"
        saw = f"{source!r}, from which the record of a run has left {left_out} out"
        fix = f"write them where {STAR} stands, or give the URL again with --{key}"
        raise DataError.of("data", key, saw, "the whole URL", fix)
    if is_url(source):
        return _resolve_url(source, key)
    walk = _Walk(source, key)
    files = walk.files()
    if not files:
        known = f"{', '.join(_STDLIB)}, hf:<dataset>, or a path, folder or glob of {', '.join(SUFFIXES)}"
        saw = f"{source!r}, which matches no file (working directory: {Path.cwd()})"
        if os.path.isdir(os.path.expanduser(source)):
            saw = f"{source!r}, a folder with no file of a known type in it or below"
        fix = "correct the path; a relative one starts at the working directory, and ** stands for any folders"
        if near := nearest(source, _STDLIB):
            fix = f"did you mean {near}?"
        elif _HUB_NAME.fullmatch(source) and not os.path.isdir(source.partition("/")[0]):
            fix = f"{fix}; a dataset of the hub of that name is hf:{source}"
        raise DataError.of("data", key, saw, known, fix)
    _check_kinds(source, key, files)
    kind = "tokens" if ending(files[0]) == ".bin" else "text"
    return Source(source, key, kind, tuple(files), count=walk.count(len(files)))


def files_below(source: str, key: str, folder: str) -> Iterator[str]:
    """Yield the files below a folder, without hidden ones; raise a DataError if a subfolder cannot be read."""
    return _Walk(source, key).below(folder)


def ending(file: SourceFile | str) -> str:
    """Return the member of `SUFFIXES` with which a file's name ends, in upper or lower case, or ""."""
    name = (file if isinstance(file, str) else file.name).lower()
    return next((suffix for suffix in SUFFIXES if name.endswith(suffix)), "")


def _resolve_url(source: str, key: str) -> Source:
    files, passed = list_files(source, key, SUFFIXES, is_start=True)
    name = redact_urls(source)
    if unknown := [f for f in files if not ending(f.name)]:
        fix = "narrow the pattern, or copy them to a disk or a bucket under such names"
        raise _another_kind(name, key, unknown, fix)
    if any(ending(f.name) == ".bin" for f in files):
        want = "text: token files are read at random places, as a disk of this host can"
        fix = "copy them to a disk of this host, and name that"
        raise DataError.of("data", key, f"{name!r}, token files", want, fix)
    return Source(source, key, "text", tuple(files), count=_files_taken(len(files), passed))


def _check_kinds(source: str, key: str, files: list[Path]) -> None:
    """Refuse files of unknown kinds, token files beside text, and a file beside its compressed form."""
    if unknown := [f for f in files if not ending(f)]:
        known = next((suffix for f in files if (suffix := ending(f))), ".txt")
        narrow = f"narrow the pattern, as in {str(unknown[0].parent / f'*{known}')!r}"
        fix = next(fix for endings, fix in _FIXES if unknown[0].name.lower().endswith(endings))
        raise _another_kind(source, key, unknown, fix.format(narrow=narrow))
    tokens = [f for f in files if ending(f) == ".bin"]
    if tokens and len(tokens) < len(files):
        text = next(f for f in files if ending(f) != ".bin")
        saw = f"{source!r}, which matches token files ({tokens[0]}, …) and text ({text}, …)"
        fix = f"give one of them, as in {str(tokens[0].parent / '*.bin')!r}"
        raise DataError.of("data", key, saw, "token files or text, not both", fix)
    if odd := next((f for f in files if os.path.exists(f) and not os.path.isfile(f)), None):  # reading it may never end
        saw, fix = f"{source!r}, which matches {odd}, a pipe or a device", "write what comes out of it to a file"
        raise DataError.of("data", key, saw, "files", fix)
    stems: dict[str, Path] = {}
    for file in files:
        if ending(file) in JSON_LINES:
            other = stems.setdefault(str(file)[: -len(ending(file))], file)
            if other != file:
                saw = f"{source!r}, which matches {other} and {file.name}, as if one were made from the other"
                fix = f"narrow the pattern, as in {str(file.parent / f'*{ending(other)}')!r}, or move one of them away"
                raise DataError.of("data", key, saw, "the records of each file once", fix)


def _another_kind(source: str, key: str, unknown: Sequence[SourceFile], fix: str) -> DataError:
    saw = f"{source!r}, which matches {len(unknown)} of another kind, first {unknown[0]}"
    return DataError.of("data", key, saw, "files named " + ", ".join(SUFFIXES), fix)


def unreadable(source: str, key: str, path: SourceFile | str, e: OSError) -> DataError:
    """Return the error for a file or folder of a source that cannot be read."""
    want, fix = "files and folders that can be read", "make it readable, or leave it out of the pattern"
    if e.errno is None:  # raised by pyarrow while it decompresses
        want, fix = "a whole file of the kind that its name says", "fetch or write it again, or rename it"
    return DataError.of("data", key, f"{source!r}: {path}: {e.strerror or e}", want, fix)


@cache
def _stdlib_files(root: str, held_out: bool) -> tuple[Path, ...]:
    names: list[str] = []
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = [f for f in subfolders if f not in ("site-packages", "dist-packages", "__pycache__")]
        below = "" if folder == root else os.path.join(os.path.relpath(folder, root), "")
        names += [below + f for f in files if f.endswith(".py")]
    return tuple(Path(root, n) for n in sorted(names) if _is_held_out(n) == held_out)


def _is_held_out(relative_path: str) -> bool:
    """Return whether a file is held out: one in twenty, by a hash of its path alone, so that all hosts agree."""
    digest = hashlib.blake2b(relative_path.replace(os.sep, "/").encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % 20 == 0


class _Walk:
    """Finds the files of a source. A folder is searched once for each pattern, so that a cycle of links ends."""

    def __init__(self, source: str, key: str) -> None:
        self._source, self._key = source, key
        self._entered: dict[tuple[int, int, tuple[str, ...]], str] = {}
        self._again: list[str] = []  # further names of files and folders found before
        self._passed: list[str] = []  # files of a folder that have no known ending

    def files(self) -> list[Path]:
        """Return the files that the source names or matches, and those below its folders, sorted."""
        path = os.path.expanduser(self._source)
        found: list[str] = []
        for match in [path] if os.path.lexists(path) else self._matches(*_pattern_parts(path)) if path else []:
            if not os.path.isdir(match):
                found.append(match)
                continue
            for file in self.below(match):
                known = ending(file) or file.lower().endswith((*_COMPRESSED, *_UNFINISHED))
                (found if known else self._passed).append(file)
        # Links to folders are resolved, but links to files are not: hubs and data-versioning tools give the suffix to
        # the link alone. A broken link is refused when the file is opened.
        files = self._once(found)
        folders = {folder: Path(folder).resolve() for folder in set(map(os.path.dirname, files))}
        return [folders[os.path.dirname(f)] / os.path.basename(f) for f in files]

    def below(self, folder: str) -> Iterator[str]:
        return (f for f in self._matches(folder, ("**", "*")) if not os.path.isdir(f))

    def count(self, n_taken: int) -> str:
        again = set(self._again)
        twice = f"; met twice and taken once: {len(again):,}, as {min(again)}" if again else ""
        return _files_taken(n_taken, set(self._passed)) + twice

    def _once(self, found: Iterable[str]) -> list[str]:
        """Return each file once, sorted. Of several names of a file, one that is not a link is preferred."""
        taken: dict[tuple[int, int] | str, str] = {}
        for file in sorted(set(found), key=lambda f: (os.path.islink(f), f)):
            try:
                stat = os.stat(file)
                same = taken.setdefault((stat.st_dev, stat.st_ino), file)
            except OSError:
                same = taken.setdefault(file, file)
            self._again += [file] * (same != file)
        return sorted(taken.values())

    def _matches(self, folder: str, parts: tuple[str, ...]) -> Iterator[str]:
        """Yield the paths below `folder` that match the pattern `parts`; raise a DataError if one is unreadable."""
        if not parts:
            yield folder
            return
        part, rest = parts[0], parts[1:]
        try:
            inside = os.path.join(folder, os.curdir)  # fails unless the folder may be entered
            stat, entries = os.stat(inside), list[os.DirEntry[str]]()
            if glob.has_magic(part):
                with os.scandir(inside) as all_of_it:  # links last: real names are preferred
                    entries = sorted(all_of_it, key=lambda e: (e.is_symlink(), e.name))
        except (FileNotFoundError, NotADirectoryError):
            return
        except OSError as e:
            raise unreadable(self._source, self._key, folder, e) from e
        met = self._entered.get((stat.st_dev, stat.st_ino, parts))
        self._entered[stat.st_dev, stat.st_ino, parts] = met or folder
        if met is not None:
            self._again += [folder] * (os.path.normpath(met) != os.path.normpath(folder))
            return
        if part == "**":
            yield from self._matches(folder, rest)
        elif not entries and not glob.has_magic(part) and os.path.lexists(os.path.join(folder, part)):
            yield from self._matches(os.path.join(folder, part), rest)
        for entry in entries:
            # Hidden files and the file system's folder `lost+found` are left out.
            if entry.name == "lost+found" or (entry.name.startswith(".") and not part.startswith(".")):
                continue
            path = os.path.join(folder, entry.name)
            if part == "**":
                if entry.is_dir(follow_symlinks=False) or (entry.is_symlink() and os.path.isdir(path)):
                    yield from self._matches(path, parts)
            elif fnmatch.fnmatchcase(entry.name, part):
                yield from self._matches(path, rest)


def _pattern_parts(pattern: str) -> tuple[str, tuple[str, ...]]:
    """Split a pattern into its start folder and parts. `**/**` becomes `**`, and a `**` at the end becomes `**/*`."""
    parts = [*pattern.split(os.sep), *["*"] * pattern.endswith("**")]
    start = os.sep if pattern.startswith(os.sep) else ""
    return start, tuple(p for p, before in zip(parts, ["", *parts], strict=False) if p != "**" or before != "**")


def _files_taken(n: int, passed: Collection[str] = ()) -> str:
    names = counted_names(os.path.splitext(f)[1] or os.path.basename(f) for f in passed)
    return f"{n:,} file{'s' * (n != 1)} taken" + f"; passed over: {names}" * bool(passed)


def counted_names(names: Iterable[str], is_file: bool = False) -> str:
    """Count names, the most frequent first: `2 .md, 1 Makefile`, or `2 .md files, 1 Makefile file`."""
    found = Counter(names).most_common()
    return ", ".join(f"{n:,} {name}" + f" file{'s' * (n > 1)}" * is_file for name, n in found)


def _resolve_dataset(source: str, key: str) -> Source:
    parts = source.removeprefix("hf:").split(":")
    want = "hf:<dataset>[:<config>[:<split>]], as in hf:allenai/c4:en or hf:/data/books::train"
    if not parts[0] or len(parts) > 3:
        fix = "write the dataset's name on the hub, or the path of its folder"
        raise DataError.of("data", key, repr(source), want, fix)
    path = os.path.expanduser(parts[0])
    if path.startswith("//"):
        name = "/".join(path.removeprefix("//").removeprefix("datasets/").split("/")[:2])
        raise DataError.of("data", key, f"{source!r}, a URL", want, f"hf:{name}, and the config or split behind it")
    if not path.startswith(("/", ".")) and os.path.isdir(path):
        saw = f"{source!r}, the name of a dataset of the hub and of a folder in the working directory, {Path.cwd()}"
        fix = f"{source.replace('hf:', 'hf:./', 1)} for the folder; for the hub, start in another directory"
        raise DataError.of("data", key, saw, "one of them", fix)
    if path.startswith(("/", ".")) and not os.path.isdir(path):
        saw = f"{source!r}, and there is no folder {path} (working directory: {Path.cwd()})"
        raise DataError.of("data", key, saw, want, "correct the path of the folder")
    config, split = [*parts[1:], "", ""][:2]
    below = files_below(source, key, path) if os.path.isdir(path) else ()
    files = sorted({Path(f).resolve() for f in below})
    return Source(source, key, "dataset", tuple(files), (path, config or None, split or "train"))
