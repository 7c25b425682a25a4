"""Run a test body on a rank for each GPU: spawned, since CUDA does not survive a fork."""

import faulthandler
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.gpu.collective_gpu import start
from tests.support.forks import print_to
from titanlite.kernels.device.channel import peer_failure


def run_on_gpus(
    body: Callable[[str], object], folder: Path, device: str = "cuda", world: int = 0, timeout_s: float = 500
) -> None:
    """Call `body(device)` on 2, 4 or 8 ranks, as many as there are GPUs.

    Fails with what every rank has said if one raises, waits for a peer for two minutes, or outlives `timeout_s`; those
    that then still run add their stacks.

    Args:
        body: a function of a module.
        folder: for what the ranks say.
        device: "cuda", or "cpu" to try a body out.
        world: number of ranks on a CPU.
        timeout_s: from the start to the end of all ranks.
    """
    world = world or max(n for n in (1, 2, 4, 8) if n <= max(1, torch.cuda.device_count()))  # heads are shared equally
    if world < 2:
        pytest.skip("needs two CUDA devices")
    context, end = multiprocessing.get_context("spawn"), time.monotonic() + timeout_s
    ranks = [context.Process(target=_rank, args=(body, r, world, device, folder)) for r in range(world)]
    for r, process in enumerate(ranks):
        _log(folder, r).touch()
        process.start()
    while time.monotonic() < end and any(process.exitcode is None for process in ranks):
        if any(process.exitcode for process in ranks):
            end = min(end, time.monotonic() + 3)  # for the others to say why
        time.sleep(0.1)
    codes = [process.exitcode for process in ranks]
    for process in ranks:
        if process.exitcode is None and process.pid:
            os.kill(process.pid, signal.SIGABRT)
    for process in ranks:
        process.join(2)
        process.kill()
        process.join()
    said = "\n".join(f"--- rank {r}\n{_log(folder, r).read_text()}" for r in range(world))
    assert codes == [0] * world, f"exit codes {codes}, None if it ran for too long\n{said}"


def _log(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.log"


def _rank(body: Callable[[str], object], rank: int, world: int, device: str, folder: Path) -> None:
    print_to(_log(folder, rank))
    faulthandler.enable(file=2)
    torch.set_num_threads(1)
    try:
        start(rank, world, device, str(folder), check_timeout_s=120)
        body(device)
    except BaseException:
        traceback.print_exc()
        if device == "cuda" and (why := peer_failure()):
            print(why)
        os._exit(1)
    os._exit(0)  # a process group's end may wait for peers
