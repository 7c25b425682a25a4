"""The checks of the collective matmuls on GPUs: every case, and what only GPUs can get wrong.

Between operators, memory that is free and the buffers that ranks share are filled with NaN.
"""

import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.collective_cases import (
    BF16,
    E4M3,
    Case,
    Gather,
    Given,
    Ranks,
    Scatter,
    check_case,
    gathers,
    groups,
    own_groups,
    partitions,
    prepared,
    scatters,
)
from titanlite.kernels.lowering import no_peer_access

ROWS = Gather("rows", "M K", 0, ("K N",), dtype=BF16)
TILES = Gather("whole-tiles", "T K", 0, ("K N",), dtype=BF16)
BATCH = Gather("batch", "2 S K", 1, ("K N", "K P"), dtype=BF16, bias=True)
RIGHT = Gather("right", "K N", 0, ("M K",), "right", dtype=BF16)
FLOAT8 = Gather("float8", "2 S K", 1, ("K N",), dtype=E4M3, scale_of="row", other_scale_of="row")
SUM = Scatter("sum", "M", ("K", "P"), 0, dtype=BF16)
PUSHED = Scatter("whole-tiles", "T", ("K",), 0, dtype=BF16)
COLUMNS = Scatter("columns", "2 S", ("K",), 2, dtype=BF16, bias=True)
FLOAT8_SUM = Scatter("float8-sum", "2 S", ("K",), 1, dtype=E4M3, scale_of="row", other_scale_of="row")
SEVERAL: list[Case] = [ROWS, SUM, BATCH, RIGHT, COLUMNS, FLOAT8, FLOAT8_SUM]


def spoil(device: str, group: Ranks) -> None:
    """Fill free memory, from which results will be taken, and the buffers shared by the group with NaN."""
    if device == "cpu":
        return
    # The allocator keeps a pool for large tensors and one for small ones.
    blocks = [torch.full((numbers,), torch.nan, device=device) for numbers in (2**26, *[2**17] * 32)]
    del blocks
    if no_peer_access(group.name) is None:
        from titanlite.kernels.device.channel import channel

        found = channel(group.name)
        torch.cuda.synchronize(found.device)
        dist.barrier(found.process_group)
        if found.slots is not None:
            found.slots.fill_(0xFF)
        torch.cuda.synchronize(found.device)
        dist.barrier(found.process_group)


def delay(device: str, group: Ranks, turn: int) -> None:
    """Hold this rank's stream up: each rank and turn for another while, up to a millisecond."""
    part = (7919 * turn + 104729 * group.me) % 11
    if device == "cuda":
        torch.cuda._sleep(200_000 * part)
    else:
        time.sleep(1e-4 * part)


class Between(TorchDispatchMode):
    """Does something ahead of every collective matmul, in backward too."""

    def __init__(self, call: Callable[[], object]):
        super().__init__()
        self._call = call

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "titanlite":
            self._call()
        return func(*args, **(kwargs or {}))


def differences(name: str, got: list[Tensor], wanted: list[Tensor]) -> list[str]:
    """Which results are not exactly what they must be."""
    wrong = [int((a.double() != b.double()).sum()) for a, b in zip(got, wanted, strict=True)]
    return [f"{name}, result {i}: {n} of {wanted[i].numel()} numbers are wrong" for i, n in enumerate(wrong) if n]


def out_of_step(device: str, group: Ranks) -> list[str]:
    """Operators back to back on ranks of which each is late in its turn: stale numbers would be another round's."""
    rounds = [[prepared(case, device, group, r) for case in SEVERAL] for r in range(6)]
    outs: list[list[list[Tensor]]] = []
    for r, calls in enumerate(rounds):
        outs.append([])
        for i, (given, call, _) in enumerate(calls):
            delay(device, group, len(SEVERAL) * r + i)
            outs[-1].append(call(given))
    return [
        text
        for r, (calls, results) in enumerate(zip(rounds, outs, strict=True))
        for case, of, got in zip(SEVERAL, calls, results, strict=True)
        for text in differences(f"round {r}, {case.id}", got, of.wanted)
    ]


def two_streams(device: str, group: Ranks) -> list[str]:
    """Gathers on one stream and scatters on another, of one group."""
    ready = [prepared(case, device, group, r) for r in range(8) for case in (ROWS, SUM)]
    streams = [torch.cuda.Stream(), torch.cuda.Stream()] if device == "cuda" else []
    for stream in streams:
        stream.wait_stream(torch.cuda.current_stream())
    outs: list[list[Tensor]] = []
    for i, (given, call, _) in enumerate(ready):
        with torch.cuda.stream(streams[i % 2]) if streams else nullcontext():
            delay(device, group, i)
            outs.append(call(given))
    if streams:
        torch.cuda.synchronize()
    calls = enumerate(zip(outs, ready, strict=True))
    return [text for i, (got, of) in calls for text in differences(f"call {i}", got, of.wanted)]


def in_graph(
    calls: list[Callable[[], list[Tensor]]], n_streams: int, hold_up: Callable[[int], object]
) -> tuple[torch.cuda.CUDAGraph, list[list[Tensor]]]:
    """Capture calls on so many streams in turn, each held up, and return their results, too."""
    graph, outs = torch.cuda.CUDAGraph(), list[list[Tensor]]()
    streams = [torch.cuda.Stream() for _ in range(n_streams)]
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # NCCL's own thread asks for events
        origin = torch.cuda.current_stream()
        for stream in streams:
            stream.wait_stream(origin)
        for i, call in enumerate(calls):
            with torch.cuda.stream(streams[i % n_streams]):
                hold_up(i)
                outs.append(call())
        for stream in streams:
            origin.wait_stream(stream)
    return graph, outs


def captured(device: str, group: Ranks, n_streams: int = 1) -> list[str]:
    """Several operators in one CUDA graph, replayed with numbers of their own each time, between eager calls."""
    rounds = [[prepared(case, device, group, r) for case in SEVERAL] for r in range(4)]
    static = [Given([t.clone() for t in of.given.operands], [t.clone() for t in of.given.scales]) for of in rounds[0]]
    calls = [partial(of.call, given) for of, given in zip(rounds[0], static, strict=True)]
    for call in calls:  # buffers grow and kernels are compiled here
        call()
    torch.cuda.synchronize()
    in_graph(calls, n_streams, partial(delay, device, group))  # one that is never replayed
    graph, outs = in_graph(calls, n_streams, partial(delay, device, group))
    beside, main = torch.cuda.Stream(), torch.cuda.current_stream()
    problems: list[str] = []
    for r, calls in enumerate(rounds[1:] + rounds[:1]):
        for of, given in zip(calls, static, strict=True):
            new = [*of.given.operands, *of.given.scales]
            for to, number in zip([*given.operands, *given.scales], new, strict=True):
                to.copy_(number)
        delay(device, group, r)
        graph.replay()
        replayed = [[t.clone() for t in ts] for ts in outs]
        beside.wait_stream(main)  # the caller's part
        with torch.cuda.stream(beside):
            delay(device, group, r + 1)
            eager = [of.call(of.given) for of in calls]
        main.wait_stream(beside)
        for case, of, mine, theirs in zip(SEVERAL, calls, replayed, eager, strict=True):
            problems += differences(f"replay {r}, {case.id}", mine, of.wanted)
            problems += differences(f"eager call after replay {r}, {case.id}", theirs, of.wanted)
    return problems


def captured_on_two_streams(device: str, group: Ranks) -> list[str]:
    """The same on two streams that the capture forks: edges keep the operators in order."""
    return captured(device, group, n_streams=2)


def groups_take_turns(device: str, mine: list[Ranks]) -> list[str]:
    """Operators of two groups, one behind the other; then those of each on a stream of its own; so in a graph, too."""
    order = [(ROWS, 0), (SUM, 1), (ROWS, 1), (COLUMNS, 0), (SUM, 0), (BATCH, 1), (TILES, 0), (TILES, 1)]
    turns = [(r, case, i) for r in range(4) for case, i in order] if mine else []
    ready = [prepared(case, device, mine[i], r) for r, case, i in turns]
    streams = [torch.cuda.Stream(), torch.cuda.Stream()] if device == "cuda" else []
    problems: list[str] = []
    for how in ("in turns", "on two streams"):
        outs: list[list[Tensor]] = []
        for stream in streams:
            stream.wait_stream(torch.cuda.current_stream())
        for (given, call, _), (_, _, i) in zip(ready, turns, strict=True):
            with torch.cuda.stream(streams[i]) if streams and how == "on two streams" else nullcontext():
                outs.append(call(given))
        if streams:
            torch.cuda.synchronize()
        for number, (got, of) in enumerate(zip(outs, ready, strict=True)):
            problems += differences(f"{how}, call {number}", got, of.wanted)
    if streams and ready:
        graph, outs = in_graph([partial(of.call, of.given) for of in ready], 2, partial(delay, device, mine[0]))
        for r in range(4):
            for out in [t for ts in outs for t in ts]:
                out.fill_(torch.nan)
            delay(device, mine[0], r)
            graph.replay()
            for number, (got, of) in enumerate(zip(outs, ready, strict=True)):
                problems += differences(f"replay {r}, call {number}", got, of.wanted)
    return problems


def some_have_met_before(device: str, mine: list[Ranks]) -> list[str]:
    """Groups of ranks of which some have been in other groups, which share memory with their peers first."""
    return [text for group in mine for text in check_case(ROWS, device, group)]


def others_get_through(device: str, group: Ranks) -> list[str]:
    """A kernel on another stream ends while an operator waits for a rank that comes later: rule 1 of the kernels.

    Where each rank has a GPU it is NCCL's gather: a host that waits for that before it goes on, as one does that frees
    memory, would otherwise never come. Where ranks share a GPU, its blocks are as large as NCCL's at least.
    """
    from tests.support.large_blocks import launch_large_blocks

    process_group = dist.distributed_c10d._resolve_process_group(group.name)  # type: ignore[arg-type]
    late, problems = group.me == len(group.ranks) - 1, []
    small = torch.ones(1 << 22, device=device)  # as much as one of FSDP's gathers
    large = small.new_empty(len(group.ranks) << 22)
    side = torch.cuda.Stream()

    def other() -> None:
        if "nccl" in dist.get_backend_config(process_group):
            dist.all_gather_into_tensor(large, small, group=process_group)
        else:
            launch_large_blocks(small)

    def meet() -> None:
        dist.all_gather_object([None] * len(group.ranks), None, group=process_group)

    for case in (ROWS, TILES, SUM, PUSHED):
        given, call, wanted = prepared(case, device, group, 0)
        call(given)  # kernels are compiled, and NCCL connects
        other()
        torch.cuda.synchronize()
        meet()
        got = None if late else call(given)
        time.sleep(0.5)  # for the others' kernels to be where they wait
        done = torch.cuda.Event()
        with torch.cuda.stream(side):
            other()
            done.record()
        end = time.monotonic() + 10
        while not done.query() and time.monotonic() < end:
            time.sleep(1e-3)
        if not done.query():
            problems.append(f"{case.id}: another kernel did not end in 10 s while the operator waited for a rank")
        meet()
        got = call(given) if got is None else got
        torch.cuda.synchronize()
        problems += differences(case.id, got, wanted)
    return problems


def counted_far(device: str, group: Ranks) -> list[str]:
    """Operators whose number is not above that of the last one that had a chunk, as the 32 bits of both are read."""
    from titanlite.kernels.device import channel

    problems: list[str] = []
    for number in (2**31 - 3, 1000 - 2**31):  # about to wrap, and a while after
        calls = [prepared(case, device, group, r) for r in range(3) for case in (TILES, PUSHED, ROWS, SUM)]
        to = channel.channel(group.name)
        spoil(device, group)  # and all ranks meet
        to.epoch.fill_(number)
        to.flags[: to.ranks].fill_(number)
        spoil(device, group)
        outs = []
        for turn, (given, call, _) in enumerate(calls):
            delay(device, group, turn)
            outs.append(call(given))
        for turn, (got, of) in enumerate(zip(outs, calls, strict=True)):
            problems += differences(f"from {number}, call {turn}", got, of.wanted)
    return problems


def shards(device: str, group: Ranks) -> list[str]:
    """FSDP's collectives, as FSDP orders them, gathers on two streams, on ranks that are late in turn; then a graph."""
    from titanlite.kernels.device.shard_exchange import AllGather, ReduceScatter

    gather, reduce = AllGather(group.name), ReduceScatter(group.name)
    ranks, me = len(group.ranks), group.me
    sizes = (1 << 20, 1000, 1 << 18, 8, 1 << 20, 3000, 1 << 19, 24)
    given: list[list[Tensor]] = []
    for r, size in enumerate(sizes):
        rng, dtype = torch.Generator().manual_seed(r), (BF16, torch.float32)[r // 2 % 2]
        given.append([torch.randn(ranks * size, generator=rng).to(device, dtype) for _ in range(ranks)])
    wanted: list[Tensor] = []
    for size, every in zip(sizes, given, strict=True):
        parts = torch.stack([x.chunk(ranks)[me] for x in every]).float()
        total = parts[0].clone()
        for part in parts[1:]:
            total += part
        wanted += [torch.cat([x[:size] for x in every]), total]
    memory = gather.memory(2 * ranks * 4 * max(sizes)).chunk(2)
    gathering, reducing = [torch.cuda.Stream(priority=-1) for _ in range(2)], torch.cuda.Stream(priority=-1)

    def issue() -> list[Tensor]:
        compute, found, copied = torch.cuda.current_stream(), list[Tensor](), list[torch.cuda.Event]()
        for stream in gathering:
            stream.wait_stream(compute)
        for r, (size, every) in enumerate(zip(sizes, given, strict=True)):
            delay(device, group, r)
            with torch.cuda.stream(gathering[r % 2]):
                if r > 1:
                    gathering[r % 2].wait_event(copied[-2])
                delay(device, group, r + 5)
                whole = memory[r % 2][: ranks * size * every[me].itemsize]
                own = whole.chunk(ranks)[me]
                own.view(every[me].dtype).copy_(every[me][:size])
                gather([(own, gather.at_peers(own))])
            reducing.wait_stream(compute)
            with torch.cuda.stream(reducing):
                out = torch.empty(size, device=device)
                reduce([every[me].view(ranks, size)], out)
            compute.wait_stream(gathering[r % 2])
            found += [whole.clone().view(every[me].dtype), out]
            copied.append(compute.record_event())
        compute.wait_stream(reducing)
        return found

    def wrong(how: str, found: list[Tensor]) -> list[str]:
        torch.cuda.synchronize()
        return differences(how, found, wanted)

    torch.cuda.synchronize()
    problems = wrong("at once", issue())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        found = issue()
    for r in range(4):
        for out in found:
            out.fill_(torch.nan)
        delay(device, group, r)
        graph.replay()
        problems += wrong(f"replay {r}", found)
    return problems


def one_case(case: Case, device: str, group: Ranks) -> list[str]:
    """A case, with NaN in all buffers ahead of every operator."""
    return check_case(case, device, group, before=lambda: spoil(device, group))


ON_ANY_DEVICE = {
    "operators out of step": out_of_step,
    "two streams": two_streams,
}
ON_GPUS = {
    "CUDA graph": captured,
    "forked CUDA graph": captured_on_two_streams,
    "others get through": others_get_through,
    "counted far": counted_far,
    "shards": shards,
}


def _of_one_group(device: str) -> dict[str, Callable[[str, Ranks], list[str]]]:
    cases: list[Case] = [*gathers(device), *scatters(device)]
    each = {f"{type(case).__name__.lower()} {case.id}": partial(one_case, case) for case in cases}
    return ON_ANY_DEVICE | (ON_GPUS if device == "cuda" else {}) | each


def _of_several(world: int) -> dict[str, tuple[Callable[[str, list[Ranks]], list[str]], list[tuple[int, ...]]]]:
    """Checks of several groups, and the ranks of these."""
    everyone = tuple(range(world))
    turns = [(0, 1), (2, 3), (0, 2), (1, 3)] if world >= 4 else [everyone, everyone]
    if world >= 8:
        turns = [(0, 1, 2, 3), (4, 5, 6, 7), (0, 4), (1, 5), (2, 6), (3, 7)]
    overlapping = [(0, 1, 3), (0, 2), (1, 3), everyone] if world >= 4 else [everyone]
    return {
        "groups take turns": (groups_take_turns, turns),
        "some have met before": (some_have_met_before, overlapping),
    }


def names(world: int, device: str, only: str = "") -> list[str]:
    """All checks with `only` in their name, in the order in which they run."""
    every = [*_of_several(world), *(f"{title} {name}" for title in _of_one_group(device) for name in partitions(world))]
    if not any(only in name for name in every):
        raise ValueError(f"no check of {world} ranks on {device} has {only!r} in its name; one is called {every[0]!r}")
    return [name for name in every if only in name]


def checks(world: int, device: str) -> dict[str, Callable[[], list[str]]]:
    """This rank's part of every check; there is none in a group that it is not in. All ranks call this together."""
    of_one = _of_one_group(device)
    mine = {f"{t} {name}": partial(of_one[t], device, group) for name, group in groups(world).items() for t in of_one}
    return mine | {t: partial(check, device, own_groups(of)) for t, (check, of) in _of_several(world).items()}
