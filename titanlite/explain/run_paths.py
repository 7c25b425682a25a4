"""Say what is wrong with the paths of runs that are to be explained, before anything is read."""

import shlex
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from titanlite.durable import require_reachable
from titanlite.errors import Problem, describe
from titanlite.json_file import read_json
from titanlite.observe.metrics import RunError
from titanlite.preflight.run_again import processes_of

_PROFILE = Path("profile", "rank0.json")
_WANT = "a run's folder, with config.toml and profile/rank0.json"
_FIX = "give the path <dump_folder>/<name> of a run"


def require_profiles(folders: Sequence[Path]) -> None:
    """Check that each path is the folder of a run with a profile.

    Raises:
        RunError: some are not, all of them at once.
    """
    if problems := [problem for folder in folders if (problem := _path_problem(folder)) is not None]:
        raise RunError(describe("titanlite explain", problems))


def _path_problem(folder: Path) -> Problem | None:
    require_reachable(folder / "config.toml")
    if not folder.is_dir():
        what = "it is a file" if folder.exists() else "there is no such folder"
        inside = [parent for parent in folder.parents if _is_profiled(parent)]
        return Problem(str(folder), "", f"{_WANT}; {what}", f"did you mean {inside[0]}?" if inside else _FIX)
    if not (folder / "config.toml").is_file():
        near = [*folder.resolve().parents[:2], *sorted(path.parent for path in folder.glob("*/config.toml"))]
        runs = [path for path in near if _is_profiled(path)]
        return Problem(str(folder), "", f"{_WANT}; config.toml missing", f"did you mean {runs[0]}?" if runs else _FIX)
    if not (folder / _PROFILE).is_file():
        return Problem(str(folder), "", f"{_WANT}; it has no profile", _command(folder))
    return None


def _is_profiled(folder: Path) -> bool:
    return (folder / "config.toml").is_file() and (folder / _PROFILE).is_file()


def _command(folder: Path) -> str:
    """Return the command that trains a run's config anew, under another name, with a profile."""
    name = f"{folder.resolve().name}-profiled"
    words = ["titanlite", "train", str(folder / "config.toml"), "--job.name", name, "--profiling.enable", "true"]
    receipt, processes = folder / "receipt.json", None
    with suppress(ValueError):
        processes = processes_of(read_json(receipt)) if receipt.is_file() else None
    return shlex.join([*words, *(["--gpus", str(processes)] if processes and processes > 1 else [])])
