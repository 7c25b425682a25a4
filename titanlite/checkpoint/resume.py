"""Which step a run goes on from, decided by the names of folders alone; no torch here.

`train.py` asks before it imports torch, so that a step that is not there is refused in a second; `Checkpoints.choose`
asks again for all ranks. The rules are chosen so that no work is lost in silence:

- `auto` takes the newest complete checkpoint, a step number exactly that one, `never` demands that there is none;
- resuming behind newer checkpoints is refused, for a later `auto` would take the abandoned branch;
- a folder that is only part of a checkpoint stops the run, it is not skipped.
"""

from pathlib import Path
from typing import Literal

from titanlite.checkpoint import publish
from titanlite.errors import CheckpointError, Problem, describe


def step_to_resume(root: Path, resume: Literal["auto", "never"] | int) -> int | None:
    """Choose a checkpoint; nothing is touched.

    Args:
        root: folder of the checkpoints.
        resume: `checkpoint.resume`.

    Returns:
        The step to load; None for a fresh start.

    Raises:
        CheckpointError: the named step is not there, newer ones exist, there are some in spite of `never`, or a folder
            is only part of a checkpoint.
    """
    steps = publish.complete_steps(root)
    if parts := publish.partial_folders(root):
        want = f"complete checkpoints only: one without {publish.MANIFEST} was copied in part or tampered with"
        fix = "copy it again, or move it away"
        raise CheckpointError(describe(str(root), [Problem(p, "incomplete", want, fix) for p in parts]))
    if resume == "auto":
        return steps[-1] if steps else None
    if resume == "never":
        if steps:
            fix = 'choose another job.name, or set checkpoint.resume = "auto"'
            raise _refused(root, f'"never", and there are {_list(steps)}', "a folder without checkpoints", fix)
        return None
    if resume not in steps:
        want = f"one of {_list(steps)}" if steps else f"a complete checkpoint in {root}; there is none"
        raise _refused(root, str(resume), want, 'name one that is there, or set checkpoint.resume = "auto"')
    if newer := [step for step in steps if step > resume]:
        want = f"the newest, {newer[-1]}: a later start would take up the abandoned branch ({_list(newer)}) again"
        fix = (
            f"move the newer ones away or delete them; or choose another job.name and copy "
            f"{publish.step_folder(root, resume).name} into its checkpoints folder"
        )
        raise _refused(root, str(resume), want, fix)
    return resume


def _refused(root: Path, saw: str, want: str, fix: str) -> CheckpointError:
    return CheckpointError(describe(str(root), [Problem("checkpoint.resume", saw, want, fix)]))


def _list(steps: list[int]) -> str:
    return ", ".join(str(step) for step in steps)
