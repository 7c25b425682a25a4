"""Ranks that are spawned, since CUDA does not survive a fork: one for each GPU, or more that share them."""

import faulthandler
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.gpu.shared_gpus import take_gpu
from tests.support.forks import print_to
from titanlite.kernels.device.channel import peer_failure


class SpawnedRanks:
    """Processes that call `body(rank, world, folder, *args)`, and what they print."""

    def __init__(self, body: Callable[..., object], world: int, folder: Path, *args: object) -> None:
        context = multiprocessing.get_context("spawn")
        self._logs = [folder / f"rank{r}.log" for r in range(world)]
        self._processes = [
            context.Process(target=_rank, args=(body, log, r, world, folder, *args), daemon=True)
            for r, log in enumerate(self._logs)
        ]
        for log, process in zip(self._logs, self._processes, strict=True):
            log.touch()
            process.start()

    def codes(self) -> list[int | None]:
        """Exit codes; None of a rank that runs."""
        return [process.exitcode for process in self._processes]

    def said(self) -> str:
        """What the ranks left in their logs."""
        logs = zip(self.codes(), self._logs, strict=True)
        return "\n".join(f"--- rank {r}, exit code {code}\n{log.read_text()}" for r, (code, log) in enumerate(logs))

    def kill(self) -> None:
        """End those that still run, after they have left their stacks in their logs."""
        for process in self._processes:
            if process.is_alive() and process.pid:
                os.kill(process.pid, signal.SIGABRT)
        for process in self._processes:
            process.join(2)
            process.kill()
            process.join()


def _rank(body: Callable[..., object], log: Path, *args: object) -> None:
    print_to(log)
    faulthandler.enable(file=2)
    torch.set_num_threads(1)
    try:
        body(*args)
    except BaseException:
        traceback.print_exc()
        if why := peer_failure():
            print(why)
        os._exit(1)
    os._exit(0)  # a process group's end may wait for peers


def start(rank: int, world: int, device: str, folder: Path, check_timeout_s: float) -> dist.ProcessGroup:
    """Join the ranks, and return a group by which they agree on the host."""
    on_gpu = device == "cuda"
    if on_gpu:
        # Sums that are split along K would be added in bfloat16 otherwise, which is not what products promise.
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    dist.init_process_group(
        store=dist.FileStore(f"{folder}/store", world),
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=check_timeout_s),
        **(take_gpu(rank, world)._asdict() if on_gpu else {"backend": "gloo"}),
    )
    if on_gpu and find_spec("triton"):
        from titanlite.kernels.device import channel

        channel.set_deadline(check_timeout_s / 2)  # so that a kernel says whom it waits for before it is killed
    control = dist.new_group(backend="gloo")
    assert isinstance(control, dist.ProcessGroup)
    return control


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
    ranks, end = SpawnedRanks(_call, world, folder, body, device), time.monotonic() + timeout_s
    while time.monotonic() < end and None in ranks.codes():
        if any(ranks.codes()):
            end = min(end, time.monotonic() + 3)  # for the others to say why
        time.sleep(0.1)
    codes = ranks.codes()
    ranks.kill()
    assert codes == [0] * world, f"exit codes {codes}, None if it ran for too long\n{ranks.said()}"


def _call(rank: int, world: int, folder: Path, body: Callable[[str], object], device: str) -> None:
    start(rank, world, device, folder, check_timeout_s=120)
    body(device)
