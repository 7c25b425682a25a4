"""Run a test body on several processes over gloo: forked after `import torch`, without ports.

Forking costs a tenth of a second where a fresh interpreter costs six. It is safe while the parent has no thread pool,
which conftest.py ensures.
"""

import datetime
import faulthandler
import gc
import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist
import torch.distributed.tensor  # these two, and sympy, every rank would import for itself: seconds
import torch.export._trace  # noqa: F401


def run_ranks(body: Callable[[], object], folder: Path, world: int = 2, timeout_s: float = 60) -> list[str]:
    """Call `body()` on `world` ranks and return what each printed.

    Fails if a rank raises or outlives `timeout_s`. A hung rank is aborted and its stack is part of the failure, so a
    deadlock is an ordinary red test.
    """
    folder = folder / f"ranks-{time.monotonic_ns()}"
    folder.mkdir(parents=True)
    logs = [folder / f"rank{r}.log" for r in range(world)]
    pids = [_fork(body, r, world, folder / "store", logs[r]) for r in range(world)]
    deadline, left = time.monotonic() + timeout_s, dict(enumerate(pids))
    ended: dict[int, str] = {}
    while left:
        late = time.monotonic() > deadline
        for rank, pid in list(left.items()):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                del left[rank]
                code = os.waitstatus_to_exitcode(status)
                ended.setdefault(rank, "ok" if code == 0 else f"exit {code}")
            elif late:
                ended[rank] = f"hung for {timeout_s} s"
                os.kill(pid, signal.SIGABRT)
        time.sleep(0.01)
    out = [log.read_text() for log in logs]
    bad = [f"--- rank {r}: {end}\n{out[r]}" for r, end in sorted(ended.items()) if end != "ok"]
    assert not bad, "\n".join(bad)
    return out


def _fork(body: Callable[[], object], rank: int, world: int, store: Path, log: Path) -> int:
    with warnings.catch_warnings():
        # Python 3.12 warns of a fork beside threads; torch's own start-up threads are idle here.
        warnings.filterwarnings("ignore", message=".*multi-threaded, use of fork", category=DeprecationWarning)
        pid = os.fork()
    if pid:
        return pid
    gc.freeze()  # what there was before is not looked through, and so not copied
    try:
        fd = os.open(log, os.O_CREAT | os.O_WRONLY)
        os.dup2(fd, 1)
        os.dup2(fd, 2)
        sys.stdout = sys.stderr = os.fdopen(1, "w", buffering=1)  # past pytest's capture
        faulthandler.enable(file=2)
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world))
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(str(store), world),
            rank=rank,
            world_size=world,
            timeout=datetime.timedelta(seconds=30),
        )
        body()
        dist.barrier()
        os._exit(0)
    except BaseException:
        os.write(2, traceback.format_exc().encode())
        os._exit(1)
