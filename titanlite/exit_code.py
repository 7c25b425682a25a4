"""End a process: print a message for a user's mistake or a traceback for a bug, once for all ranks."""

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
_TORCHRUN_CLOCK_S = 1.0  # resolution of the times that torchrun records for failures


def exit_code(action: Callable[[], int | None]) -> int:
    """Run an action, print its error on stderr, and return an exit code.

    After an error `action` must leave its connections to other ranks open, so that this rank reports before they fail.
    Usually all ranks fail alike. Rank 0 reports at once. Other ranks wait, and the launcher ends them meanwhile if rank
    0 failed, too. A bug, or an error of one rank alone, is also written to torchrun's error file. Then torchrun prints
    it at the end of the log, even though other ranks fail because this rank has ended.

    Returns:
        The action's result, or 0 for None; 2 for a TitanliteError; 1 for a bug; 128 plus the number of the signal that
        interrupted the action before training, e.g. 130 for Ctrl-C; 141 if the reader of standard output has closed it.
    """
    guard_streams()
    try:
        return action() or 0
    except TitanliteError as error:
        return _tell_mistake(error)
    except KeyboardInterrupt as interrupt:  # raised for any signal, with its number as the argument
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
    the end. A thread of a library that hangs would keep a failed rank from ending. A process without a launcher has no
    such threads, and may have tools, such as coverage, that report when the interpreter ends.
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
        # Local rank 0 waits less than the other ranks of its host, so that the host reports the error once.
        time.sleep(_RANK_0_SPEAKS_S + (os.environ.get("LOCAL_RANK", "0") != "0"))
        _record(error)
    sys.stderr.write(f"[rank {rank}] {error}\n" if rank else f"{error}\n")
    return 2


def _record(error: Exception) -> None:
    """Write an error to torchrun's error file, and wait so that failures caused by this error get a later date.

    The file is replaced atomically: torchrun may end this process meanwhile, and fails on an incomplete file. If it
    cannot be written, only the message on stderr remains.
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
        write_durably(Path(error_file), json.dumps(redact_tree(json.loads(beside.read_text()))))  # replaces both files
        time.sleep(_TORCHRUN_CLOCK_S)
