"""Read a TOML file and those it extends into one table, with the file and line of every key.

`extends` names files that come first, in order; the file itself comes last and wins. Tables are merged key by key,
anything else is replaced whole. A config names the files by path, a recipe by name.
"""

import copy
import errno
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import tomli

from titanlite.config.locate import key_lines
from titanlite.config.problems import Place, show
from titanlite.durable import require_reachable
from titanlite.errors import ConfigError, Problem, describe, nearest

Table = dict[str, Any]
_DEEPEST = 32  # levels of nested tables and lists, and of files that extend each other; valid files have a few
_LARGEST = 1 << 17  # bytes of a file; a larger one is no config


def shipped_folder(name: str) -> Path:
    """Return the folder of the shipped `configs` or `recipes`: in the wheel, or at the top of the checkout."""
    package = Path(__file__).parents[1]
    inside = package / "_shipped" / name
    return inside if inside.is_dir() else package.parent / name


def read_merged(
    path: Path, find: Callable[[str, Place], Path], added_first: str = ""
) -> tuple[Table, dict[str, Place]]:
    """Return a file merged with everything it extends, without `extends`, and the place of every dotted key.

    Args:
        path: the file.
        find: returns the file for a name in `extends` and the place of that name.
        added_first: name of a table whose order counts: in it, keys of a file come before keys of the files it extends.

    Raises:
        ConfigError: a file is missing or not TOML, `extends` is malformed, or files extend each other in a circle.
    """

    known = dict[str, tuple[Table, dict[str, Place]]]()  # by real path; several files may extend one

    def read_chain(path: Path, above: dict[str, Path]) -> tuple[Table, dict[str, Place]]:
        """Read a file and the files it extends. `above`: the files that extend it, by their real paths."""
        real = os.path.realpath(path)
        if real in known:
            return known[real]
        own, lines = _read_one(path)
        chain, line = {**above, real: path}, lines.pop("extends", None)
        extends: object = own.pop("extends", [])

        def refuse(saw: str, want: str, fix: str) -> ConfigError:
            return ConfigError(describe(str(path), [Problem("extends", saw, want, fix, line)]))

        table, places = Table(), dict[str, Place]()

        def merge(over: Table, over_places: dict[str, Place]) -> None:
            before = table.get(added_first)
            there = {*cast("Table", before)} if isinstance(before, dict) else set[str]()
            _merge_table(table, places, copy.deepcopy(over))  # merging changes nested tables in place
            places.update(over_places)
            if there and isinstance(after := table[added_first], dict):
                items = sorted(cast("Table", after).items(), key=lambda each: each[0] in there)  # new keys first
                table[added_first] = dict(items)

        for name in cast("list[object]", extends) if isinstance(extends, list) else [extends]:
            if not isinstance(name, str):
                raise refuse(show(name), "a list of names, in quotes", 'extends = ["base.toml"]')
            base = find(name, Place(str(path), line))
            require_reachable(base)
            if not os.path.isfile(base):
                want = f"the path of an existing TOML file; there is no file {base}"
                raise refuse(show(name), want, nearest_file(base))
            plain = os.path.normpath(base)  # without `..`, unless a link makes this another file
            base = Path(plain) if os.path.realpath(plain) == os.path.realpath(base) else base
            if os.path.realpath(base) in chain:
                circle = " → ".join(map(str, (*chain.values(), base)))
                want = f"files that do not extend each other in a circle: {circle}"
                raise refuse(show(name), want, "remove this name")
            if len(chain) == _DEEPEST:
                want = f"at most {_DEEPEST} files that extend each other, from {next(iter(chain.values()))} on"
                raise refuse(show(name), want, "list files beside each other: a later one wins")
            merge(*read_chain(base, chain))
        merge(own, {key: Place(str(path), at) for key, at in lines.items()})
        known[real] = table, places
        return table, places

    return read_chain(path, {})


def _read_one(path: Path) -> tuple[Table, dict[str, int]]:
    try:
        kind = path.stat()
        if not stat.S_ISREG(kind.st_mode) and not stat.S_ISDIR(kind.st_mode):  # reading it might block forever
            raise OSError(errno.EINVAL, "a pipe or a device")
        if stat.S_ISREG(kind.st_mode) and kind.st_size > _LARGEST:
            raise OSError(errno.EFBIG, f"{kind.st_size:,} bytes, which no config has")
        text = path.read_text(encoding="utf-8-sig")
        table, lines = tomli.loads(text), key_lines(text)
    except tomli.TOMLDecodeError as error:
        seen = error.doc.splitlines()[error.lineno - 1].strip() if error.pos < len(error.doc) else "end of file"
        want = f"valid TOML ({error.msg[0].lower()}{error.msg[1:]}, column {error.colno})"
        fix = "strings are in quotes, lists in [ ], booleans are true or false, a key stands once in its table"
        raise ConfigError(describe(str(path), [Problem(seen, "", want, fix, error.lineno)])) from None
    except UnicodeDecodeError as error:
        raise ConfigError.of(str(path), f"byte {error.start}", "", "text in UTF-8", "save the file as UTF-8") from None
    except (RecursionError, ValueError) as error:  # from tomli, if valid TOML exceeds Python's limits
        limit = str(error).partition(";")[0]
        problem = _too_deep(limit, None) if isinstance(error, RecursionError) else _too_large("a number", limit, None)
        raise ConfigError(describe(str(path), [problem])) from None
    except OSError as error:
        seen = (error.strerror or str(error)).lower()
        is_missing = isinstance(error, FileNotFoundError)
        fix = nearest_file(path) if is_missing else "make it a file that you can read, or name another"
        raise ConfigError.of(str(path), seen, "", f"a TOML file, looked for from {Path.cwd()}", fix) from None
    if problems := [*_meaningless(table, "", lines)]:
        raise ConfigError(describe(str(path), problems))
    return table, lines


def _meaningless(value: object, key: str, lines: dict[str, int], depth: int = 0) -> Iterator[Problem]:
    """Yield a problem for each value that TOML allows but no config: too deep, over 64 bits, or text with NUL."""
    line = lines.get(key)
    if isinstance(value, dict | list) and depth == _DEEPEST:
        yield _too_deep(key, line)
    elif isinstance(value, dict):
        for name, below in cast("Table", value).items():
            yield from _meaningless(below, f"{key}.{name}" if key else name, lines, depth + 1)
    elif isinstance(value, list):
        for n, below in enumerate(cast("list[object]", value)):
            yield from _meaningless(below, f"{key}[{n}]", lines, depth + 1)
    elif type(value) is int and value.bit_length() > 63:
        yield _too_large(key, f"a number of {value.bit_length():,} bits", line)
    elif isinstance(value, str) and "\0" in value:
        yield Problem(key, show(value), "text without NUL", "remove it", line)


def _too_deep(where: str, line: int | None) -> Problem:
    return Problem(where, "", f"tables and lists at most {_DEEPEST} deep", "take it out: a key is section.key", line)


def _too_large(where: str, saw: str, line: int | None) -> Problem:
    return Problem(where, saw, "whole numbers of at most 64 bits", "a smaller number", line)


def nearest_file(path: Path) -> str:
    """Return advice on a missing file: the TOML file beside `path` that was probably meant, or the shipped configs."""
    beside = {p.stem: p for p in sorted(path.parent.glob("*.toml")) if os.path.isfile(p)}
    shipped = sorted(p.name for p in shipped_folder("configs").glob("*.toml"))
    if path.name in shipped:
        return f"did you mean {shipped_folder('configs') / path.name}?"
    if near := nearest(path.stem, beside):
        return f"did you mean {beside[near]}? shipped ones are in {shipped_folder('configs')}"
    return f"write it, or start from one in {shipped_folder('configs')}: {', '.join(shipped)}"


def _merge_table(table: Table, places: dict[str, Place], over: Table, prefix: str = "") -> None:
    """Merge `over` into `table`, and remove the places of the values that it replaces."""
    for key, value in over.items():
        path = f"{prefix}{key}"
        if isinstance(value, dict) and isinstance(table.get(key), dict):
            _merge_table(table[key], places, cast("Table", value), f"{path}.")
            continue
        for old in [p for p in places if p == path or p.startswith((f"{path}.", f"{path}["))]:
            del places[old]
        table[key] = value
