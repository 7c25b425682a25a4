"""Run a module of titanlite in processes of its own, with as many ranks as a run had."""

import math
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

_STOP_S = 45.0  # torchrun gives its ranks 30 before it kills them


def processes_of(receipt: Any) -> int | None:
    """Return how many processes a run had, by the layout in the content of its receipt.json; None if it has none."""
    try:
        (layout,) = (entry["applied"] for entry in receipt if entry["feature"] == "parallelism")
        n = math.prod(layout.values())
        return n if isinstance(n, int) and n > 0 else None
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def run_again(module: str, arguments: Sequence[str], processes: int) -> int:
    """Run a module, as `titanlite.train`, to its end on processes of this host; show what it says if it fails.

    Returns:
        Its exit code.

    Raises:
        KeyboardInterrupt: this process was interrupted; the others have ended, or were told to.
    """
    launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(processes), "-m"]
    command = [sys.executable, "-m", *(launcher if processes > 1 else ()), module, *arguments]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,  # torchrun ends its ranks at one signal; Ctrl-C would be another
    ) as started:
        try:
            said, _ = started.communicate()
        except KeyboardInterrupt:
            started.terminate()
            with suppress(subprocess.TimeoutExpired):
                started.communicate(timeout=_STOP_S)  # until each rank has closed the pipe
            started.kill()
            raise
    if started.returncode:
        sys.stderr.write(said)
    return started.returncode
