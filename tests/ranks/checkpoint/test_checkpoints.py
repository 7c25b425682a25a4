"""A run's checkpoints: saved, chosen and loaded by all ranks alike, or failing on all."""

import errno
import os
import random
import re
import resource
import signal
from contextlib import nullcontext
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh

from tests.support.ranks import run_ranks
from titanlite.checkpoint.background import Background
from titanlite.checkpoint.collective import on_all_ranks
from titanlite.checkpoint.publish import MANIFEST, complete_steps, remove_stale, step_folder, verify
from titanlite.checkpoint.rng import restore_rng, rng_state
from titanlite.checkpoint.saved_state import SavedState, read_state
from titanlite.checkpoint.state import Checkpoints
from titanlite.errors import CheckpointError, DataError

NO_GPU = not torch.cuda.is_available()
STATE = SavedState(samples=10**12, learning_rate=0.1, corpora={"ü": "a", "b": ""}, model={"sizes": [1, 2]})
# Widths that no world size here divides, shards that are empty on some rank, each dtype that a state has.
SHAPES = {
    "model/even": ((8, 4), torch.float32),
    "model/odd": ((5, 3), torch.float32),
    "optimizer/exp_avg/odd": ((5, 3), torch.bfloat16),
    "model/short": ((1,), torch.float32),
    "model/none": ((0, 4), torch.float32),
    "ids": ((7,), torch.int64),
    "mask": ((9, 2), torch.uint8),
}
PLAIN = {"optimizer/step": ((), torch.float32), "replicated": ((6,), torch.float32)}


def truth(name: str) -> Tensor:
    """The full tensor; values differ by name and position and are exact in bfloat16."""
    shape, dtype = (SHAPES | PLAIN)[name]
    start = 10 * sorted(SHAPES | PLAIN).index(name)
    return (start + torch.arange(torch.Size(shape).numel())).reshape(shape).to(dtype)


def sharded(fill: bool, *mesh_shape: int) -> dict[str, Tensor]:
    """The state, or zeros: sharded on dim 0 of a 1-D mesh, or dims 0 and 1 of a 2-D one, or plain and replicated."""
    mesh = init_device_mesh("cpu", mesh_shape or (dist.get_world_size(),))
    state = plain() | ({name: truth(name) for name in PLAIN} if fill else {})
    for name, (shape, _) in SHAPES.items():
        placements = [Shard(0), Shard(1) if len(shape) > 1 else Replicate()][: mesh.ndim]
        state[name] = distribute_tensor(truth(name) if fill else state[name], mesh, placements)
    return state


def plain() -> dict[str, Tensor]:
    """Zeros, whole on every rank."""
    return {name: torch.zeros_like(truth(name)) for name in SHAPES | PLAIN}


def check(state: dict[str, Tensor]) -> None:
    """Every tensor, gathered if need be, is bitwise the truth."""
    for name, tensor in state.items():
        full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        assert torch.equal(full, truth(name)), f"{name}: {full} is not {truth(name)}"


def save(root: Path, *steps: int) -> None:
    for step in steps:
        Checkpoints(root, keep=0).save(step, {"w": torch.full((4,), float(step))}, SavedState(samples=step))


def raises_everywhere(action, *parts: str) -> None:
    """Every rank raises a CheckpointError with the same message."""
    try:
        action()
        text = "nothing was raised"
    except CheckpointError as e:
        text = str(e)
    texts = [""] * dist.get_world_size()
    dist.all_gather_object(texts, text)
    assert len(set(texts)) == 1, texts
    for part in parts:
        assert part in text, f"{part!r} is not in: {text}"


def test_saved_on_two_mesh_axes_loaded_by_four_ranks_two_and_one(tmp_path: Path) -> None:
    def first() -> None:
        checkpoints = Checkpoints(tmp_path / "checkpoints", keep=2)
        assert checkpoints.choose("auto") is None
        folder = checkpoints.save(7, sharded(True, 2, 2) | rng_state(), STATE)
        assert folder == tmp_path / "checkpoints/step-00000007"

    def again() -> None:
        checkpoints = Checkpoints(tmp_path / "checkpoints", keep=2)
        assert checkpoints.choose("auto") == 7
        target = sharded(False)
        state, notices = checkpoints.load(7, target | rng_state())
        check(target)
        assert state == replace(STATE, step=7, world_size=4, torch=torch.__version__)
        assert len(notices) == (dist.get_world_size() != 4)
        assert all("random number generators start fresh" in notice for notice in notices)

    run_ranks(first, tmp_path, world=4)
    for world in (2, 4):
        run_ranks(again, tmp_path, world)
    target = plain()  # no process group
    state, notices = Checkpoints(tmp_path / "checkpoints", keep=2).load(7, target | rng_state())
    check(target)
    assert state == replace(STATE, step=7, world_size=4, torch=torch.__version__)
    assert "saved by 4 ranks, this run has 1" in notices[0]


def draws() -> list[float]:
    return [random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), float(torch.rand(()))]


def test_random_state_goes_on() -> None:
    draws()  # leaves one of a pair of Gaussians pending in `random` and in numpy
    kept, expected = rng_state(), draws()
    draws()
    restore_rng(kept)
    assert draws() == expected


def test_a_checkpoint_without_random_state_is_told(tmp_path: Path) -> None:
    save(tmp_path, 10)
    _, (notice,) = Checkpoints(tmp_path, keep=1).load(10, {"w": torch.zeros(4)} | rng_state())
    lost = "rng/rank00000/numpy, rng/rank00000/python, rng/rank00000/torch"
    assert f"random number generators start fresh, since it does not have {lost}. This" in notice


def test_what_starts_afresh_is_not_said_to_be_restored(tmp_path: Path) -> None:
    save(tmp_path, 10)
    for left, restored in (((), "weights, optimizer state and the place"), (("optimizer/",), "weights and the place")):
        given = {"w": torch.zeros(4)} | rng_state()
        _, (notice,) = Checkpoints(tmp_path, keep=1).load(10, given, lambda _, left=left: left)
        assert notice.endswith(f"; {restored} in the data are restored exactly")


def test_which_step_is_resumed(tmp_path: Path) -> None:
    root = tmp_path / "c"
    run = Checkpoints(root, keep=0)
    assert run.choose("auto") is None
    assert run.choose("never") is None
    with pytest.raises(CheckpointError, match=r"checkpoint\.resume = 50\n.*there is none"):
        run.choose(50)
    save(root, 10, 20, 30)
    (root / "step-00000040.tmp").mkdir()
    assert run.choose("auto") == 30
    assert run.choose(30) == 30
    assert not (root / "step-00000040.tmp").exists()
    with pytest.raises(CheckpointError, match="never"):
        run.choose("never")
    with pytest.raises(CheckpointError, match="want: one of 10, 20, 30"):
        run.choose(25)
    with pytest.raises(CheckpointError) as e:
        run.choose(10)
    assert "the newest, 30: " in str(e.value)
    assert "abandoned branch (20, 30)" in str(e.value)
    assert "move the newer ones away" in str(e.value)
    assert "another job.name and copy step-00000010" in str(e.value)
    (root / "step-00000050").mkdir()
    for resume in ("auto", 30):
        with pytest.raises(CheckpointError, match="step-00000050 = incomplete"):
            run.choose(resume)


def test_all_ranks_choose_alike_and_one_that_does_not_see_the_folder_is_named(tmp_path: Path) -> None:
    def body() -> None:
        # Rank 1 sees another folder, as with a slow network file system: rank 0 decides.
        run = Checkpoints(tmp_path / "c" if dist.get_rank() == 0 else tmp_path / "disk of another host", keep=0)
        assert run.choose("auto") == 20
        raises_everywhere(lambda: run.choose(30), "one of 10, 20")
        raises_everywhere(lambda: run.load(20, {"w": torch.zeros(4)}), "1 problem\n  rank 1 on", "does not see it")

    save(tmp_path / "c", 10, 20)
    run_ranks(body, tmp_path)


def test_retention_spares_the_step_resumed_from(tmp_path: Path) -> None:
    root = tmp_path / "c"
    save(root, 1, 2, 3)
    run = Checkpoints(root, keep=2)
    target = {"w": torch.zeros(4)}
    state, notices = run.load(3, target)
    assert (state.samples, notices, target["w"].tolist()) == (3, [], [3.0] * 4)
    for step in (4, 5, 6):
        run.save(step, target, SavedState())
    assert complete_steps(root) == [3, 5, 6]
    with pytest.raises(CheckpointError, match="never overwritten"):
        run.save(6, target, SavedState())


DAMAGE = {
    "truncated": lambda p: os.truncate(p, 100),
    "flipped": lambda p: p.write_bytes(p.read_bytes()[:-1] + bytes([p.read_bytes()[-1] ^ 1])),
    "flipped in the header": lambda p: p.write_bytes(p.read_bytes()[:9] + b"~" + p.read_bytes()[10:]),
    "missing": lambda p: p.unlink(),
}


def test_damage_stops_all_ranks_and_names_the_older_good_one(tmp_path: Path) -> None:
    damaged = [*product(DAMAGE, ("rank00000-0.safetensors", "state.json"))]  # each file is hashed by one of the ranks
    for kind, file in damaged:
        save(tmp_path / kind / file, 10, 20, 30, 40)
        for step in (30, 40):
            DAMAGE[kind](step_folder(tmp_path / kind / file, step) / file)

    def body() -> None:
        for kind, file in damaged:
            run, target = Checkpoints(tmp_path / kind / file, keep=2), {"w": torch.zeros(4)}
            assert run.choose("auto") == 40
            said = "step-00000040", f"{file} = ", "step 20 is the newest that is undamaged"
            raises_everywhere(lambda: run.load(40, target), *said)  # noqa: B023
            assert not target["w"].any()

    run_ranks(body, tmp_path)


def test_no_older_one(tmp_path: Path) -> None:
    save(tmp_path, 10)
    (step_folder(tmp_path, 10) / MANIFEST).write_text("{")
    with pytest.raises(CheckpointError, match="no older one is undamaged"):
        Checkpoints(tmp_path, keep=1).load(10, {"w": torch.zeros(4)})


def test_a_renamed_checkpoint_and_a_newer_format_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 10)
    step_folder(tmp_path, 10).rename(step_folder(tmp_path, 11))
    with pytest.raises(CheckpointError, match=r"state\.json = step 10\n.*want: step 11"):
        Checkpoints(tmp_path, keep=1).load(11, {"w": torch.zeros(4)})
    monkeypatch.setattr("titanlite.checkpoint.saved_state.VERSION", 4)
    with pytest.raises(CheckpointError, match=r"state\.json = version 3\n.*want: version 4"):
        Checkpoints(tmp_path, keep=1).load(11, {"w": torch.zeros(4)})


def test_what_a_mirror_copies_is_kept(tmp_path: Path) -> None:
    run = Checkpoints(tmp_path, keep=1)
    run.held = lambda: nullcontext(1)
    for step in (1, 2, 3):
        run.save(step, {"w": torch.ones(4)}, SavedState())
    assert complete_steps(tmp_path) == [1, 3]


@pytest.mark.parametrize(
    ("version", "fix"),
    [(1, ": commit 62eae34d is the last"), (2, ": commit 07e5a3c5 is the last"), ([], "\n"), (9, "\n")],
)
def test_a_checkpoint_of_another_version_says_what_reads_it(tmp_path: Path, version: object, fix: str) -> None:
    Checkpoints(tmp_path, keep=1).save(10, {"w": torch.ones(4)}, SavedState(version=version))  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match=r"want: version 3") as caught:
        read_state(step_folder(tmp_path, 10), 10)
    assert f"version {version}\n" in str(caught.value)
    assert f"use the titanlite that wrote it{fix}" in f"{caught.value}\n"


def test_other_versions_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 10)
    monkeypatch.setattr("titanlite.__version__", "9.9")
    _, notices = Checkpoints(tmp_path, keep=1).load(10, {"w": torch.zeros(4)})
    assert notices == ["step-00000010 was saved with titanlite 0.1.0, this is 9.9"]


@pytest.mark.parametrize("bad_rank", [0, 1])
def test_a_full_disk_leaves_the_checkpoint_before(tmp_path: Path, bad_rank: int) -> None:
    root = tmp_path / "c"

    def body() -> None:
        run = Checkpoints(root, keep=1)
        state = {f"of{dist.get_rank()}": torch.ones(1000)}
        run.save(1, state, SavedState())
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        if dist.get_rank() == bad_rank:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
        try:
            run.save(2, state, SavedState())
            text = "nothing was raised"
        except CheckpointError as e:
            text = str(e)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert f"rank {bad_rank} = cannot write" in text, text
        assert "File too large" in text
        assert str(root) in text
        assert complete_steps(root) == [1]
        run.save(2, state, SavedState())  # the leftovers of the failed attempt are no obstacle
        assert complete_steps(root) == [2]

    run_ranks(body, tmp_path)


def test_a_failure_of_one_rank_keeps_its_class_on_all_if_it_is_ours(tmp_path: Path) -> None:
    def body() -> None:
        for error, everywhere in ((DataError, DataError), (OSError, CheckpointError)):

            def fails() -> None:
                if dist.get_rank() == 1:
                    raise error("on rank 1")  # noqa: B023

            with pytest.raises(everywhere, match="on rank 1"):
                on_all_ranks(fails)

    run_ranks(body, tmp_path)


def test_a_manifest_that_cannot_be_written_says_where_and_what_helps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: object) -> None:
        raise OSError(errno.EIO, "Input/output error", "state.json")

    def body() -> None:
        monkeypatch.setattr("titanlite.checkpoint.state.write_durably", full)
        folder = re.escape(f"{tmp_path / 'step-00000001.tmp'}")
        said = (
            rf"^rank 0: OSError: .*'state.json', while {folder} was written\n +want: a folder that every rank can write"
        )
        with pytest.raises(
            CheckpointError, match=rf"{said}.*\n +fix:  make room \(.* free now\) or set job.dump_folder"
        ):
            Checkpoints(tmp_path, keep=1).save(1, {}, SavedState())

    run_ranks(body, tmp_path)


def test_a_state_that_is_not_json_is_a_bug_with_a_traceback(tmp_path: Path) -> None:
    def body() -> None:
        expected = TypeError if dist.get_rank() == 0 else CheckpointError
        with pytest.raises(expected, match="not JSON serializable"):
            Checkpoints(tmp_path / "c", keep=1).save(1, {}, SavedState(model={"path": tmp_path}))
        assert not (tmp_path / "c").exists()

    run_ranks(body, tmp_path)


@pytest.mark.gpu
@pytest.mark.skipif(NO_GPU, reason="no CUDA device")
def test_cuda_tensors_and_random_state(tmp_path: Path) -> None:
    state = {"w": torch.arange(1000.0, device="cuda"), "b": torch.ones(7, dtype=torch.bfloat16, device="cuda")}
    run = Checkpoints(tmp_path, keep=1)
    run.save(1, state | rng_state(), SavedState())
    expected = torch.rand(3, device="cuda")
    target = {name: torch.zeros_like(t) for name, t in state.items()} | rng_state()
    assert run.load(1, target)[1] == []
    restore_rng(target)
    assert torch.equal(torch.rand(3, device="cuda"), expected)
    assert all(torch.equal(target[name], t) for name, t in state.items())


@pytest.mark.parametrize(
    "device",
    ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(NO_GPU, reason="no CUDA device")])],
)
def test_what_is_written_in_the_background_is_what_was_there_when_it_began(tmp_path: Path, device: str) -> None:
    backend = "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        checkpoints = Checkpoints(tmp_path, keep=0)
        mesh = init_device_mesh(device, (1,))
        plain = torch.arange(1e6, device=device)
        state = {"plain": plain, "laid out": DTensor.from_local(plain + 0.5, mesh, [Shard(0)])}
        background = Background(checkpoints, state)
        for step in (1, 2):  # the second into the memory of the first
            before = {name: t.clone() for name, t in state.items()}
            background.save(step, state, SavedState())
            for t in state.values():
                t.add_(1)
            assert background.wait() == step_folder(tmp_path, step)
            found = {name: torch.zeros_like(t) for name, t in state.items()}
            checkpoints.load(step, found)
            assert all(torch.equal(found[name], t) for name, t in before.items())
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("seed", range(4))
def test_a_kill_of_one_rank_at_a_random_instant(tmp_path: Path, seed: int) -> None:
    root, victim, reported = tmp_path / "c", seed % 2, tmp_path / "reported"

    def body() -> None:
        run = Checkpoints(root, keep=2)
        state = sharded(True)
        run.save(0, state, SavedState())
        if dist.get_rank() == victim:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)  # the kernel ends the process, in the middle of anything
            signal.setitimer(signal.ITIMER_REAL, random.Random(seed).uniform(0.01, 0.2))
        for step in range(1, 10_000):
            run.save(step, state, SavedState())
            if dist.get_rank() == 0:
                reported.write_text(str(step))

    with pytest.raises(AssertionError, match=f"rank {victim}: exit -14"):
        run_ranks(body, tmp_path)
    steps = complete_steps(root)
    last = int(reported.read_text() or 0) if reported.exists() else 0
    assert steps
    assert steps[-1] >= last
    for step in steps:
        verify(step_folder(root, step))
    remove_stale(root)
    assert len(list(root.iterdir())) == len(steps)
    target = plain()
    run = Checkpoints(root, keep=2)
    assert run.choose("auto") == steps[-1]
    run.load(steps[-1], target)
    check(target)


def test_random_state_of_each_rank_is_saved_and_loaded(tmp_path: Path) -> None:
    def body() -> None:
        torch.manual_seed(dist.get_rank())
        checkpoints, kept = Checkpoints(tmp_path / "c", keep=1), rng_state()
        checkpoints.save(1, kept, SavedState())
        loaded = {name: torch.zeros_like(tensor) for name, tensor in kept.items()}
        assert checkpoints.load(1, loaded)[1] == []
        assert all(torch.equal(loaded[name], tensor) for name, tensor in kept.items())

    run_ranks(body, tmp_path)
