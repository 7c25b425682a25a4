"""The collective matmuls under load: torchrun --nproc-per-node 8 -m tests.gpu.soak [--ops 10000] [--groups 2]

Operators of random kind and shape in random order, the same on all ranks, while each rank is delayed at random and NCCL
gathers and scatters on a stream of its own, unless ranks share a GPU. Every result is compared, bit for bit, with the
operator's first, which has been held against the definition. Operators are on one of two streams, at random on each
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

import torch
import torch.distributed as dist
from torch import Tensor

from tests.gpu.collective_checks import in_graph
from tests.gpu.shared_gpus import take_gpu
from tests.support.numbers import differ
from titanlite.kernels.device.channel import set_deadline
from titanlite.kernels.lowering import lowered

BF16, FLOAT8 = torch.bfloat16, torch.float8_e4m3fn


def operators(group: dist.ProcessGroup, n: int) -> list[tuple[Callable[[], list[Tensor]], Callable[[], list[Tensor]]]]:
    """Fused calls, each beside its definition, on random operands of shapes that all ranks draw alike."""
    shapes, ranks = random.Random(n), group.size()

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, device="cuda", dtype=BF16)

    made = []
    for _ in range(n):
        M, K, N = ranks * shapes.choice((128, 200, 512, 1024)), 16 * shapes.randint(8, 64), 16 * shapes.randint(4, 64)
        turned = shapes.random() < 0.5
        weight = normal(N, K).t() if turned else normal(K, N)
        kind = shapes.choice(("gather", "scatter", "batch", "sum", "right", "float8"))
        none = ("left", [], None, "tensor", [], None, False)
        if kind == "gather":
            args = (normal(M // ranks, K), [weight], 0, M, group.group_name, *none)
        elif kind == "batch":
            args = (normal(2, M // ranks, K), [weight], 1, M, group.group_name, *none)
        elif kind == "right":
            args = (normal(128, N), [normal(72, 128 * ranks)], 0, 128 * ranks, group.group_name, "right", *none[1:])
        elif kind == "float8":
            shard, scale = normal(M // ranks, K).to(FLOAT8), torch.rand(M // ranks, 1, device="cuda") + 0.5
            weight = normal(N, K).to(FLOAT8).t()
            scales = [torch.rand(1, N, device="cuda") + 0.5]
            args = (
                shard,
                [weight],
                0,
                M,
                group.group_name,
                "left",
                [],
                scale,
                "row",
                scales,
                BF16,
                shapes.random() < 0.5,
            )
        else:
            lefts, rights = [normal(M, K)], [weight]
            if kind == "sum":
                lefts, rights = [*lefts, normal(M, 64)], [*rights, normal(N, 64).t() if turned else normal(64, N)]
            args = (lefts, rights, 0, group.group_name, None, [], [], None, False)
        if kind in ("scatter", "sum"):
            op, calls = torch.ops.titanlite.matmul_reduce_scatter.default, _one
        else:
            op, calls = torch.ops.titanlite.all_gather_matmul.default, _list
        made.append((calls(op, args), calls(op.definition, args)))
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


def _one(op: Callable[..., Tensor], args: tuple) -> Callable[[], list[Tensor]]:
    return lambda: [op(*args)]


def _list(op: Callable[..., list[Tensor]], args: tuple) -> Callable[[], list[Tensor]]:
    return lambda: op(*args)


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
    wanted = []
    for i, (fused, definition) in enumerate(ops):
        wanted.append(fused())
        for got, truth in zip(wanted[-1], definition(), strict=True):
            error = (got.float() - truth.float()).norm() / truth.float().norm()
            # Each side rounds to bfloat16, 2⁻⁹, the definition's reduction once more for each rank.
            assert error < 2**-9 * (1 + group.size()), (i, error)
    torch.cuda.synchronize()
    own, together = random.Random(f"rank {rank}"), random.Random(f"all of {group.group_name}")
    hold_up = lambda i: torch.cuda._sleep(own.randrange(1_000_000))  # noqa: E731
    graphs = [in_graph([fused for fused, _ in ops[:8]], n_streams, hold_up) for n_streams in (1, 2)]
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
        i = together.randrange(len(ops))
        if together.random() < 0.02:
            graph, captured = together.choice(graphs)
            for stream in wrong:
                main.wait_stream(stream)
            graph.replay()
            replays += 1
            wrong[main] += sum(differ(got, expected) for got, expected in zip(captured, wanted, strict=False))
            for stream in wrong:
                stream.wait_stream(main)
        with torch.cuda.stream(on):
            wrong[on] += differ(ops[i][0](), wanted[i])
        if number % 500 == 0:
            torch.cuda.synchronize()
    torch.cuda.synchronize()
    total = torch.stack(list(wrong.values())).sum().cpu()
    dist.all_reduce(total)
    if rank == 0:
        fused = sum(count for call, count in lowered.items() if call.reason is None)
        reasons = {call.reason for call in lowered if call.reason}
        seconds = time.monotonic() - start
        beside = "beside" if nccl else "without"
        print(f"{args.ops} operators and {replays} replays {beside} NCCL in {seconds:.0f} s, {fused} calls fused")
        print(f"plain: {reasons or 'none'}")
        print(f"{total.item()} results with a wrong bit")
    os._exit(int(total.item() > 0))


if __name__ == "__main__":
    main()
