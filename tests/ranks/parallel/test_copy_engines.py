"""FSDP by copy engines, over gloo: files that the ranks map stand for symmetric memory, a barrier for a meeting.

Where copies go, in which dtype and when; that they arrive in time is `tests/gpu/collective_checks.py`'s to show.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.support.needs import slow
from tests.support.ranks import run_ranks
from tests.support.short_run import assemble, checked, take_steps, whole
from titanlite.config.check import _MOST_PEERS
from titanlite.device import CPU, Device
from titanlite.forecast.memory import MemoryModel
from titanlite.kernels import lowering
from titanlite.kernels.device import channel
from titanlite.kernels.products import MAX_RANKS
from titanlite.parallel import copy_engines, placed_units, reduction
from titanlite.parallel.copy_engines import copy_engines_entry, param_group
from titanlite.parallel.fsdp import dtype_of_reduction
from titanlite.parallel.placed_units import Arena, PlacedGroup, Range
from titanlite.receipt import Receipt
from titanlite.training.build import Run
from titanlite.training.receipt import _dtypes

device = pytest.importorskip("titanlite.kernels.device.shard_exchange")


def in_files(folder: Path, monkeypatch: pytest.MonkeyPatch) -> set[torch.dtype]:
    """Let exchanges have files, of which nothing old can be read: each buffer is NaN when it is given.

    Returns:
        The dtypes of gradients that they will have moved.
    """
    moved: set[torch.dtype] = set()

    def channel_of(name: str, operator: int, n_slots: int) -> SimpleNamespace:
        group = dist.distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type]
        names = [f"{name}-{operator}-{r}" for r in range(group.size())]
        channel = SimpleNamespace(rank=group.rank(), ranks=group.size(), n_slots=n_slots, capacity=0, group=group)
        channel.device, channel.blocks = torch.device("cpu"), {}
        channel.number = channel.operator = operator
        channel.flags = channel.peer_flags = channel.epoch = channel.deadline = channel.failure = channel

        def make_room(n_bytes: int) -> None:
            if n_bytes <= channel.capacity:
                return
            channel.capacity, size = n_bytes, n_slots * n_bytes
            mine = folder / f"{names[channel.rank]}-{n_bytes}"
            mine.write_bytes(b"\xff" * size)
            dist.barrier(group)
            paths = [str(folder / f"{name}-{n_bytes}") for name in names]
            channel.peers = [torch.from_file(path, shared=True, size=size, dtype=torch.uint8) for path in paths]
            channel.slots = channel.peers[channel.rank]
            channel.blocks.clear()

        channel.make_room, channel.order = make_room, lambda: None
        return channel

    def ready(kernel, key, blocks, tensors, arguments, **options):
        passed = arguments()
        if kernel is device._meet:
            return lambda: dist.barrier(passed[0].group)

        def add() -> None:
            arrived, own, out, size, width, rank, ranks, _ = passed
            all_rows = arrived.as_strided((ranks, size), (width, 1))
            parts = [own if r == rank else all_rows[r] for r in range(ranks)]
            total = parts[0].float()
            for part in parts[1:]:
                total = total + part.float()
            out.copy_(total)

        return add

    buffer = device.Exchange.buffer

    def spoilt(self, size: int, dtype: torch.dtype) -> Tensor:
        given = buffer(self, size, dtype)
        given.view(torch.uint8).fill_(0xFF)
        if isinstance(self, device.ReduceScatter):
            moved.add(dtype)
        return given

    for module in (placed_units, reduction):  # most of a small model's shards are as large
        monkeypatch.setattr(module, "TOGETHER", 1024)
    monkeypatch.setattr(device, "channel", channel_of)
    monkeypatch.setattr(device, "ready", ready)
    monkeypatch.setattr(device.Exchange, "buffer", spoilt)
    monkeypatch.setattr("titanlite.training.assemble.no_copy_engines", lambda mesh: None)
    return moved


@pytest.mark.parametrize("world", [2, 4])
def test_exchanges(world: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of sizes that grow and shrink: what is gathered, and the sum in float32 of the ranks in their order."""
    in_files(tmp_path, monkeypatch)

    def body() -> None:
        group = dist.distributed_c10d._get_default_group().group_name
        gather, reduce, me = device.AllGather(group), device.ReduceScatter(group), dist.get_rank()
        memory = gather.memory(4096)
        for seed, (size, dtype) in enumerate([(5, torch.bfloat16), (64, torch.float32), (3, torch.bfloat16)]):
            rng = torch.Generator().manual_seed(seed)
            every = [torch.randn(world * size, generator=rng).to(dtype) for _ in range(world)]
            whole = memory[64 * seed :].view(dtype)[: world * size]
            own = whole.chunk(world)[me]
            own.copy_(every[me][:size])
            own = memory[64 * seed + me * own.nbytes :][: own.nbytes]
            gather([(own, gather.at_peers(own))])
            assert torch.equal(whole, torch.cat([x[:size] for x in every]))
            wanted, out = torch.zeros(size), torch.full((size,), torch.nan)
            for x in every:
                wanted = wanted + x.chunk(world)[me].float()
            cut = size // 2
            pieces = [x.contiguous() for x in every[me].view(world, size).split([cut, size - cut], 1)]
            reduce(pieces, out)
            assert torch.equal(out, wanted)

    run_ranks(body, tmp_path, world)


EXPERTS = ["--model.name", "qwen3_moe", "--parallelism.expert_parallel_degree", "2"]
LAYOUTS = {
    "FSDP 2": (2, []),
    "two micro-steps": (2, ["--training.global_batch_size", "4"]),
    "float32": (2, ["--training.mixed_precision_param", "float32"]),
    "rowwise": (2, ["--float8.recipe", "rowwise", "--training.seq_len", "128"]),
    "HSDP": (4, ["--parallelism.data_parallel_replicate_degree", "2"]),
    "FSDP 2 x TP 2": (4, ["--parallelism.tensor_parallel_degree", "2"]),
    "never freed": (2, ["--parallelism.fsdp_reshard_after_forward", "never"]),
    "tied": (2, ["--model.name", "gemma3", "--model.flavor", "debug"]),
    "EP 2": (2, EXPERTS),
}


SLOW = "FSDP 2", "never freed", "EP 2", "two micro-steps", "FSDP 2 x TP 2", "tied", "rowwise"  # "HSDP" has most of it


@pytest.mark.parametrize("layout", [*(name for name in LAYOUTS if name not in SLOW), *slow(*SLOW)])
def test_training_is_that_of_fsdp_bit_for_bit(layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks have one order to add in: every loss, norm and weight of two steps is the same."""
    world, flags = LAYOUTS[layout]
    moved = in_files(tmp_path, monkeypatch)
    flags = ["--training.mixed_precision_param", "bfloat16", "--training.global_batch_size", str(world), *flags]
    if layout == "FSDP 2 x TP 2":
        flags += ["--training.global_batch_size", "2"]
    asked = [checked(tmp_path, world, [*flags, f"--parallelism.fsdp_copy_engines={on}"]) for on in ("never", "always")]

    def body() -> None:
        found = []
        for each in asked:
            run = assemble(each)
            assert by_copy_engines(run) == (len(list(run.model.layers)) if each is asked[1] else 0)  # type: ignore[arg-type]
            found.append((take_steps(run, 2), {name: whole(p) for name, p in run.model.named_parameters()}))
        (theirs, their_weights), (ours, our_weights) = found
        assert moved == {torch.float32 if layout == "float32" else torch.bfloat16}
        assert torch.isfinite(ours).all()
        assert torch.equal(theirs, ours)
        assert all(torch.equal(their_weights[name], weight) for name, weight in our_weights.items())

    run_ranks(body, tmp_path, world)


@pytest.mark.parametrize(
    ("flags", "obstacle", "pushes"),
    [
        ([], None, True),
        ([], "ranks on several hosts", False),
        (["--training.mixed_precision_reduce=bfloat16"], None, False),
        (["--parallelism.fsdp_copy_engines=never"], None, False),
        (["--parallelism.data_parallel_replicate_degree=2"], None, False),
    ],
)
def test_by_default_copy_engines_are_used_where_they_can(
    flags: list[str], obstacle: str | None, pushes: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And memory is predicted for what is used: of blocks neither the whole in flight nor float32 gradients."""
    in_files(tmp_path, monkeypatch)
    monkeypatch.setattr("titanlite.training.assemble.no_copy_engines", lambda mesh: obstacle)
    given = ["--training.mixed_precision_param=bfloat16", "--training.global_batch_size=2"]
    asked = [checked(tmp_path, 2, [*given, f"--parallelism.fsdp_copy_engines={how}"]) for how in ("never", "always")]
    by_flags = checked(tmp_path, 2, [*given, *flags])

    def body() -> None:
        run = assemble(by_flags)
        comms = [block._get_fsdp_state()._fsdp_param_group.arena.exchange for block in run.model.layers]  # type: ignore[operator, union-attr]
        assert [comm is not None for comm in comms] == [pushes] * len(comms)
        if not flags:
            memory = MemoryModel(asked[pushes].config, run.dims, None, asked[0].optimizer, 2)
            expected = memory.peak_under(asked[0].save_list)  # type: ignore[arg-type]
            assert run.predicted == expected
            assert run.memory.copy_engines == pushes
        receipt = Receipt()
        receipt.add(copy_engines_entry(run.model, False, run.no_copy_engines))
        if obstacle or pushes:
            applied = {"blocks": 0, "by NCCL, because": obstacle} if obstacle else {"blocks": len(comms)}
            assert receipt.entries[0].applied == applied
            receipt.enforce(strict=True, warn=pytest.fail)  # nobody has asked for them

    run_ranks(body, tmp_path, 2)
    by_nccl, pushed = (MemoryModel(a.config, a.dims, None, a.optimizer, 2).peak_under(a.save_list) for a in asked)  # type: ignore[arg-type]
    assert pushed.communication < by_nccl.communication


def test_one_replica_that_cannot_share_memory_leaves_all_to_nccl(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1's, which is another than rank 0's."""
    mesh: Any = SimpleNamespace(built_for=Device(CPU.of_tensors, "H100", (9, 0)), experts=None)

    def body() -> None:
        refuses = dist.get_rank() == 1

        def share(*use: object) -> None:
            if refuses:
                raise error

        def why() -> str | None:
            lowering._try_to_share.cache_clear()
            return copy_engines.no_copy_engines(mesh)

        monkeypatch.setattr(copy_engines, "shard_group", lambda mesh: dist.group.WORLD.group_name)  # type: ignore[union-attr]
        monkeypatch.setattr(channel, "channel", share)
        monkeypatch.setattr(lowering, "_gather_objects", lambda group, own: [own])  # each rank is a replica's only one
        monkeypatch.setattr(lowering, "no_peer_access", lambda group: None)
        error: Exception = RuntimeError("CUDA driver error: operation not permitted\nException raised from …")
        assert why() == "symmetric memory: CUDA driver error: operation not permitted"
        refuses = False
        assert why() is None
        refuses = True
        for error in (torch.OutOfMemoryError("CUDA out of memory"), dist.DistStoreError("wait timeout")):
            with pytest.raises(type(error)):
                why()
        refuses, hosts = False, "ranks on several hosts"
        monkeypatch.setattr(lowering, "no_peer_access", lambda group: hosts * dist.get_rank() or None)
        assert why() == "ranks on several hosts"

    run_ranks(body, tmp_path, 2)


class Stream:
    """What FSDP orders on CPUs, too, where nothing comes of it: how many releases and gathers this one is behind."""

    current: "Stream"

    def __init__(self, priority: int = 0) -> None:
        self.behind = Counter[str]()

    def wait_stream(self, other: "Stream | Event") -> None:
        self.behind |= other.behind

    wait_event = wait_stream

    def record_event(self) -> "Event":
        return Event().record()

    @staticmethod
    @contextmanager
    def as_current(stream: "Stream") -> Iterator[None]:
        before, Stream.current = Stream.current, stream
        yield
        Stream.current = before


class Event:
    """Of the current stream."""

    def record(self, stream: Stream | None = None) -> "Event":
        self.behind = Counter((stream or Stream.current).behind)
        return self


MICRO_STEPS, FULL = ["--training.global_batch_size", "4"], ["--activation_checkpoint.recipe=full"]


@pytest.mark.parametrize(
    ("reshard", "flags"),
    [
        ("always", FULL),
        *slow(
            ("never", MICRO_STEPS),
            ("default", []),
            ("default", MICRO_STEPS),
            ("default", FULL),
            ("always", []),
            ("always", MICRO_STEPS),
        ),
        *slow(("never", []), ("never", FULL), ("default", EXPERTS)),
    ],
)
def test_a_place_is_written_when_it_has_been_read_and_read_when_it_is_written(
    reshard: str, flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the streams are ordered; some gathers overlap with what compute does in the unit before."""
    in_files(tmp_path, monkeypatch)
    compute = Stream.current = Stream()
    for name, mock in (("Stream", Stream), ("Event", Event), ("stream", Stream.as_current)):
        monkeypatch.setattr(torch.cpu, name, mock)
    monkeypatch.setattr(torch.cpu, "current_stream", lambda: Stream.current)
    released: dict[Range, int] = {}  # of a unit there, the number of the last release
    gathered: dict[Range, int] = {}
    overlaps: list[bool] = []  # of each gather, whether it did not wait for the last release
    cast, gather = PlacedGroup._cast, Arena.gather
    wait, release = PlacedGroup.wait_for_unshard, PlacedGroup._to_sharded

    def note_cast(self: PlacedGroup) -> None:
        assert Stream.current.behind["releases"] >= released.get(self.at, 0)
        overlaps.append(Stream.current.behind["releases"] < max(released.values(), default=0))
        cast(self)

    def note_gather(self: Arena, pieces: list) -> None:
        (unit,) = [u for at in self.ranges for u in at.units if getattr(u, "_pieces", None) is pieces]
        assert Stream.current.behind["releases"] >= released.get(unit.at, 0)
        Stream.current.behind["gathers"] = gathered[unit.at] = len(overlaps)
        gather(self, pieces)

    def note_wait(self: PlacedGroup) -> None:
        wait(self)
        assert not self.is_unsharded or compute.behind["gathers"] >= gathered[self.at]

    def note_release(self: PlacedGroup) -> None:
        if not self.is_sharded:
            compute.behind["releases"] += 1
            released[self.at] = compute.behind["releases"]
        release(self)

    monkeypatch.setattr(PlacedGroup, "_cast", note_cast)
    monkeypatch.setattr(PlacedGroup, "wait_for_unshard", note_wait)
    monkeypatch.setattr(PlacedGroup, "_to_sharded", note_release)
    monkeypatch.setattr(Arena, "gather", note_gather)
    world = 4 if flags is EXPERTS else 2  # experts are gathered too, by gloo
    flags = ["--training.mixed_precision_param=bfloat16", f"--training.global_batch_size={world}", *flags]
    flags += ["--model.n_layers=5", f"--parallelism.fsdp_reshard_after_forward={reshard}"]
    asked = checked(tmp_path, world, [*flags, "--parallelism.fsdp_copy_engines=always"])

    def body() -> None:
        take_steps(assemble(asked), 2)
        assert len(overlaps) >= 15
        assert any(overlaps) or reshard == "never"

    run_ranks(body, tmp_path, world)


@pytest.mark.slow
def test_experts_that_several_ranks_split_are_gathered_by_nccl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All else is by copy engines, and the receipt tells."""
    in_files(tmp_path, monkeypatch)
    asked = checked(tmp_path, 4, [*EXPERTS, "--parallelism.fsdp_copy_engines=always"])

    def body() -> None:
        run = assemble(asked)
        take_steps(run, 1)
        assert by_copy_engines(run) == 2
        assert not any(param_group(b.experts.w13).arena.by_copy_engines for b in run.model.layers)  # type: ignore[union-attr]
        entry = copy_engines_entry(run.model, True, None)
        assert entry.applied == {"blocks": 2, "by NCCL": "experts of 2 blocks, over ranks of their own"}
        assert not _dtypes(run).missed

    run_ranks(body, tmp_path, 4)


def by_copy_engines(run: Run) -> int:
    """Units whose gradients are reduced by them; that says float32, too, which the receipt reads."""
    blocks: list[nn.Module] = list(run.model.layers)  # type: ignore[arg-type]
    assert {dtype_of_reduction(block) for block in blocks} == {"float32"}
    return sum(param_group(block).arena.reduce is not None for block in blocks)  # type: ignore[arg-type, union-attr]


def test_as_many_ranks_as_kernels_take() -> None:
    assert _MOST_PEERS == MAX_RANKS
