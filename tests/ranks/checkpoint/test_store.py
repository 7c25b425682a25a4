"""The store: any layout to any layout exactly; what cannot be read or written is said on every rank."""

import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from tests.support.ranks import run_ranks
from titanlite.checkpoint import store
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
        fails_everywhere(lambda: store.read(tmp, {}), "safetensors = none")
        elsewhere = tmp if rank == 0 else tmp_path / "disk of another host"
        fails_everywhere(lambda: store.write(elsewhere, {"a": torch.ones(2)}), "rank 1 on", "does not see it")

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


def rewritten(file: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change what the header of a file says."""
    content = file.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:end])
    change(header)
    said = json.dumps(header).encode()
    file.write_bytes(len(said).to_bytes(8, "little") + said + content[end:])


def offsets(header: dict[str, Any], at: object) -> None:
    header["__metadata__"]["DCP_SHARDING_INFO"] = json.dumps({"a": {"saved_offsets": at}})


def shape(header: dict[str, Any], shape: list[int]) -> None:
    header["a"]["shape"] = shape


HEADERS: dict[str, Callable[[dict[str, Any]], object]] = {
    "no offsets": lambda header: header.pop("__metadata__"),
    "offsets of another": lambda header: header["__metadata__"].update(DCP_SHARDING_INFO="{}"),
    "offsets that are none": lambda header: header["__metadata__"].update(DCP_SHARDING_INFO="[" * 5000),
    "offsets of other dims": lambda header: offsets(header, [0, 0]),
    "offsets that are words": lambda header: offsets(header, ["0"]),
    "offsets that are no numbers of rows": lambda header: offsets(header, [0.0]),
    "a part elsewhere": lambda header: offsets(header, [1]),
    "a larger tensor": lambda header: shape(header, [2**40]),
    "a size below 0": lambda header: shape(header, [-4]),
    "a dtype that is none": lambda header: header["a"].update(dtype="pickle"),
    "a dtype that no run has": lambda header: header["a"].update(dtype="U16", shape=[8]),
    "beyond the file": lambda header: header["a"].update(data_offsets=[16, 32]),
}


@pytest.mark.parametrize("change", HEADERS.values(), ids=HEADERS)
def test_a_wrong_header_is_refused(tmp_path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    folder, into = write(tmp_path, {"a": torch.ones(4)}), torch.zeros(4)
    rewritten(folder / "rank00000-0.safetensors", change)
    with pytest.raises(CheckpointError, match=r"(rank00000-0\.safetensors|a) = "):
        store.read(folder, {"a": into})
    assert not into.any()


@pytest.mark.parametrize("content", [b"", b"\xff" * 100, pickle.dumps([1]), (2**62).to_bytes(8, "little") + b"{}"])
def test_what_is_no_file_of_tensors_is_refused(tmp_path: Path, content: bytes) -> None:
    folder = write(tmp_path, {"a": torch.ones(4)})
    (folder / "rank00000-0.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"rank00000-0\.safetensors = "):
        store.read(folder, {"a": torch.zeros(4)})


def test_a_part_that_is_there_twice_or_is_not_there_is_refused(tmp_path: Path) -> None:
    folder = write(tmp_path, {"a": torch.ones(4)})
    shutil.copy(folder / "rank00000-0.safetensors", folder / "rank00001-0.safetensors")
    with pytest.raises(CheckpointError, match="a = parts that do not make up the tensor"):
        store.read(folder, {"a": torch.zeros(4)})
    for other in (torch.ones(4, 1), torch.ones(4).bfloat16()):
        elsewhere = write(tmp_path / "other", {"a": other}, step=other.dim() + other.itemsize)
        shutil.copy(elsewhere / "rank00000-0.safetensors", folder / "rank00001-0.safetensors")
        with pytest.raises(CheckpointError, match="a = parts that do not make up the tensor"):
            store.read(folder, {"a": torch.zeros(4)})
    for file in folder.glob("*.safetensors"):
        file.unlink()
    with pytest.raises(CheckpointError, match="safetensors = none"):
        store.read(folder, {"a": torch.zeros(4)})


def test_parts_that_leave_a_gap_and_overlap_are_refused(tmp_path: Path) -> None:
    folder, into = write(tmp_path, {"a": torch.ones(2)}), torch.zeros(4)
    for rank, (at, n) in enumerate([(0, 2), (1, 1), (3, 1)]):
        other = write(tmp_path / "other", {"a": torch.ones(n)}, step=rank + 1) / "rank00000-0.safetensors"
        rewritten(other, lambda header, at=at: offsets(header, [at]))
        shutil.copy(other, folder / f"rank{rank:05d}-0.safetensors")
    with pytest.raises(CheckpointError, match="a = parts that do not make up the tensor"):
        store.read(folder, {"a": into})


@pytest.mark.parametrize("kind", ["link", "folder", "pipe"])
def test_what_is_no_plain_file_is_refused(tmp_path: Path, kind: str) -> None:
    folder = write(tmp_path, {"a": torch.ones(4)})
    file = folder / "rank00000-0.safetensors"
    moved = file.rename(tmp_path / "x.safetensors")
    {"link": lambda: file.symlink_to(moved), "folder": file.mkdir, "pipe": lambda: os.mkfifo(file)}[kind]()
    for read in (lambda: store.read(folder, {"a": torch.zeros(4)}), lambda: store.digests(folder)):
        with pytest.raises(CheckpointError, match="no plain file"):
            read()


def test_what_the_system_cannot_read_is_not_to_be_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("unable to mmap 8 bytes from file: Cannot allocate memory (12)")

    folder = write(tmp_path, {"a": torch.ones(4)})
    monkeypatch.setattr(store, "safe_open", fail)
    with pytest.raises(CheckpointError, match="memory to map") as caught:
        store.read(folder, {"a": torch.zeros(4)})
    assert "delete" not in str(caught.value)
    with pytest.raises(CheckpointError, match="No such file") as caught:
        store.digests(tmp_path / "none")
    assert "delete" not in str(caught.value)


def test_a_dtype_that_safetensors_have_not_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    tmp = begin(tmp_path, 1)
    with pytest.raises(CheckpointError, match=r"odd = of torch\.complex64"):
        store.write(tmp, {"a": torch.ones(2), "odd": torch.ones(2, dtype=torch.complex64)})
    assert not list(tmp.iterdir())


def test_digests_tell_bits_dtypes_and_damage_apart(tmp_path: Path) -> None:
    zeros = [torch.zeros(4), torch.zeros(4, dtype=torch.int32), torch.zeros(2, 2), torch.ones(4)]
    folders = [write(tmp_path, {"a": tensor}, step=n + 1) for n, tensor in enumerate(zeros)]
    of_each = [store.digests(folder) for folder in folders]
    assert [a == b for a in of_each for b in of_each] == [n == m for n in range(4) for m in range(4)]
    (folders[0] / "rank00000-0.safetensors").write_bytes(b"x" * 50)
    with pytest.raises(CheckpointError, match="rank00000-0"):
        store.digests(folders[0])
    (folders[0] / "rank00000-0.safetensors").unlink()
    with pytest.raises(CheckpointError, match="none"):
        store.digests(folders[0])


def test_large_states_are_in_more_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "_FILE_BYTES", 1000)
    state = {f"w{n}": torch.full((100,), float(n)) for n in range(20)}
    folder = write(tmp_path, state)
    assert len(list(folder.glob("*.safetensors"))) == 8
    into = {name: torch.zeros(100) for name in state}
    read(folder, into)
    assert all(torch.equal(into[name], state[name]) for name in state)


def test_a_file_is_read_by_safetensors_alone_and_by_dcp(tmp_path: Path) -> None:
    """Numbers of each dtype that runs have, aligned, with the file that any tool opens."""
    dtypes = torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.int32, torch.uint8, torch.bool
    state = {str(dtype): torch.arange(3).to(dtype) for dtype in dtypes} | {"scalar": torch.tensor(0.5)}
    folder, found = write(tmp_path, state), dict[str, torch.Tensor]()
    for file in sorted(folder.glob("*.safetensors")):
        found |= load_file(file)
    assert found.keys() == state.keys()
    assert all(torch.equal(found[name], state[name]) for name in state)
    into = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    with pytest.warns(UserWarning, match="torch.distributed is disabled"):
        dcp.load(into, storage_reader=HuggingFaceStorageReader(str(folder)))
    assert all(torch.equal(into[name], state[name]) for name in state)


def test_ranks_without_a_row(tmp_path: Path) -> None:
    def body() -> None:
        mesh = init_device_mesh("cpu", (4,))
        rows = torch.arange(6.0).view(2, 3)
        folder = write(tmp_path, {"few": distribute_tensor(rows, mesh, [Shard(0)]), "none": torch.empty(0, 3)})
        into = {"few": distribute_tensor(torch.zeros(2, 3), mesh, [Shard(1)]), "none": torch.empty(0, 3)}
        read(folder, into)
        assert torch.equal(into["few"].full_tensor(), rows)  # type: ignore[attr-defined]

    run_ranks(body, tmp_path, world=4)
