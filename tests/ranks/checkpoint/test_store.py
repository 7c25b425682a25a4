"""The store: any layout to any layout exactly; what cannot be read or written is said on every rank."""

import io
import os
import pickle
import resource
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from tests.support.layouts import Net, check, net, plain, sharded
from tests.support.ranks import run_ranks
from titanlite.checkpoint import store
from titanlite.checkpoint.metadata import _STAND_INS, _StandIn
from titanlite.checkpoint.publish import begin, commit, verify
from titanlite.errors import CheckpointError

Sharded = dict[str, torch.Tensor]


def write(root: Path, state: Sharded, step: int = 1) -> Path:
    """Publish a state; on every rank."""
    tmp = root / f"step-{step:08d}.tmp"
    rank = dist.get_rank() if dist.is_initialized() else 0
    if rank == 0:
        begin(root, step)
    if dist.is_initialized():
        dist.barrier()
    entries = store.write(tmp, state)
    if rank == 0:
        verify(commit(tmp, entries))
    if dist.is_initialized():
        dist.barrier()
    return tmp.with_suffix("")


def read(folder: Path, state: Sharded) -> Sharded:
    assert store.read(folder, state) == set(state)
    return state


def test_two_ranks_to_one_to_four(tmp_path: Path) -> None:
    folder = tmp_path / "step-00000001"
    run_ranks(lambda: write(tmp_path, sharded(True)), tmp_path, world=2)
    full = read(folder, plain(False))  # no process group at all
    check(full)
    one = write(tmp_path, full, step=2)
    run_ranks(lambda: check(read(one, sharded(False))), tmp_path, world=4)
    run_ranks(lambda: check(read(folder, sharded(False))), tmp_path, world=4)


def test_two_mesh_axes_to_two_ranks_to_one(tmp_path: Path) -> None:
    four = tmp_path / "step-00000001"

    def two() -> None:
        check(read(four, sharded(False)))
        write(tmp_path, sharded(True), step=2)

    run_ranks(lambda: write(tmp_path, sharded(True, mesh_shape=(2, 2))), tmp_path, world=4)
    run_ranks(two, tmp_path, world=2)
    run_ranks(lambda: check(read(tmp_path / "step-00000002", sharded(False))), tmp_path, world=1)


@pytest.mark.parametrize(("fsdp", "tp"), [(2, 2), (4, 1), (1, 4)])
def test_fsdp_and_tensor_parallel_to_one(tmp_path: Path, fsdp: int, tp: int) -> None:
    saved = tmp_path / "step-00000001"
    run_ranks(lambda: write(tmp_path, dict(net(fsdp, tp).state_dict())), tmp_path, world=4)
    model, expected = Net(), dict(Net().state_dict())
    for p in model.parameters():
        p.data.zero_()
    read(saved, dict(model.state_dict()))
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, expected[name]), name

    def back() -> None:
        model = net(2, 2)
        for p in model.parameters():
            assert isinstance(p, DTensor)
            p.to_local().data.zero_()
        read(saved, dict(model.state_dict()))
        for name, tensor in model.state_dict().items():
            assert torch.equal(tensor.full_tensor(), expected[name]), name

    run_ranks(back, tmp_path, world=4)


def test_replicated_tensors_are_written_once(tmp_path: Path) -> None:
    n = 100_000

    def body() -> None:
        mesh = init_device_mesh("cpu", (2, 2))
        state = {
            "plain": torch.ones(n),
            "replicas": distribute_tensor(torch.ones(n), mesh, [Replicate(), Shard(0)]),
            f"rng/rank{dist.get_rank():05d}": torch.full((3,), dist.get_rank()),
        }
        folder = write(tmp_path, state)
        total = sum(p.stat().st_size for p in folder.iterdir())
        assert 2 * 4 * n < total < 2.1 * 4 * n  # two tensors of n float32, and headers
        mine = {f"rng/rank{dist.get_rank():05d}": torch.zeros(3, dtype=torch.int64)}
        state = {k: torch.zeros_like(v) for k, v in state.items()} | mine
        read(folder, state)
        assert state[f"rng/rank{dist.get_rank():05d}"].tolist() == [dist.get_rank()] * 3

    run_ranks(body, tmp_path, world=4)


def test_all_differences_are_listed(tmp_path: Path) -> None:
    folder = write(tmp_path, {"a": torch.ones(2), "b": torch.ones(2), "c": torch.ones(2), "rng/x": torch.ones(1)})
    state = {"a": torch.zeros(3), "b": torch.zeros(2, dtype=torch.bfloat16), "d": torch.zeros(2)}
    with pytest.raises(CheckpointError) as e:
        store.read(folder, state)
    text = str(e.value)
    assert "4 problems" not in text
    assert "missing in the checkpoint = d" in text
    assert "only in the checkpoint = c, rng/x" in text
    assert "a [2] torch.float32 (this run: [3] torch.float32)" in text
    assert "b [2] torch.float32 (this run: [2] torch.bfloat16)" in text
    assert "config.toml" in text
    assert all(not t.any() for t in state.values())


def test_optional_names_may_be_absent_on_either_side(tmp_path: Path) -> None:
    folder = write(tmp_path, {"a": torch.ones(2), "rng/x": torch.ones(1), "rng/z": torch.ones(1)})
    state = {"a": torch.zeros(2), "rng/x": torch.zeros(1), "rng/y": torch.zeros(1), "rng/z": torch.zeros(5)}
    assert store.read(folder, state, optional=("rng/",)) == {"a", "rng/x"}
    assert [int(t.sum()) for t in state.values()] == [2, 1, 0, 0]


def fails_everywhere(action, *parts: str) -> None:
    """The same CheckpointError on this rank as on all others."""
    with pytest.raises(CheckpointError) as e:
        action()
    for part in parts:
        assert part in str(e.value), f"{part!r} is not in: {e.value}"
    messages: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(messages, str(e.value))
    assert len(set(messages)) == 1


def test_a_problem_of_one_rank_is_everyones(tmp_path: Path) -> None:
    def body() -> None:
        rank = dist.get_rank()
        folder = write(tmp_path, {"a": torch.ones(2)})
        state = {"a": torch.zeros(3 if rank == 1 else 2)}
        fails_everywhere(lambda: store.read(folder, state), "a [2]", "this run: [3]")
        tmp = folder.with_name("step-00000002.tmp")
        tmp.mkdir(exist_ok=True)
        fails_everywhere(lambda: store.write(tmp, state), "another shape or dtype on some rank", "a")
        fails_everywhere(lambda: store.read(tmp, {}), ".metadata = FileNotFoundError")
        elsewhere = tmp if rank == 0 else tmp_path / "disk of another host"
        fails_everywhere(lambda: store.write(elsewhere, {"a": torch.ones(2)}), "rank 1 on", "does not see it")

    run_ranks(body, tmp_path)


def test_a_full_disk_is_everyones(tmp_path: Path) -> None:
    def body() -> None:
        rank = dist.get_rank()
        tmp = tmp_path / "step-00000001.tmp"
        tmp.mkdir(exist_ok=True)
        dist.barrier()
        state = {f"of{rank}": torch.ones(1000)}
        if rank == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
        try:
            store.write(tmp, state)
            message = ""
        except CheckpointError as e:
            message = str(e)
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        assert "rank 1 = cannot write" in message, message
        assert "File too large" in message, message
        assert str(tmp) in message
        assert not (tmp / ".metadata").exists()

    run_ranks(body, tmp_path)


def test_a_disk_that_is_too_small_is_noticed_before_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free = store.shutil.disk_usage(tmp_path)._replace(free=9 * 2**20)

    def body() -> None:
        if dist.get_rank() == 1:
            monkeypatch.setattr(store.shutil, "disk_usage", lambda _: free)
        tmp = tmp_path / "step-00000001.tmp"
        tmp.mkdir(exist_ok=True)
        dist.barrier()
        mesh = init_device_mesh("cpu", (2,))
        # 4 MiB sharded and 4 MiB replicated fit, though each rank holds 6 MiB; half a MiB more would, but not with a
        # tenth to spare.
        state = {
            "s": distribute_tensor(torch.ones(2**20), mesh, [Shard(0)]),
            "r": distribute_tensor(torch.ones(2**19), mesh, [Replicate()]),
            "plain": torch.ones(2**19),
        }
        store.write(tmp, state)
        more = state | {"t": torch.ones(2**17)}
        with pytest.raises(CheckpointError) as e:
            store.write(tmp, more)
        assert "needs 9.4 MiB" in str(e.value)  # 1.1 * 8.5 MiB
        assert f"9.0 MiB free at {tmp}" in str(e.value)

    run_ranks(body, tmp_path)


class Payload:
    """A live one: unpickling it makes a file."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[object, ...]:
        return (os.mkdir, (str(self.marker),))


def test_a_live_metadata_is_refused(tmp_path: Path) -> None:
    folder, marker = write(tmp_path, {"a": torch.ones(2)}), tmp_path / "marker"
    good = (folder / ".metadata").read_bytes()
    payload = pickle.dumps(Payload(marker))
    pickle.loads(payload)
    marker.rmdir()  # so the payload works
    for content in (payload, good[:-1] + payload):  # the last byte ends a pickle: without it, what follows runs too
        (folder / ".metadata").write_bytes(content)
        with pytest.raises(CheckpointError, match=r"it names posix\.mkdir"):
            store.read(folder, {"a": torch.zeros(2)})
        assert not marker.exists()
    for dotted in (b"cposix\nsystem\n.", b"\x80\x04\x8c\x05torch\x8c\x10serialization.os\x93."):
        (folder / ".metadata").write_bytes(dotted)
        with pytest.raises(CheckpointError, match="it names"):
            store.read(folder, {"a": torch.zeros(2)})


NAMED = [
    Metadata, MetadataIndex, ChunkStorageMetadata, TensorStorageMetadata, BytesStorageMetadata, TensorProperties,
    _MEM_FORMAT_ENCODING, _StorageInfo, torch.Size, torch.serialization._get_layout, getattr,
]  # fmt: skip


def test_all_that_a_pickle_may_name_is_tried() -> None:
    assert {(named.__module__, named.__qualname__) for named in NAMED} == _STAND_INS.keys()


@pytest.mark.parametrize("named", NAMED, ids=lambda named: named.__name__)
@pytest.mark.parametrize("state", [(None, {"set_by_a_pickle": 1}), {"set_by_a_pickle": 1}, (None, {"__new__": 1})])
def test_no_attribute_of_what_a_pickle_may_name_can_be_set(named: Any, state: object, tmp_path: Path) -> None:
    folder = write(tmp_path, {"a": torch.ones(2)})
    name = f"c{named.__module__}\n{named.__qualname__}\n".encode()
    said = pickle.PROTO + b"\2" + name + pickle.dumps(state, 2)[2:-1] + pickle.BUILD + pickle.STOP
    (folder / ".metadata").write_bytes(said)  # as `named.__setstate__(state)` or attribute by attribute
    before = dict(vars(named)) if named is not getattr else {}
    with pytest.raises(CheckpointError, match=r"\.metadata = "):
        store.read(folder, {"a": torch.zeros(2)})
    assert not hasattr(named, "set_by_a_pickle")
    assert named is getattr or dict(vars(named)) == before
    assert not any(hasattr(stand_in, "set_by_a_pickle") for stand_in in (_StandIn, *_STAND_INS.values()))


def test_what_is_named_often_is_made_once(tmp_path: Path) -> None:
    folder, many = write(tmp_path, {"a": torch.ones(2)}), list[object]()
    for _ in range(64):
        many = [many, many]
    (folder / ".metadata").write_bytes(pickle.dumps(many))
    with pytest.raises(CheckpointError, match=r"\.metadata = a list"):
        store.read(folder, {"a": torch.zeros(2)})


def test_members_of_an_enum_may_be_pickled_as_look_ups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As by some releases of Python 3.11."""
    by_name = lambda member, protocol: (getattr, (type(member), member.name))  # noqa: E731
    monkeypatch.setattr(_MEM_FORMAT_ENCODING, "__reduce_ex__", by_name)
    folder, into = write(tmp_path, {"a": torch.ones(2)}), torch.zeros(2)
    assert b"getattr" in (folder / ".metadata").read_bytes()
    store.read(folder, {"a": into})
    assert into.tolist() == [1, 1]


@pytest.mark.parametrize("look_up", [(torch.Size, "__new__"), (_MEM_FORMAT_ENCODING, "__class__")])
def test_other_look_ups_are_refused(tmp_path: Path, look_up: tuple[type, str]) -> None:
    class Payload:
        def __reduce__(self) -> tuple[object, ...]:
            return getattr, look_up

    folder = write(tmp_path, {"a": torch.ones(2)})
    (folder / ".metadata").write_bytes(pickle.dumps(Payload()))
    with pytest.raises(CheckpointError, match=r"getattr|KeyError"):
        store.read(folder, {"a": torch.zeros(2)})


def test_a_byte_entry_is_refused(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    dcp_folder = tmp_path / "x"
    with pytest.warns(UserWarning, match="torch.distributed is disabled"):
        dcp.save({"a": torch.ones(2), "live": Payload(marker)}, checkpoint_id=dcp_folder)
    with pytest.raises(CheckpointError, match=r"\.metadata(.|\n)*fix:  .*from its own checkpoints only"):
        store.read(dcp_folder, {"a": torch.zeros(2)})
    bare = tmp_path / "step-00000001"
    bare.mkdir()
    metadata = dcp.metadata.Metadata({"live": dcp.metadata.BytesStorageMetadata()}, storage_data={})
    (bare / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match="'live' is not a tensor"):
        store.read(bare, {"live": torch.zeros(2)})
    assert not marker.exists()


def test_metadata_that_leaves_the_folder_or_has_holes_is_refused(tmp_path: Path) -> None:
    folder = write(tmp_path, {"a": torch.ones(4)})
    good = (folder / ".metadata").read_bytes()
    (folder.parent / "x").mkdir()
    shutil.copy(folder / "__0_00.distcp", folder.parent / "x")  # it could be read

    def rewrite(change) -> None:
        metadata = pickle.loads(good)
        change(metadata)
        (folder / ".metadata").write_bytes(pickle.dumps(metadata))

    def elsewhere(metadata) -> None:
        next(iter(metadata.storage_data.values())).relative_path = "../x/__0_00.distcp"

    def hole(metadata) -> None:
        metadata.state_dict_metadata["a"].chunks[0].sizes = torch.Size([3])

    def transformed(metadata) -> None:
        next(iter(metadata.storage_data.values())).transform_descriptors = ["zstd"]

    refused = ((elsewhere, r"a shard in '\.\./x/__0_00"), (hole, "do not make up"), (transformed, "transformed by"))
    for change, message in refused:
        rewrite(change)
        with pytest.raises(CheckpointError, match=message):
            store.read(folder, {"a": torch.zeros(4)})


def test_shard_files_are_not_unpickled_either(tmp_path: Path) -> None:
    """A payload in place of a tensor: torch.load(weights_only=True) refuses it."""
    folder, marker = write(tmp_path, {"a": torch.ones(4)}), tmp_path / "marker"
    shard = folder / "__0_00.distcp"
    evil = io.BytesIO()
    torch.save(Payload(marker), evil)
    content = evil.getvalue()
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    next(iter(metadata.storage_data.values())).length = len(content)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    shard.write_bytes(content)
    with pytest.raises(CheckpointError, match="rank 0"):
        store.read(folder, {"a": torch.zeros(4)})
    assert not marker.exists()
