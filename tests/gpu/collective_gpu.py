"""All cases of the collective matmuls on GPUs, a process for each, and what only GPUs can get wrong.

    python -m tests.gpu.collective_gpu --world 4 --timeout-s 500 [--only PART-OF-A-NAME]

Each check is a parameter of `test_collective_gpu.py` too, which runs those that are selected in the same way.

Ranks are slow to start, so they run one check after the other, in step. A check that hangs or ends a process costs that
check alone: the ranks are started anew for what is left. Ranks may be more than GPUs (`shared_gpus.py`).
`--device cpu` tries this program itself out, over gloo.
"""

import argparse
import faulthandler
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from tests.gpu.collective_checks import checks, names
from tests.gpu.ranks_on_gpus import SpawnedRanks, start
from titanlite.kernels.lowering import lowered


class Result(NamedTuple):
    """What became of a check."""

    name: str
    problems: list[str]
    seconds: float = 0.0
    plain: list[str] = []  # noqa: RUF012  # why operators ran as their definition

    def __str__(self) -> str:
        if self.problems:
            return "\n      ".join([f"FAIL  {self.name}", *self.problems])
        return "".join([f"ok    {self.name}  {self.seconds:.1f} s", *(f"\n      plain: {why}" for why in self.plain)])


def run(
    world: int,
    todo: list[str],
    device: str = "cuda",
    *,
    timeout_s: float = 1500,
    check_timeout_s: float = 120,
    tell: Callable[[Result], object] = lambda result: None,
) -> list[Result]:
    """Run checks on new processes.

    Args:
        world: how many ranks.
        todo: names of the checks.
        device: "cuda" or "cpu".
        timeout_s: for everything; what has not run by then has failed.
        check_timeout_s: for one check; kernels are compiled in it.
        tell: called with each result as soon as it is there.
    """
    end = time.monotonic() + timeout_s
    # Sets of ranks that share the checks and the devices: most of a check's time is compilation. Where ranks of a set
    # take turns on a GPU already, each further set makes all of them wait longer.
    most = 2 if device == "cuda" and world > torch.cuda.device_count() else 8
    workers = min(most, max(1, (os.cpu_count() or 1) // world))
    with ThreadPoolExecutor(workers) as pool:
        parts = [pool.submit(_run, world, device, todo[i::workers], end, check_timeout_s, tell) for i in range(workers)]
    return [result for part in parts for result in part.result()]


def _run(
    world: int, device: str, left: list[str], end: float, check_timeout_s: float, tell: Callable[[Result], object]
) -> list[Result]:
    """Run checks on one set of ranks after another, until none is left."""
    results = []
    while left:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            ranks = _Ranks(world, device, Path(folder), left, check_timeout_s)
            try:
                for result in ranks.results(end):
                    results.append(result)
                    left.remove(result.name)
                    tell(result)
            finally:
                ranks.kill()
            if not left:
                break
            late = time.monotonic() > end
            culprit = ranks.started or left[0]
            for name in left if late and not ranks.started else [culprit]:
                how = "the time was over" if late else "a rank ended"
                why = f"{how}\n{ranks.said()}" if name == ranks.started else "not run in time"
                results.append(Result(name, [why]))
                tell(results[-1])
            left = [name for name in left if name not in {result.name for result in results}]
            if ranks.started is None and not late:  # they did not even begin: so it will be for the others
                results += [Result(name, ["the ranks did not start"]) for name in left]
                break
    return results


class _Ranks(SpawnedRanks):
    """Processes that run checks and note in a file what became of them."""

    def __init__(self, world: int, device: str, folder: Path, todo: list[str], check_timeout_s: float):
        self._notes = folder / "notes"
        self._notes.touch()
        self.started: str | None = None
        super().__init__(_run_checks, world, folder, device, todo, check_timeout_s)

    def results(self, end: float):
        """Results as they come, until the ranks are through, one of them has ended badly, or the time is over."""
        with self._notes.open() as notes:
            while True:
                codes = self.codes()  # before the notes, which are then complete
                while line := notes.readline():
                    note = json.loads(line)
                    if "start" in note:
                        self.started = note["start"]
                    else:
                        self.started = None
                        yield Result(**note)
                if all(code == 0 for code in codes) or time.monotonic() > end:
                    return
                if any(codes):
                    time.sleep(3)  # for the others to say why
                    return
                time.sleep(0.05)


def _run_checks(rank: int, world: int, folder: Path, device: str, todo: list[str], check_timeout_s: float) -> None:
    """Run the checks in step with the other ranks; rank 0 notes what becomes of them."""
    control = start(rank, world, device, folder, check_timeout_s)
    found = checks(world, device)
    with (folder / "notes").open("a", buffering=1) as notes:
        for name in todo:
            dist.barrier(control)
            if rank == 0:
                notes.write(json.dumps({"start": name}) + "\n")
            begun, before = time.monotonic(), lowered.copy()
            faulthandler.dump_traceback_later(check_timeout_s, exit=True)
            problems = found[name]() if name in found else []
            if device == "cuda":
                torch.cuda.synchronize()
            plain = sorted({how.reason for how in lowered - before if how.reason})
            said: list[list[str]] = [[] for _ in range(world)]
            dist.all_gather_object(said, [f"rank {rank}: {text}" for text in problems], group=control)
            faulthandler.cancel_dump_traceback_later()
            if rank == 0:
                result = Result(name, [text for texts in said for text in texts], time.monotonic() - begun, plain)
                notes.write(json.dumps(result._asdict()) + "\n")
    dist.barrier(control)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world", type=int, default=torch.cuda.device_count() or 2)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--only", default="", help="run what has this in its name")
    parser.add_argument("--timeout-s", type=float, default=540)
    parser.add_argument("--check-timeout-s", type=float, default=120)
    args = parser.parse_args()
    results = run(
        args.world,
        names(args.world, args.device, args.only),
        args.device,
        timeout_s=args.timeout_s,
        check_timeout_s=args.check_timeout_s,
        tell=lambda result: print(result, flush=True),
    )
    failed = sum(bool(result.problems) for result in results)
    print(f"{len(results) - failed} passed, {failed} failed")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
