"""The collective matmuls under load: torchrun --nproc-per-node 8 -m tests.gpu.soak [--ops 10000] [--groups 2]

Cases that are fused in random order, the same on all ranks, while each rank is delayed at random and NCCL gathers and
scatters on a stream of its own, unless ranks share a GPU. Every result is compared, bit for bit, with the operator's
first, which was the one right value. Operators are on one of two streams, at random on each
rank. Now and then a graph of several operators, captured on one stream or on two that it forks, is replayed in between,
behind both and ahead of them. With several groups, of consecutive ranks, NCCL runs between them, as FSDP does beside
tensor parallelism; each has operators of its own.
"""

import argparse
import os
import random
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from tests.gpu.collective_checks import differences, in_graph
from tests.gpu.shared_gpus import take_gpu
from tests.support.collective_cases import Case, Ranks, fused_calls, gathers, prepared, scatters
from tests.support.numbers import differ
from titanlite.kernels.device.channel import set_deadline
from titanlite.kernels.lowering import lowered


def operators(group: dist.ProcessGroup, n: int) -> list[tuple[Callable[[], list[Tensor]], list[Tensor]]]:
    """Draw n cases that are fused, alike on all ranks: the call of each, and what it has returned, which is right."""
    cases: list[Case] = [*gathers("cuda"), *scatters("cuda")]
    random.Random(n).shuffle(cases)
    ranks = Ranks(group.group_name, tuple(dist.get_process_group_ranks(group)), group.rank())
    made = []
    while len(made) < n:
        case, before = cases.pop(), fused_calls()
        given, call, wanted = prepared(case, "cuda", ranks, 0)
        got = call(given)
        if fused_calls() > before:
            assert not differences(case.id, got, wanted)
            made.append((partial(call, given), got))
    return made


def groups(n: int) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """This rank's group of consecutive ranks, and the ranks of the same place in all groups; all ranks, if n is 1."""
    world = dist.get_world_size()
    size = world // n
    own, _ = dist.new_subgroups_by_enumeration([list(range(i, i + size)) for i in range(0, world, size)])
    across = [list(range(i, world, size)) for i in range(size)] if n > 1 else [list(range(world))]
    beside, _ = dist.new_subgroups_by_enumeration(across)
    assert isinstance(own, dist.ProcessGroup)
    assert isinstance(beside, dist.ProcessGroup)
    return own, beside


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ops", type=int, default=10_000)
    parser.add_argument("--kinds", type=int, default=24)
    parser.add_argument("--groups", type=int, default=1)
    args = parser.parse_args()
    rank = int(os.environ["LOCAL_RANK"])
    communication = take_gpu(rank, int(os.environ["LOCAL_WORLD_SIZE"]))
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    dist.init_process_group(**communication._asdict(), timeout=timedelta(seconds=60))
    nccl = communication.device_id is not None
    set_deadline(30)
    torch.manual_seed(rank)
    group, network = groups(args.groups)
    ops = operators(group, args.kinds)
    torch.cuda.synchronize()
    own, together = random.Random(f"rank {rank}"), random.Random(f"all of {group.group_name}")
    hold_up = lambda i: torch.cuda._sleep(own.randrange(1_000_000))  # noqa: E731
    graphs = [in_graph([call for call, _ in ops[:8]], n_streams, hold_up) for n_streams in (1, 2)]
    side = torch.cuda.Stream()
    small, large = torch.ones(1 << 20, device="cuda"), torch.empty(network.size() << 20, device="cuda")
    main, replays, start = torch.cuda.current_stream(), 0, time.monotonic()
    wrong = {stream: torch.zeros((), dtype=torch.int64, device="cuda") for stream in (main, torch.cuda.Stream())}
    torch.cuda.synchronize()
    for number in range(args.ops):
        on = own.choice(list(wrong))
        if own.random() < 0.05:
            with torch.cuda.stream(on):
                torch.cuda._sleep(own.randrange(2_000_000))  # up to a millisecond
        if nccl and number % 4 == 0:
            with torch.cuda.stream(side):
                dist.all_gather_into_tensor(large, small, group=network)
                dist.reduce_scatter_tensor(small, large, group=network)
                small.fill_(1)
        call, wanted = together.choice(ops)
        if together.random() < 0.02:
            graph, captured = together.choice(graphs)
            for stream in wrong:
                main.wait_stream(stream)
            graph.replay()
            replays += 1
            wrong[main] += sum(differ(got, expected) for got, (_, expected) in zip(captured, ops, strict=False))
            for stream in wrong:
                stream.wait_stream(main)
        with torch.cuda.stream(on):
            wrong[on] += differ(call(), wanted)
        if number % 500 == 0:
            torch.cuda.synchronize()
    torch.cuda.synchronize()
    total = torch.stack(list(wrong.values())).sum().cpu()
    dist.all_reduce(total)
    if rank == 0:
        reasons = {row.reason for row in lowered if row.reason}
        seconds = time.monotonic() - start
        beside = "beside" if nccl else "without"
        print(
            f"{args.ops} operators and {replays} replays {beside} NCCL in {seconds:.0f} s, {fused_calls()} calls fused"
        )
        print(f"plain: {reasons or 'none'}")
        print(f"{total.item()} results with a wrong bit")
    os._exit(int(total.item() > 0))


if __name__ == "__main__":
    main()
