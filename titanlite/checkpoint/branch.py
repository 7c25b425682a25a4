"""Find the checkpoint of another run from which a run starts (branches off). Does not import torch.

`checkpoint.initial_load_path` may name a run that is still training and saving. A branch starts from the newest
checkpoint of that run, and records its step in `branch.json` in the folder of the branch. If the branch is started
again before it has saved a checkpoint, it starts from the recorded step, not from a newer one of the other run.
"""

import json
import os
from pathlib import Path

from titanlite.checkpoint.publish import complete_steps, step_folder, step_of
from titanlite.config.build import show
from titanlite.durable import require_reachable, write_durably
from titanlite.errors import CheckpointError, nearest
from titanlite.hub import is_hub_name
from titanlite.json_file import MALFORMED, read_json

_KEY = "checkpoint.initial_load_path"
_RECORD = "branch.json"
_LISTED = 8  # the most runs or checkpoints that a message lists


def branch_point(path: str, run: Path) -> tuple[Path, int] | None:
    """Return (folder of checkpoints, step) of the other titanlite run from which a run starts.

    Args:
        path: `checkpoint.initial_load_path`: the folder of a run or of its checkpoints (the newest complete one is
            taken), or of one checkpoint.
        run: folder of the run that branches off. If it records a step for this path, that step is taken.

    Returns:
        None if `path` is empty, a name of the hub, or another kind of folder, such as one in Hugging Face's layout.

    Raises:
        CheckpointError: the other run has no complete checkpoint, or its checkpoint of the recorded step is gone; or
            the folder does not exist, but other runs or checkpoints are beside it.
    """
    folder = Path(os.path.expanduser(path))
    if is_hub_name(path):
        return None
    require_reachable(folder / "config.json")
    if not path or os.path.exists(folder / "config.json"):
        return None
    if not os.path.isdir(folder):
        if not os.path.exists(folder):
            _refuse_missing(path, folder)
        return None
    if (step := step_of(folder)) is not None:
        return folder.parent, step
    if _is_of_checkpoints(folder.parent):
        _refuse_checkpoint(path, folder)
    is_run = _is_run(folder)
    root = folder / "checkpoints" if is_run else folder
    if not (steps := complete_steps(root)):
        if is_run or _is_of_checkpoints(folder):
            _refuse_run(path, folder if is_run else folder.parent)
        return None
    if (step := remembered_step(path, run)) is None:
        return root, steps[-1]
    if step not in steps:
        saw = f"{show(path)}, whose checkpoint of step {step} is gone"
        want = f"that checkpoint, off which this run branched at its first start; there are {_list_of(steps)}"
        fix = f"put it back; or another job.name, or delete {run / _RECORD}, to branch off another step"
        raise CheckpointError.of(str(run), _KEY, saw, want, fix)
    return root, step


def remembered_step(path: str, run: Path) -> int | None:
    """Return the step at which `run` branched off `path`, or None. Raise CheckpointError if the record is damaged."""
    try:
        said = read_json(run / _RECORD)
        of, step = _real(said["initial_load_path"]), int(said["step"])
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, *MALFORMED) as e:
        want, fix = "what titanlite writes", "delete it, and the branch begins at the newest checkpoint"
        raise CheckpointError.of(str(run), _RECORD, f"{type(e).__name__}: {e}", want, fix) from None
    return step if of == _real(path) else None


def remember_branch(path: str, run: Path, step: int) -> None:
    """Record in the folder `run` that the run branches off `path` at `step`."""
    write_durably(run / _RECORD, json.dumps({"initial_load_path": _real(path), "step": step}) + "\n")


def _real(path: str) -> str:
    """Return the absolute path, without symbolic links and `~`."""
    return os.path.realpath(os.path.expanduser(path))


def _is_run(folder: Path) -> bool:
    """Return whether a folder is that of a run, also if the run has saved no checkpoint yet."""
    is_begun = all(os.path.exists(folder / name) for name in ("status.json", "config.toml"))
    return is_begun or os.path.isdir(folder / "checkpoints")


def _is_of_checkpoints(folder: Path) -> bool:
    """Return whether a path is the folder `checkpoints` of a run; it need not exist yet."""
    return folder.name == "checkpoints" and _is_run(folder.parent)


def _refuse_missing(path: str, folder: Path) -> None:
    """Refuse a missing path if checkpoints or runs are beside it: the user probably meant one of them."""
    if _is_of_checkpoints(folder.parent) or complete_steps(folder.parent):
        _refuse_checkpoint(path, folder)
    if _is_of_checkpoints(folder):
        _refuse_run(path, folder.parent)
    missing = [each for each in (folder, *folder.parents[:2]) if not os.path.exists(each)][-1]
    if folder.relative_to(missing).parts[:1] not in ((), ("checkpoints",)) or not os.path.isdir(missing.parent):
        return
    try:
        runs = {each.name: each.stat().st_mtime for each in missing.parent.iterdir() if _is_run(each)}
    except OSError:  # not readable: the code that loads weights from the path raises the error
        return
    if not runs:
        return
    newest = sorted(runs, key=runs.__getitem__, reverse=True)
    more = f" and {len(newest) - _LISTED} more" * (len(newest) > _LISTED)
    want = f"a run that is there ({', '.join(newest[:_LISTED])}{more}), or a folder in Hugging Face's layout"
    raise _not_there(path, want, missing.parent / (nearest(missing.name, runs) or newest[0]))


def _refuse_checkpoint(path: str, folder: Path) -> None:
    """Refuse a path in a run's folder of checkpoints that is not a complete checkpoint."""
    if not (steps := complete_steps(folder.parent)):
        _refuse_run(path, folder.parent.parent)
    want = f"a complete checkpoint of the run: of step {_list_of(steps)}"
    raise _not_there(path, want, step_folder(folder.parent, steps[-1]))


def _refuse_run(path: str, run: Path) -> None:
    want, fix = "a run with a complete checkpoint: this one has none", "let it save one, or name another run"
    raise CheckpointError.of(str(run), _KEY, show(path), want, fix)


def _not_there(path: str, want: str, instead: Path) -> CheckpointError:
    is_part = os.path.exists(os.path.expanduser(path))
    saw = f"{show(path)}, which is {'no complete checkpoint' if is_part else 'not there'}"
    return CheckpointError.of(str(instead.parent), _KEY, saw, want, f"initial_load_path = {show(str(instead))}")


def _list_of(steps: list[int]) -> str:
    more = [f"{len(steps) - _LISTED} earlier ones"] * (len(steps) > _LISTED)
    return ", ".join([*more, *map(str, steps[-_LISTED:])])
