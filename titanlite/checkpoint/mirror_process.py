"""Copy checkpoints to the mirror in a process beside training, one at a time, as `mirror.py` asks.

The first line of standard input is the task, as JSON; each further line is a step to copy, or 0: only see to it that
the mirror is this start's. Answers are JSON objects, one a line: `{"claimed": true}` once the mirror is made this
start's, and of each step `{"copied": step, "is_new": bool}`, `{"damaged": why}` for a local checkpoint that is not what
was saved, `{"lost": why}` if the mirror is not this start's any more, or `{"failed": why}`. The process ends with its
input, and with the training process.
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
from titanlite.errors import CheckpointError
from titanlite.file_system import in_one_line
from titanlite.json_file import parse_json

_LOOK_S = 0.5  # between looks at the training process


class _LostError(Exception):
    """Another run or start has the mirror."""


def main() -> None:
    """Carry out the steps on standard input until it ends."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)  # the training process decides when this one ends
    os.nice(10)  # hashing and encryption give way to training
    reports = os.dup(1)
    os.dup2(2, 1)  # prints of libraries do not go among the reports

    def say(**what: object) -> None:
        with suppress(BrokenPipeError):
            os.write(reports, json.dumps(what).encode() + b"\n")

    work = parse_json(sys.stdin.readline())
    Thread(target=_end_with, args=(work["trainer"],), daemon=True).start()
    store: MirrorStore | None = None
    for line in sys.stdin:
        try:
            store = store or MirrorStore(work["url"])
            if work["may_claim"]:
                _make_own(store, work)
                work["may_claim"] = False
                say(claimed=True)
            say(copied=int(line), is_new=_copy_step(store, int(line), work))
        except _LostError as lost:
            say(lost=str(lost))
        except CheckpointError as damaged:
            say(damaged=str(damaged))
        except Exception as error:  # exceptions of back ends have no common class
            say(failed=in_one_line(error))
    os._exit(0)  # a library's threads may hang


def _end_with(trainer: int) -> None:
    """End this process at once when the process `trainer` has ended."""
    while os.getppid() == trainer:
        time.sleep(_LOOK_S)
    os._exit(1)


def _make_own(store: MirrorStore, work: dict[str, Any]) -> None:
    """Make the mirror this start's, unless it is another run's."""
    own, there = Claim(**work["claim"]), store.claim()
    if there is not None and there.id != own.id:
        raise _LostError(f"another run, {there.name}, writes there")
    for name in BESIDE:
        with suppress(FileNotFoundError):
            store.write(name, Path(work["folder"], name).read_bytes())
    store.write_claim(own)


def _copy_step(store: MirrorStore, step: int, work: dict[str, Any]) -> bool:
    """Copy a step, and delete what the mirror need not keep; return whether the step was not there."""

    def require() -> None:
        if store.claim() != Claim(**work["claim"]):
            raise _LostError("a later start of this run, or another run, writes there")

    require()
    if not step:
        return False
    is_new = store.copy(step_folder(Path(work["folder"], "checkpoints"), step), require)
    require()
    store.prune(work["keep"], work["best_by"])
    return is_new
