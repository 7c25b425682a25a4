"""How a process ends: one message for a mistake, the traceback for a bug, once for all ranks."""

import os
import signal
import sys
import time
from collections.abc import Callable

from titanlite.errors import TitanliteError

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
        0, 2 for a mistake that the user can mend, which is then on stderr, or 130 if interrupted before training.

    Raises:
        Exception: anything that is not a `TitanliteError`.
    """
    try:
        action()
    except TitanliteError as error:
        rank = int(os.environ.get("RANK", "0"))
        if rank:
            # Local rank 0 goes before the others, so that a further host says it once.
            time.sleep(_RANK_0_SPEAKS_S + (os.environ.get("LOCAL_RANK", "0") != "0"))
            _record(error)
        sys.stderr.write(f"[rank {rank}] {error}\n" if rank else f"{error}\n")
        return 2
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except Exception as bug:
        _record(bug)
        raise
    return 0


def _record(error: Exception) -> None:
    """Tell torchrun, early enough to be dated before the failures that follow from this one."""
    if "TORCHELASTIC_ERROR_FILE" not in os.environ:
        return
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    get_error_handler().record_exception(error)
    time.sleep(_TORCHRUN_CLOCK_S)
