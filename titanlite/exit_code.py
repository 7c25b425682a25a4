"""End a process: print one message for a mistake, the traceback for a bug, once for all ranks."""

import contextlib
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from titanlite.durable import write_durably
from titanlite.errors import TitanliteError
from titanlite.redact import redact_tree
from titanlite.streams import OUTPUT, guard_streams, settle_streams

_RANK_0_SPEAKS_S = 5.0
_TORCHRUN_CLOCK_S = 1.0  # it dates failures to the second


def exit_code(action: Callable[[], int | None]) -> int:
    """Run an action that leaves connections to other ranks open, print its error on stderr, and return an exit code.

    Ranks mostly fail alike. Rank 0 reports at once; others wait, and the launcher ends them meanwhile if rank 0 failed,
    too. A bug, and an error of one rank alone, goes to torchrun's error file, so that it ends the log although other
    ranks fail because this one is gone.

    Returns:
        The action's result, 0 for None; 2 for a TitanliteError, 1 for a bug; 128 and the number of the signal that
        interrupted it before training: 130 for Ctrl-C, 141 if nobody reads its output.
    """
    guard_streams()
    try:
        return action() or 0
    except TitanliteError as error:
        return _tell_mistake(error)
    except KeyboardInterrupt as interrupt:  # of any signal, with its number
        return 128 + (interrupt.args or (signal.SIGINT,))[0]
    except Exception as bug:
        if isinstance(bug, BrokenPipeError) and bug.filename == OUTPUT:
            return 128 + signal.SIGPIPE
        if isinstance(bug, OSError) and (mistake := _mistake(bug)):
            return _tell_mistake(mistake)
        _record(bug)
        sys.stderr.write(traceback.format_exc())
        return 1
    finally:
        settle_streams()


def leave(code: int) -> NoReturn:
    """End this process with an exit code; under a launcher without finalising the interpreter.

    Threads of torch's process groups outlive `destroy_process_group`, and sometimes abort a rank that has trained to
    the end; a library's thread that hangs would keep a failed rank from ending. A process without peers has no such
    threads, and may have tools that report when the interpreter ends.
    """
    settle_streams()
    if "RANK" not in os.environ:
        sys.exit(code)
    os._exit(code)


def _mistake(error: OSError) -> TitanliteError | None:
    """Return the error to show for an OSError that the user can fix; None for a bug."""
    why = error.strerror or str(error)
    if error.filename == OUTPUT:
        want, fix = "a terminal, a file or a pipe that takes what is printed", "print to a disk that has room"
        return TitanliteError.of("titanlite", OUTPUT, why, want, fix)
    if isinstance(error, PermissionError) and error.filename is not None:
        want, fix = "files and folders that this user may read", "make it readable, or start as its owner"
        return TitanliteError.of("titanlite", str(error.filename), why, want, fix)
    return None


def _tell_mistake(error: TitanliteError) -> int:
    rank = int(os.environ.get("RANK", "0"))
    if rank:
        # Local rank 0 is first, so that another host reports it once.
        time.sleep(_RANK_0_SPEAKS_S + (os.environ.get("LOCAL_RANK", "0") != "0"))
        _record(error)
    sys.stderr.write(f"[rank {rank}] {error}\n" if rank else f"{error}\n")
    return 2


def _record(error: Exception) -> None:
    """Write torchrun's error file, early enough to be dated before failures that follow from this one.

    It is replaced at once: torchrun may end this process meanwhile, and fails on half a file. Without room or folder
    for it, the message on stderr must do.
    """
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if error_file is None:
        return
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    beside = Path(f"{error_file}.tmp")
    os.environ["TORCHELASTIC_ERROR_FILE"] = str(beside)
    with contextlib.suppress(OSError, ValueError):
        get_error_handler().record_exception(error)
        os.environ["TORCHELASTIC_ERROR_FILE"] = error_file
        write_durably(Path(error_file), json.dumps(redact_tree(json.loads(beside.read_text()))))  # in place of both
        time.sleep(_TORCHRUN_CLOCK_S)
