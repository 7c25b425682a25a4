"""Publishing: complete or absent at any instant, damage named, nothing valid deleted."""

import errno
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from titanlite.checkpoint import publish
from titanlite.checkpoint.publish import (
    MANIFEST,
    begin,
    commit,
    complete_steps,
    hash_files,
    partial_folders,
    prune,
    remove_stale,
    step_folder,
    verify,
)
from titanlite.errors import CheckpointError

ROOT = Path(__file__).parents[3]
FILES = {"rank00000-0.safetensors": b"a" * 3000, "rank00001-0.safetensors": b"b" * 3000, "state.json": b"{}"}


def save(root: Path, step: int) -> Path:
    tmp = begin(root, step)
    for name, content in FILES.items():
        (tmp / name).write_bytes(content)
    return commit(tmp, hash_files(tmp, FILES))


def test_a_published_checkpoint_verifies(tmp_path: Path) -> None:
    folder = save(tmp_path, 120)
    assert folder == tmp_path / "step-00000120"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000120"]
    verify(folder)
    assert complete_steps(tmp_path) == [120]


def test_a_step_is_never_overwritten(tmp_path: Path) -> None:
    save(tmp_path, 1)
    with pytest.raises(CheckpointError, match="never overwritten"):
        begin(tmp_path, 1)
    with pytest.raises(CheckpointError, match="never overwritten"):
        commit(step_folder(tmp_path, 1).with_suffix(".tmp"), {})
    verify(step_folder(tmp_path, 1))


def test_each_thing_is_on_disk_before_what_relies_on_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A power cut keeps no order of its own: without these waits the new name may be there and the files not."""
    tmp = begin(tmp_path, 1)
    (tmp / "a").write_bytes(b"1")
    fsync, rename, done = os.fsync, os.rename, []

    def waits(fd: int) -> None:
        done.append((os.fstat(fd).st_ino, os.fstat(fd).st_size))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", waits)
    monkeypatch.setattr(os, "rename", lambda *paths: (done.append(("rename", 0)), rename(*paths)))
    folder = commit(tmp, hash_files(tmp, ["a"]))
    manifest = (folder / MANIFEST).stat()
    inodes = [manifest.st_ino, folder.stat().st_ino, "rename", tmp_path.stat().st_ino]
    assert [which for which, _ in done] == inodes
    assert done[0] == (manifest.st_ino, manifest.st_size)  # all of it


def test_commit_refuses_what_was_not_written(tmp_path: Path) -> None:
    tmp = begin(tmp_path, 1)
    (tmp / "a").write_bytes(b"1")
    (tmp / "b").write_bytes(b"2")
    entries = hash_files(tmp, ["a", "b"])
    (tmp / "c").write_bytes(b"of nobody")
    (tmp / "b").unlink()
    with pytest.raises(CheckpointError) as e:
        commit(tmp, entries)
    assert "b = missing" in str(e.value)
    assert "c = not of this checkpoint" in str(e.value)
    assert complete_steps(tmp_path) == []


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


DAMAGE = {
    "truncated": (lambda f: os.truncate(f / "rank00001-0.safetensors", 10), "rank00001-0.safetensors = 10 bytes"),
    "first flipped": (lambda f: flip(f / "rank00000-0.safetensors"), "rank00000-0.safetensors = another SHA-256"),
    "last flipped": (lambda f: flip(f / "state.json"), "state.json = another SHA-256"),
    "missing": (lambda f: (f / "rank00001-0.safetensors").unlink(), "rank00001-0.safetensors = missing"),
    "extra": (lambda f: (f / "rank00009-0.safetensors").touch(), "rank00009-0.safetensors = not of this"),
    "linked": (
        lambda f: os.rename(f / "state.json", f.parent / "x") or (f / "state.json").symlink_to("../x"),
        "a link",
    ),
    "folder": (lambda f: (f / "more").mkdir(), "more = not a file"),
    "manifest cut": (lambda f: os.truncate(f / MANIFEST, 40), "MANIFEST.json = JSONDecodeError"),
    "manifest gone": (lambda f: (f / MANIFEST).unlink(), "MANIFEST.json = FileNotFoundError"),
    "manifest shape": (lambda f: (f / MANIFEST).write_text("[]"), "MANIFEST.json = TypeError"),
    "manifest empty": (lambda f: (f / MANIFEST).write_text("{}"), "MANIFEST.json = KeyError"),
    "manifest number": (
        lambda f: (f / MANIFEST).write_text('{"files": {"x": {"bytes": 1e999, "sha256": ""}}}'),
        "MANIFEST.json = OverflowError",
    ),
    "manifest list": (lambda f: (f / MANIFEST).write_text('{"files": []}'), "MANIFEST.json = AttributeError"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_named(tmp_path: Path, kind: str) -> None:
    folder = save(tmp_path, 7)
    damage, message = DAMAGE[kind]
    damage(folder)
    with pytest.raises(CheckpointError) as e:
        verify(folder)
    assert message in str(e.value)
    assert f"{folder}: 1 problem\n" in str(e.value)


def test_shares_of_the_hashing_cover_every_file(tmp_path: Path) -> None:
    folder = save(tmp_path, 7)
    for name in FILES:
        content = (folder / name).read_bytes()
        flip(folder / name)
        failed = 0
        for share in range(4):
            try:
                verify(folder, share=share, shares=4)
            except CheckpointError:
                failed += 1
        assert failed == 1  # each file is hashed by one share, not by all
        (folder / name).write_bytes(content)


@pytest.mark.parametrize("name", ["../../etc/passwd", "/etc/passwd", "a/b", "..", "", "a\n", MANIFEST])
def test_a_name_that_leaves_the_checkpoint_is_refused(tmp_path: Path, name: str) -> None:
    folder = save(tmp_path, 7)
    manifest = json.loads((folder / MANIFEST).read_text())
    manifest["files"][name] = {"bytes": 1, "sha256": "0"}
    (folder / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match="plain file names inside"):
        verify(folder)


def test_what_a_killed_check_of_the_folder_left_is_removed(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    for folder in (root / "seen-0123abcd.tmp", tmp_path / "seen-89abcdef.tmp", tmp_path / "seen-mine.tmp"):
        folder.mkdir(parents=True)
    (tmp_path / "step-00000001.tmp").mkdir()
    assert remove_stale(root) == ["seen-0123abcd.tmp", "seen-89abcdef.tmp"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["checkpoints", "seen-mine.tmp", "step-00000001.tmp"]


def test_only_complete_folders_of_our_name_count(tmp_path: Path) -> None:
    save(tmp_path, 3)
    stale = ["step-00000005.tmp", "step-00000007.deleting"]
    for other in ["step-4", "step-000000004", "backup-step-00000006-old", "step-00000008\n", *stale]:
        (tmp_path / other).mkdir()
        (tmp_path / other / MANIFEST).write_text('{"files": {}}')
    (tmp_path / "step-00000009").mkdir()  # no manifest
    assert complete_steps(tmp_path) == [3]
    assert partial_folders(tmp_path) == ["step-000000004", "step-00000009"]
    assert remove_stale(tmp_path) == stale
    assert (tmp_path / "backup-step-00000006-old").is_dir()
    assert complete_steps(tmp_path / "absent") == []
    assert remove_stale(tmp_path / "absent") == []


@pytest.mark.parametrize("mode", [0o000, 0o600], ids=oct)
@pytest.mark.parametrize("closed", ["run", "run/checkpoints", "run/checkpoints/step-00000002"])
def test_what_cannot_be_read_is_not_taken_for_absent(closed: str, mode: int, bound_by_permissions: None) -> None:
    root = Path("run/checkpoints")
    for step in (1, 2):
        save(root, step)
    Path(closed).chmod(mode)
    for look in (complete_steps, partial_folders):
        with pytest.raises(CheckpointError, match=rf"{root}.* = {os.strerror(errno.EACCES)}\n.*can be read"):
            look(root)


def test_a_manifest_that_may_not_be_read_is_not_to_be_deleted(bound_by_permissions: None) -> None:
    save(Path(), 1)
    Path("step-00000001/MANIFEST.json").chmod(0)
    with pytest.raises(
        CheckpointError, match=rf"MANIFEST.json = {os.strerror(errno.EACCES)}\n.*\n *fix:  make it readable"
    ):
        verify(Path("step-00000001"))


def test_a_file_is_no_folder_of_checkpoints(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    root.touch()
    with pytest.raises(CheckpointError, match=f"{root} = {os.strerror(errno.ENOTDIR)}"):
        complete_steps(root)
    (tmp_path / "step-00000001").touch()
    assert complete_steps(tmp_path) == []


def test_retention_counts_complete_checkpoints_only(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        save(tmp_path, step)
    for step in (5, 6):
        step_folder(tmp_path, step).mkdir()  # partial and newer: must not push a valid one out
    assert prune(tmp_path, keep=0) == []
    assert prune(tmp_path, keep=2, spare={1}) == [2]
    assert complete_steps(tmp_path) == [1, 3, 4]
    assert prune(tmp_path, keep=2) == [1]
    assert prune(tmp_path, keep=1) == [3]
    assert not list(tmp_path.glob("*.deleting"))


def test_what_cannot_be_deleted_is_told_and_ends_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def busy(path: Path) -> None:
        raise OSError(f"{path.name} is open elsewhere")

    save(tmp_path, 1)
    save(tmp_path, 2)
    with monkeypatch.context() as open_elsewhere:
        open_elsewhere.setattr(shutil, "rmtree", busy)
        open_elsewhere.setattr(publish.log, "warning", lambda text, *of: told.append(text % of))
        told: list[str] = []
        assert prune(tmp_path, keep=1) == [1]
    assert "step-00000001.deleting is open elsewhere" in told[0]
    assert complete_steps(tmp_path) == [2]
    (tmp_path / "step-00000003.tmp").symlink_to(step_folder(tmp_path, 2))
    assert remove_stale(tmp_path) == ["step-00000001.deleting", "step-00000003.tmp"]
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000002"]
    verify(step_folder(tmp_path, 2))  # a link goes, not what it leads to


WRITER = """
import sys, pathlib
from titanlite.checkpoint.publish import begin, commit, hash_files, prune, remove_stale
assert "torch" not in sys.modules
root = pathlib.Path(sys.argv[1])
for step in range(10_000):
    tmp = begin(root, step)
    names = [f"{rank}.bin" for rank in range(4)]
    for name in names:
        (tmp / name).write_bytes(bytes([step % 256]) * 200_000)
    commit(tmp, hash_files(tmp, names))
    prune(root, keep=2)
    print(step, flush=True)
"""


@pytest.mark.parametrize("seed", range(6))
def test_kill_at_a_random_instant(tmp_path: Path, seed: int) -> None:
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    assert writer.stdout
    assert writer.stdout.readline() == "0\n"
    time.sleep(random.Random(seed).uniform(0, 0.05))
    os.kill(writer.pid, signal.SIGKILL)
    reported = [0, *map(int, writer.communicate()[0].split())]
    steps = complete_steps(tmp_path)
    assert steps, "no checkpoint survived"
    assert steps[-1] >= reported[-1], "a checkpoint that was reported published is gone"
    for step in steps:
        verify(step_folder(tmp_path, step))
    remove_stale(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == [step_folder(tmp_path, s).name for s in steps]
