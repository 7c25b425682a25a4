"""Sources: from the string in `data.source` to files.

    python_stdlib, python_stdlib_held_out   the .py files of this interpreter's standard library
    a path, a folder or a glob              .txt (one document), .jsonl and .parquet (one per record), .bin (token ids);
                                            lines of JSON also compressed, as .jsonl.gz, .json.gz, .jsonl.zst, .json.zst
    hf:<dataset>[:<config>[:<split>]]       a dataset of the Hugging Face hub, or a local folder of one

Names only: what is in the files is read by documents.py. No torch here: a source that matches nothing is reported
before torch is imported.
"""

import glob
import hashlib
import os
import re
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from titanlite.errors import DataError, Problem, describe, nearest
from titanlite.redact import STAR

CODECS = {".gz": "gzip", ".zst": "zstd"}
"""Of compressed lines of JSON, by what names end in: as pyarrow calls them."""
JSON_LINES = (".jsonl", *(f"{name}{end}" for name in (".jsonl", ".json") for end in CODECS))
SUFFIXES = (".txt", *JSON_LINES, ".parquet", ".bin")
# Not read, but not left out of a folder in silence either.
_COMPRESSED = tuple(f"{name}{end}" for name in (".txt", ".json", *JSON_LINES) for end in (*CODECS, ".xz", ".bz2"))

_STDLIB = ("python_stdlib", "python_stdlib_held_out")
_HUB_NAME = re.compile(r"[\w-]+(/[\w-]+)?")


@dataclass(frozen=True)
class Source:
    """What a source string stands for; nothing has been read yet."""

    name: str  # the string, as the user wrote it
    key: str  # dotted key it was written under, for messages
    kind: Literal["python", "text", "tokens", "dataset"]
    files: tuple[Path, ...]  # sorted; of a dataset: those below its folder, empty if it is on the hub
    dataset: tuple[str, str | None, str] | None = None  # path or hub name, config, split

    def stamps(self) -> list[tuple[str, int, int]]:
        """Path, size [bytes] and modification time [ns] of every file: what tells a changed input.

        Raises:
            DataError: a file is gone.
        """
        try:
            return [(str(f), (s := f.stat()).st_size, s.st_mtime_ns) for f in self.files]
        except OSError as e:
            raise unreadable(self.name, self.key, e.filename, e) from e

    def n_bytes(self) -> int | None:
        """Bytes to read, or None where that is not known beforehand."""
        return None if self.kind == "dataset" else sum(size for _, size, _ in self.stamps())


def resolve(source: str, key: str = "data.source") -> Source:
    """Find the files of a source, without reading them.

    Args:
        source: as `data.source` takes it.
        key: the config key it is from, for messages.

    Returns:
        The source; its files are sorted, so that every host reads them in one order.

    Raises:
        DataError: nothing matches, a folder cannot be read, a suffix is unknown, or token files are mixed with text.
    """
    if source in _STDLIB:
        return Source(source, key, "python", _stdlib_files(held_out=source.endswith("held_out")))
    if source.startswith("hf:"):
        return _resolve_dataset(source, key)
    files = _matches(source, key)
    if not files:
        known = f"{', '.join(_STDLIB)}, hf:<dataset>, or a path, folder or glob of {', '.join(SUFFIXES)}"
        saw = f"{source!r}, which matches no file (working directory: {Path.cwd()})"
        if os.path.isdir(os.path.expanduser(source)):
            saw = f"{source!r}, a folder with no file of a known type in it or below"
        fix = "correct the path; a relative one starts at the working directory, and ** stands for any folders"
        if near := nearest(source, _STDLIB):
            fix = f"did you mean {near}?"
        elif f"://{STAR}@" in source:
            fix = f"write the user and password that a record leaves out where {STAR} stands"
        elif _HUB_NAME.fullmatch(source) and not os.path.isdir(source.partition("/")[0]):
            fix = f"{fix}; a dataset of the hub of that name is hf:{source}"
        raise DataError(describe("data", [Problem(key, saw, known, fix)]))
    unknown = [f for f in files if not f.name.endswith(SUFFIXES)]
    if unknown:
        saw = f"{source!r}, which matches {len(unknown)} of another kind, first {unknown[0]}"
        known = next((suffix for f in files for suffix in SUFFIXES if f.name.endswith(suffix)), ".txt")
        fix = f"narrow the pattern, as in {str(unknown[0].parent / f'*{known}')!r}"
        fix = f"decompress them, or {fix}" if unknown[0].name.endswith(_COMPRESSED) else f"{fix}, or rename the files"
        raise DataError(describe("data", [Problem(key, saw, "files named " + ", ".join(SUFFIXES), fix)]))
    tokens = [f for f in files if f.suffix == ".bin"]
    if tokens and len(tokens) < len(files):
        text = next(f for f in files if f.suffix != ".bin")
        saw = f"{source!r}, which matches token files ({tokens[0]}, …) and text ({text}, …)"
        fix = f"give one of them, as in {str(tokens[0].parent / '*.bin')!r}"
        raise DataError(describe("data", [Problem(key, saw, "token files or text, not both", fix)]))
    return Source(source, key, "tokens" if tokens else "text", tuple(files))


def unreadable(source: str, key: str, path: Path | str, e: OSError) -> DataError:
    """What to raise where a file or folder of a source cannot be read."""
    want, fix = "files and folders that can be read", "make it readable, or leave it out of the pattern"
    return DataError(describe("data", [Problem(key, f"{source!r}: {path}: {e.strerror or e}", want, fix)]))


def _stdlib_files(held_out: bool) -> tuple[Path, ...]:
    root = Path(sysconfig.get_path("stdlib"))
    names: list[str] = []
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = [f for f in subfolders if f not in ("site-packages", "dist-packages", "__pycache__")]
        names += [os.path.relpath(os.path.join(folder, f), root) for f in files if f.endswith(".py")]
    return tuple(root / n for n in sorted(names) if _is_held_out(n) == held_out)


def _is_held_out(relative_path: str) -> bool:
    """One file in twenty, by its name alone: the split is the same on every machine and stays when files are added."""
    digest = hashlib.blake2b(Path(relative_path).as_posix().encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % 20 == 0


def _matches(source: str, key: str) -> list[Path]:
    path = os.path.expanduser(source)
    if os.path.isdir(path):
        found = [f for f in _glob(_all_below(path), source, key) if f.endswith((*SUFFIXES, *_COMPRESSED))]
    else:
        found = [path] if os.path.exists(path) else _glob(path, source, key)
    # The last part of a path stays as it is: of a link, as hubs and data-versioning tools make them, it has the suffix.
    # One to nothing, whose content was never fetched, stays too: it is refused where the file is looked at.
    files = [f for f in sorted(found) if os.path.isfile(f) or not os.path.exists(f)]
    folders = {folder: Path(folder).resolve() for folder in set(map(os.path.dirname, files))}
    return [folders[os.path.dirname(f)] / os.path.basename(f) for f in files]


def _all_below(folder: str) -> str:
    return os.path.join(glob.escape(folder), "**", "*")


def _glob(pattern: str, source: str, key: str) -> list[str]:
    """What matches. A folder that cannot be searched is a mistake: glob leaves it out without a word."""
    above = pattern
    while glob.has_magic(above):
        above, name = os.path.split(above)
        look = os.listdir if glob.has_magic(name) else os.stat
        for folder in glob.glob(os.path.join(above or os.curdir, ""), recursive=True):
            if os.path.basename(folder.rstrip(os.sep)) == "lost+found":
                continue  # the file system's own, at the top of a disk
            try:
                look(os.path.join(folder, os.curdir))  # itself, and so that it must be one that may be entered
            except OSError as e:
                raise unreadable(source, key, folder, e) from e
    return glob.glob(pattern, recursive=True)


def _resolve_dataset(source: str, key: str) -> Source:
    parts = source.removeprefix("hf:").split(":")
    want = "hf:<dataset>[:<config>[:<split>]], as in hf:allenai/c4:en or hf:/data/books::train"
    if not parts[0] or len(parts) > 3:
        problem = Problem(key, repr(source), want, "write the dataset's name on the hub, or the path of its folder")
        raise DataError(describe("data", [problem]))
    path = os.path.expanduser(parts[0])
    if path.startswith(("/", ".")) and not os.path.isdir(path):
        saw = f"{source!r}, and there is no folder {path} (working directory: {Path.cwd()})"
        raise DataError(describe("data", [Problem(key, saw, want, "correct the path of the folder")]))
    config, split = [*parts[1:], "", ""][:2]
    below = sorted(map(Path, _glob(_all_below(path), source, key))) if os.path.isdir(path) else []
    files = tuple(f.resolve() for f in below if f.is_file() or not f.exists())  # a link to nothing is refused by name
    return Source(source, key, "dataset", files, (path, config or None, split or "train"))
