"""A rank that dies or stalls in the middle of a run ends all others within the deadline, with a message."""

import multiprocessing
import os
import signal
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.gpu.shared_gpus import take_gpu

DEADLINE_S = 4.0


def rank_of_many(rank: int, world: int, folder: Path, end: str, of: str) -> None:
    from titanlite.kernels.all_gather_matmul import all_gather_matmul
    from titanlite.kernels.device.channel import peer_failure, set_deadline
    from titanlite.kernels.device.shard_exchange import AllGather, ReduceScatter
    from titanlite.kernels.matmul_reduce_scatter import matmul_reduce_scatter
    from titanlite.kernels.token_exchange import combine_at_owners, gather_from_ranks

    dist.init_process_group(
        **take_gpu(rank, world)._asdict(),
        store=dist.FileStore(str(folder / "store"), world),
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=60),
    )
    group = dist.group.WORLD.group_name  # type: ignore[union-attr]
    x = torch.randn(256, 512, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(512, 512, device="cuda", dtype=torch.bfloat16)

    def shards() -> None:
        own = memory.chunk(world)[rank]
        own.view(x.dtype).copy_(x.view(-1))
        gather([(own, gather.at_peers(own))])
        reduce([memory.view(x.dtype).view(world, -1)], torch.empty(x.numel(), device="cuda"))

    def matmuls() -> None:
        _, y = all_gather_matmul(x, [w], 0, 256 * world, group)
        matmul_reduce_scatter([y], [w], 0, group)

    def tokens() -> None:
        choices = torch.full((256, 1), 0, device="cuda", dtype=torch.int32)  # all to the first rank's expert
        slots = torch.arange(256 * world, device="cuda", dtype=torch.int32)
        (whole,) = gather_from_ranks([x], group)
        combine_at_owners(
            whole, slots if rank == 0 else -slots - 1, choices, torch.ones(256, 1, device="cuda"), 1, group
        )

    step = tokens if of == "experts" else matmuls
    if of == "FSDP":
        gather, reduce, step = AllGather(group), ReduceScatter(group), shards
        memory = gather.memory(world * x.nbytes)
    step()
    set_deadline(DEADLINE_S)
    torch.cuda.synchronize()
    dist.barrier()
    start = time.monotonic()
    try:
        for number in range(200):
            if rank == world - 1 and number == 100:
                torch.cuda.synchronize()
                if end == "dies":
                    os.kill(os.getpid(), signal.SIGKILL)
                time.sleep(5 * DEADLINE_S)
                os._exit(0)
            step()
        torch.cuda.synchronize()
        said = "nothing was missed"
    except RuntimeError as error:
        said = str(peer_failure() or error)
    (folder / f"rank{rank}").write_text(f"{time.monotonic() - start:.1f}\n{said}\n")
    os._exit(0)  # the GPU's context is gone


@pytest.mark.gpu
@pytest.mark.timeout(180)
@pytest.mark.parametrize("end", ["dies", "stalls"])
@pytest.mark.parametrize("of", ["matmuls", "FSDP", "experts"])
def test_lost_peer(of: str, end: str, tmp_path: Path) -> None:
    world = min(torch.cuda.device_count(), 8)
    if world < 2:
        pytest.skip("needs two CUDA devices")
    context = multiprocessing.get_context("spawn")
    ranks = [context.Process(target=rank_of_many, args=(rank, world, tmp_path, end, of)) for rank in range(world)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(120)
        if process.is_alive():
            process.kill()
    for rank in range(world - 1):
        seconds, *message = (tmp_path / f"rank{rank}").read_text().splitlines()
        print(f"rank {rank}: {seconds} s, {message[0]}")
        assert float(seconds) < DEADLINE_S + 3
        calls = {
            "matmuls": ("all_gather_matmul", "matmul_reduce_scatter"),
            "FSDP": ("FSDP's all-gather", "FSDP's red"),
            "experts": "exchange with experts",
        }
        assert message[0].startswith(calls[of])
        assert f"rank {rank} of {world} waited" in message[0]
        assert " for rank " in message[0]
