"""Run a test body on several processes over gloo: forked after `import torch`, without ports."""

import datetime
import functools
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import torch._inductor.compile_fx
import torch._inductor.debug
import torch._inductor.pattern_matcher
import torch.distributed as dist
import torch.distributed.tensor
import torch.distributed.tensor.experimental._func_map
import torch.export._trace

from tests.support.forks import fork
from titanlite.kernels.collectives import Group

# What every rank would import for itself: two seconds of it where blocks are compiled.
_IMPORTED_ONCE = (
    torch._inductor.compile_fx,
    torch._inductor.debug,
    torch._inductor.pattern_matcher,
    torch.distributed.tensor.experimental._func_map,
    torch.export._trace,
)


def run_ranks(body: Callable[[], object], folder: Path, world: int = 2, timeout_s: float = 300) -> list[str]:
    """Call `body()` on `world` ranks and return what each printed.

    Fails if a rank raises or outlives `timeout_s`. A hung rank is aborted and its stack is part of the failure, so a
    deadlock is an ordinary red test.
    """
    folder = folder / f"ranks-{time.monotonic_ns()}"
    folder.mkdir(parents=True)
    logs = [folder / f"rank{r}.log" for r in range(world)]
    pids = [fork(functools.partial(_rank, body, r, world, folder / "store"), logs[r]) for r in range(world)]
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


def world_group() -> Group:
    """All ranks."""
    return Group(dist.group.WORLD.group_name, dist.get_world_size(), dist.get_rank())  # type: ignore[union-attr]


def _rank(body: Callable[[], object], rank: int, world: int, store: Path) -> int:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world))
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(str(store), world),
        rank=rank,
        world_size=world,
        timeout=datetime.timedelta(seconds=240),
    )
    body()
    dist.barrier()
    return 0
