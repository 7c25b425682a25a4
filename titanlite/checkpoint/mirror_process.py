"""Copy one checkpoint to the mirror in a process beside training, as `mirror.py` asks, and delete what is not kept.

Standard input has the task, as JSON; its step is 0 if only the mirror is to be made this start's. The last line of
standard output is the outcome, a JSON object: `{"is_new": bool}`, with `"kept": why` if nothing can be deleted;
`{"damaged": why}` if the local checkpoint is not what was saved; `{"lost": why}` if the mirror is not this start's any
more; or `{"failed": why}`. The process ends with the training process.
"""

import json
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import Any

from titanlite.checkpoint.mirror_store import BESIDE, Claim, MirrorStore
from titanlite.checkpoint.publish import step_folder
from titanlite.errors import CheckpointError, TitanliteError
from titanlite.file_system import in_one_line
from titanlite.json_file import parse_json

_LOOK_S = 0.5  # between looks at the training process


class _LostError(Exception):
    """Another run or start has the mirror."""


def main() -> None:
    """Carry out the task on standard input."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)  # the training process decides when this one ends
    os.nice(10)  # hashing and encryption give way to training
    outcome = os.dup(1)
    os.dup2(2, 1)  # prints of libraries are no outcome
    task = parse_json(sys.stdin.buffer.read())
    Thread(target=_end_with, args=(task["trainer"],), daemon=True).start()
    try:
        said = _mirror_step(task)
    except _LostError as lost:
        said = {"lost": f"{lost} writes there"}
    except CheckpointError as damaged:
        said = {"damaged": _text(damaged)}
    except Exception as error:  # exceptions of back ends have no common class
        said = {"failed": _text(error)}
    os.write(outcome, b"\n" + json.dumps(said).encode())
    os._exit(0)  # a library's threads may hang


def _end_with(trainer: int) -> None:
    """End this process at once when the process `trainer` has ended."""
    while os.getppid() == trainer:
        time.sleep(_LOOK_S)
    os._exit(1)


def _mirror_step(task: dict[str, Any]) -> dict[str, Any]:
    """Make the mirror this start's, copy the step, and delete what the mirror need not keep."""
    store, own, folder = MirrorStore(task["url"]), Claim(**task["claim"]), Path(task["folder"])

    def make_own() -> None:
        if (there := store.claim()) == own:
            return
        if there is not None and (there.id, there.name) != (own.id, own.name):
            raise _LostError(f"another run, {there.name},")
        if there is not None and own < there:
            raise _LostError("a later start")
        for name in BESIDE:
            with suppress(FileNotFoundError):
                store.write(name, (folder / name).read_bytes())
        store.write_claim(own)

    make_own()
    if not task["step"]:
        return {"is_new": False}
    said: dict[str, Any] = {"is_new": store.copy(step_folder(folder / "checkpoints", task["step"]), make_own)}
    make_own()
    try:
        store.prune(task["keep"], task["best_by"], task["newest"])
    except Exception as error:  # the copy is there
        said["kept"] = _text(error)
    return said


def _text(error: Exception) -> str:
    """Return what an error says in one line, which fits into the pipe that is read only when this process has ended."""
    said = " ".join(str(error).split()) if isinstance(error, TitanliteError) else in_one_line(error)
    return said[:4000]
