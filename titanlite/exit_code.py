"""End a process: one message for a mistake, the traceback for a bug, once for all ranks."""

import contextlib
import io
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
from titanlite.redact import redact_stream, redact_tree

_RANK_0_SPEAKS_S = 5.0
_TORCHRUN_CLOCK_S = 1.0  # it dates failures to the second


def exit_code(action: Callable[[], object]) -> int:
    """Do something and turn its end into an exit code.

    Ranks mostly fail alike. Rank 0 speaks at once; any other waits, and is ended by the launcher in the meantime if
    rank 0 failed too. A bug, and what failed on one rank alone, goes to torchrun's error file, so that it ends the log
    in spite of the ranks that fail because this one is gone.

    Args:
        action: what to do; until this process ends it leaves the connections to other ranks open.

    Returns:
        0, 2 for a mistake that the user can mend, 1 for a bug, or 128 and the number of the signal that interrupted it
        before training, 130 for Ctrl-C. The message of the mistake, or the bug's traceback, is then on stderr, without
        secrets.
    """
    guard_streams()
    try:
        action()
    except TitanliteError as error:
        rank = int(os.environ.get("RANK", "0"))
        if rank:
            # Local rank 0 goes before the others, so that a further host says it once.
            time.sleep(_RANK_0_SPEAKS_S + (os.environ.get("LOCAL_RANK", "0") != "0"))
            _record(error)
        _say(f"[rank {rank}] {error}\n" if rank else f"{error}\n")
        return 2
    except KeyboardInterrupt as interrupt:  # for any signal, whose number it then has
        return 128 + (interrupt.args or (signal.SIGINT,))[0]
    except Exception as bug:
        _record(bug)
        _say(traceback.format_exc())
        return 1
    return 0


def guard_streams() -> None:
    """Have standard output and standard error tell no secret, and a terminal of ASCII get escapes, and not an error."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    for stream in filter(None, (sys.stdout, sys.stderr)):
        redact_stream(stream)


def leave(code: int) -> NoReturn:
    """End this process with that exit code; where a launcher started it, without taking the interpreter apart.

    torch's process groups outlive `destroy_process_group`, and their threads the interpreter: now and then one of them
    aborts a rank that has trained to the end. A library's thread that hangs would keep a failed rank from ending. A
    process without peers has none of these, and may have tools that report when the interpreter ends.
    """
    for stream in filter(None, (sys.stdout, sys.stderr)):
        try:
            stream.flush()
        except OSError:  # nobody reads any more; the interpreter would try again, and end with a code of its own
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    if "RANK" not in os.environ:
        sys.exit(code)
    os._exit(code)


def _say(text: str) -> None:
    """Write to stderr; a terminal that is gone is told nothing."""
    with contextlib.suppress(OSError):
        sys.stderr.write(text)


def _record(error: Exception) -> None:
    """Tell torchrun, early enough to be dated before the failures that follow from this one.

    It may end this process meanwhile, because of another rank, and reads the file then: half of one would end it, too.
    Where there is no room for the file, or a cleaner of old files has taken its folder, what follows on stderr must do.
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
