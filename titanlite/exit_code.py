"""How a process ends: one message for a mistake, the traceback for a bug, once for all ranks."""

import os
import signal
import sys
import time
from collections.abc import Callable

from titanlite.errors import TitanliteError

_RANK_0_SPEAKS_S = 5.0


def exit_code(action: Callable[[], object]) -> int:
    """Do something and turn its end into an exit code.

    Ranks mostly fail alike. Rank 0 speaks at once; any other waits, and is ended by the launcher in the meantime if
    rank 0 failed too. Bugs go to torchrun's error file, so that the first rank's traceback ends the log.

    Args:
        action: what to do.

    Returns:
        0, or 2 for a mistake that the user can mend, which is then on stderr.

    Raises:
        Exception: anything that is not a `TitanliteError`.
    """
    try:
        action()
    except TitanliteError as error:
        rank = int(os.environ.get("RANK", "0"))
        if rank:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            time.sleep(_RANK_0_SPEAKS_S)
        sys.stderr.write(f"[rank {rank}] {error}\n" if rank else f"{error}\n")
        return 2
    except Exception as bug:
        if "TORCHELASTIC_ERROR_FILE" in os.environ:
            from torch.distributed.elastic.multiprocessing.errors import get_error_handler

            get_error_handler().record_exception(bug)
        raise
    return 0
