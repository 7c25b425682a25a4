"""Say what is wrong with the paths of runs that a command is given, before anything is read."""

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from titanlite.durable import require_reachable
from titanlite.errors import Problem, describe, nearest
from titanlite.observe.metrics import RunError


def require_runs(
    command: str, folders: Sequence[Path], file: str, advice: Callable[[Path], str] = lambda folder: ""
) -> None:
    """Check that each path is the folder of a run with config.toml and the file that a command reads.

    Args:
        command: as "titanlite compare".
        folders: the paths.
        file: its name.
        advice: what to do about a folder that lacks the file; "" if that is not known.

    Raises:
        RunError: some are not, all of them at once.
    """
    problems = [problem for folder in folders if (problem := _path_problem(folder, file, advice)) is not None]
    if problems:
        raise RunError(describe(command, problems))


def _path_problem(folder: Path, file: str, advice: Callable[[Path], str]) -> Problem | None:
    require_reachable(folder / "config.toml")
    missing = [name for name in ("config.toml", file) if not os.path.isfile(folder / name)]
    if not missing:
        return None
    what = "there is no such folder"
    if os.path.lexists(folder):
        what = f"{' and '.join(missing)} missing" if os.path.isdir(folder) else "this is a file"
    meant = next(_runs_around(folder, file), None)
    fix = advice(folder) if os.path.isdir(folder) and file in missing else ""
    fix = fix or "give the path <dump_folder>/<name> of a run"
    want = f"a run's folder, with config.toml and {file}; {what}"
    return Problem(str(folder), "", want, fix if meant is None else f"did you mean {meant}?")


def _runs_around(path: Path, file: str) -> Iterator[Path]:
    """Return the runs near a path that is none: the one it is in, those in it, or one of nearly its name."""

    def runs(paths: Sequence[Path]) -> list[Path]:
        return [path for path in paths if all(os.path.isfile(path / name) for name in ("config.toml", file))]

    if os.path.lexists(path):
        yield from runs([*path.parents, *path.resolve().parents, *sorted(path.glob("*"))])
    elif near := nearest(path.name, [run.name for run in runs([*path.parent.glob("*")])]):
        yield path.parent / near
