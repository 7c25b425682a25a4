"""Run a module of titanlite in new processes, with as many ranks as an earlier run had."""

import math
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

_STOP_S = 45.0  # torchrun gives its ranks 30 s before it kills them


def processes_of(receipt: Any) -> int | None:
    """Return the number of processes of a run by its receipt.json, parsed; None if the receipt has no layout."""
    try:
        (layout,) = (entry["applied"] for entry in receipt if entry["feature"] == "parallelism")
        n = math.prod(degree for axis, degree in layout.items() if axis != "expert_parallel")  # of the same processes
        return n if isinstance(n, int) and n > 0 else None
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def run_again(module: str, arguments: Sequence[str], processes: int) -> int:
    """Run a module such as `titanlite.train` in `processes` new processes on this host; print its output if it fails.

    Returns:
        The exit code of the module.

    Raises:
        KeyboardInterrupt: this process was interrupted. The new processes have ended, or have got a signal to end.
    """
    launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(processes), "-m"]
    command = [sys.executable, "-m", *(launcher if processes > 1 else ()), module, *arguments]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,  # Ctrl-C must not reach torchrun: it gets one signal, below
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
