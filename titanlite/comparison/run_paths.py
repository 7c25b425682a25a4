"""Check the paths of runs that a command gets as arguments, before it reads any file."""

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from titanlite.durable import require_reachable
from titanlite.errors import Problem, describe, nearest
from titanlite.observe.metrics import RunError


def require_runs(
    command: str, folders: Sequence[Path], file: str = "", advice: Callable[[Path], str] = lambda folder: ""
) -> None:
    """Check that each path is the folder of a run, with config.toml and another file that the command reads.

    Args:
        command: name of the command, as "titanlite compare".
        folders: the paths to check.
        file: name of the other file; "" if there is none.
        advice: returns what to do about a folder that lacks `file`; "" if that is not known.

    Raises:
        RunError: a path is no such folder. The message names all such paths.
    """
    problems, files = list[Problem](), ["config.toml", *filter(None, (file,))]
    for folder in folders:
        require_reachable(folder / "config.toml")
        if missing := _files_missing(folder, files):
            what = "there is no such folder"
            if os.path.lexists(folder):
                what = f"{' and '.join(missing)} missing" if os.path.isdir(folder) else "this is a file"
            fix = advice(folder) if os.path.isdir(folder) and file in missing else ""
            fix = fix or "give the path <dump_folder>/<name> of a run"
            meant = next(_runs_around(folder, files), None)
            want = f"a run's folder, with {' and '.join(files)}; {what}"
            problems.append(Problem(str(folder), "", want, fix if meant is None else f"did you mean {meant}?"))
    if problems:
        raise RunError(describe(command, problems))


def _files_missing(folder: Path, files: Sequence[str]) -> list[str]:
    return [name for name in files if not os.path.isfile(folder / name)]


def _runs_around(path: Path, files: Sequence[str]) -> Iterator[Path]:
    """Yield runs near a path that is no run: its parents and subfolders, or one of similar name if it is missing."""

    def runs(paths: Sequence[Path]) -> list[Path]:
        return [path for path in paths if not _files_missing(path, files)]

    if os.path.lexists(path):
        yield from runs([*path.parents, *path.resolve().parents, *sorted(path.glob("*"))])
    elif near := nearest(path.name, [run.name for run in runs([*path.parent.glob("*")])]):
        yield path.parent / near
