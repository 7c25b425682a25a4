"""Exchange tokens with experts at the shapes of models: torchrun --nproc-per-node 2 scripts/bench/token_exchange.py

Milliseconds of the slowest rank, medians over rounds, each version in turn in each; GB/s of what arrives at a rank from
its peers. 16,384 tokens a rank, experts chosen at random. NCCL's collectives are what runs without access to peers'
memory; the floor of gathering is one copy to the peers, that of results a copy of as many bytes as there are in rows.
"""

import os
import statistics
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from titanlite.kernels.collectives import Group
from titanlite.kernels.routing import expert_rows
from titanlite.kernels.token_exchange import combine_at_owners, gather_from_ranks, gradients_at_owners

M, ROUNDS = 16_384, 15
MODELS = {"Qwen3-30B-A3B": (2048, 128, 8), "Mixtral 8x7B": (4096, 8, 2)}  # D, E, K


def main() -> None:
    """Print the table."""
    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("cpu:gloo,cuda:nccl", device_id=torch.device("cuda", rank))
    group = Group(dist.group.WORLD.group_name, dist.get_world_size(), rank)  # type: ignore[union-attr]
    if rank == 0:
        print("| model | operator | MiB in | ms | GB/s | NCCL ms | floor ms |\n|---|---|---|---|---|---|---|")
    for model, dims in MODELS.items():
        for name, (n_bytes, ours, theirs, floor) in calls_of(*dims, group).items():
            ms, nccl, least = in_turn([ours, theirs, floor])
            if rank == 0:
                row = f"{n_bytes / 2**20:.0f} | {ms:.3f} | {n_bytes / ms / 1e6:.0f} | {nccl:.3f} | {least:.3f}"
                print(f"| {model} | {name} | {row} |", flush=True)
    dist.barrier()
    os._exit(0)  # a group's end waits for peers


def calls_of(
    D: int, E: int, K: int, group: Group
) -> dict[str, tuple[int, Callable[[], object], Callable[[], object], Callable[[], object]]]:
    """Return of each operator the bytes that arrive from peers, and three calls: ours, by NCCL, a copy of the bytes."""
    from titanlite.kernels.device.token_exchange import _exchange

    P, r = group.size, group.rank
    torch.manual_seed(0)  # choices are equal on all ranks
    choices = torch.rand(P * M, E, device="cuda").topk(K, dim=1).indices.int()
    _, slots, _ = expert_rows(choices, r * E // P, E // P)
    own, count = choices[r * M : (r + 1) * M].contiguous(), E // P
    x, o = torch.randn(M, D, device="cuda").bfloat16(), torch.randn(P * M * K, D, device="cuda").bfloat16()
    weights, dots = torch.rand(M, K, device="cuda"), torch.rand(P * M, K, device="cuda")
    of_tokens = (P - 1) * (x.nbytes + own.nbytes)
    of_rows = int((own // count != r).sum()) * D * o.element_size()
    to, name = _exchange(group.name, (x,)), group.name
    gather_from_ranks([x, own], name)

    def copy(n_bytes: int) -> Callable[[], object]:
        def run() -> None:
            to.buffer(n_bytes, torch.uint8)
            each = n_bytes // (P - 1)
            with to.between_meetings():
                for peer in to.peers():
                    to.channel.peers[peer][:each].copy_(o.view(-1).view(torch.uint8)[:each])

        return run

    combine, gradients = (o, slots, own, weights, count, name), (o, slots, own, dots, count, name)
    return {
        "gather_from_ranks": (
            of_tokens,
            lambda: gather_from_ranks([x, own], name),
            lambda: gather_from_ranks.definition([x, own], name),
            copy(of_tokens),
        ),
        "combine_at_owners": (
            of_rows,
            lambda: combine_at_owners(*combine),
            lambda: combine_at_owners.definition(*combine),
            copy(of_rows),
        ),
        "gradients_at_owners": (
            of_rows,
            lambda: gradients_at_owners(*gradients),
            lambda: gradients_at_owners.definition(*gradients),
            copy(of_rows),
        ),
    }


def in_turn(calls: list[Callable[[], object]]) -> list[float]:
    """Time calls one after the other, again and again; the median of the slowest rank's milliseconds of each."""
    found: list[list[float]] = [[] for _ in calls]
    for n in range(ROUNDS + 3):
        for times, call in zip(found, calls, strict=True):
            dist.barrier()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(2_000_000)  # so that the host is ahead
            begin.record()
            call()
            end.record()
            torch.cuda.synchronize()
            if n >= 3:
                times.append(slowest(begin.elapsed_time(end)))
    return [statistics.median(times) for times in found]


def slowest(ms: float) -> float:
    """Return the largest of all ranks' numbers."""
    largest: Tensor = torch.tensor(ms, device="cuda")
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return largest.item()


if __name__ == "__main__":
    main()
