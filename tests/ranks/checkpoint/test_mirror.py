"""The mirror of a run's checkpoints: complete or absent, whatever is killed or fails, and training never waits."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.faulty_store import SECRET, FaultyFileSystem, FaultyStore, s3
from tests.support.needs import slow
from titanlite.checkpoint import mirror as mirror_file
from titanlite.checkpoint import mirror_process
from titanlite.checkpoint.mirror import Mirror
from titanlite.checkpoint.mirror_store import Claim, MirrorStore
from titanlite.checkpoint.publish import begin, commit, complete_steps, hash_files, prune, step_folder, verify
from titanlite.checkpoint.saved_state import SavedState
from titanlite.config.schema import Checkpoint, Config, Job
from titanlite.config.write import to_toml
from titanlite.data import remote
from titanlite.errors import CheckpointError, ConfigError, DataError
from titanlite.preflight.hub_names import pin_names
from titanlite.preflight.run_folder import RunFolder
from titanlite.preflight.take_up_mirror import claim_of, take_up_mirror
from titanlite.preflight.trained_model import asked_step

CLAIM = Claim("id", "run", 1, 1, "token")


class Lines(list[str]):
    """A console that keeps what it is given."""

    def notice(self, text: str) -> None:
        self.append(text)

    def warning(self, text: str) -> None:
        self.append(f"warning: {text}")


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FaultyStore:
    monkeypatch.setattr(mirror_file, "_PAUSES_S", (0.0, 0.01))
    monkeypatch.setattr(remote, "_PAUSES_S", (0.0,) * 3)
    return FaultyStore(tmp_path, monkeypatch)


def save(run: Path, step: int, loss: float | None = None, size: int = 50_000) -> None:
    """Publish a checkpoint whose content follows from its step."""
    tmp = begin(run / "checkpoints", step)
    for name in ("a", "b", "c"):
        (tmp / f"{name}.safetensors").write_bytes(random.Random(f"{name}{step}").randbytes(size))
    losses = {} if loss is None else {"validation_loss": loss}
    (tmp / "state.json").write_text(SavedState(step=step, losses=losses).to_json())
    commit(tmp, hash_files(tmp, sorted(path.name for path in tmp.iterdir())))


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def mirrored(url: str, run: Path, said: Lines, claim: Claim = CLAIM, **keys: Any) -> Mirror:
    return Mirror(Checkpoint(mirror=url, **keys), run, claim, said)  # type: ignore[arg-type]


def until(mirror: Mirror, is_so: Callable[[], object]) -> None:
    """Take steps until something is so."""
    end = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < end
        mirror.progress(0)
        time.sleep(0.01)


@pytest.mark.parametrize("fault", ["full", *slow("gone")])
def test_a_store_that_fails_is_told_once_and_again_when_it_works(
    tmp_path: Path, store: FaultyStore, fault: str
) -> None:
    store.becomes(fault)
    save(tmp_path, 1)
    mirror = mirrored(store.url, tmp_path, said := Lines())
    until(mirror, lambda: mirror._failures > 3)
    (warning,) = said
    assert "takes no checkpoints" in warning
    assert store.complete() == []
    store.becomes("ok")
    until(mirror, lambda: store.complete() == [1] and mirror._doing is None)
    mirror.wait(5)
    _, again, done = said
    assert again.endswith("works again")
    assert "has step-00000001, after" in done
    assert not any(SECRET in line for line in said)


def test_checkpoints_deleted_before_they_are_copied_are_told_once(tmp_path: Path, store: FaultyStore) -> None:
    """The one that is being copied stays. Those of an earlier start may be in the mirror."""
    store.becomes("hangs")
    save(tmp_path, 1)
    save(tmp_path, 2)
    mirror = mirrored(store.url, tmp_path, said := Lines(), keep_latest_k=1, mirror_keep_latest_k=0)
    until(mirror, lambda: mirror._doing == 2)
    for step in (3, 4, 5):
        save(tmp_path, step)
        mirror.progress(step)
        with mirror.held() as copied:
            prune(tmp_path / "checkpoints", 1, spare={copied})
    assert complete_steps(tmp_path / "checkpoints") == [2, 5]
    (warning,) = said
    assert "step-00000003 were deleted here before they were copied" in warning
    mirror._kill()


def test_the_mirror_keeps_its_newest_and_the_best(tmp_path: Path, store: FaultyStore) -> None:
    """Of what it has, though this folder has not; leftovers go, and a damaged checkpoint is not copied."""
    keys = {"keep_latest_k": 0, "mirror_keep_latest_k": 2, "keep_best": "validation_loss"}
    for step, loss in {1: 3.0, 2: 1.0, 3: 2.0, 4: None, 5: 1.0}.items():
        save(tmp_path, step, loss)
        mirrored(store.url, tmp_path, Lines(), **keys).wait(60)
        if step == 3:
            shutil.rmtree(step_folder(tmp_path / "checkpoints", 2))
            (store.folder / "step-00000009").mkdir()
            (store.folder / "step-00000009/a.safetensors").touch()
    assert store.complete() == [2, 4, 5]
    assert not (store.folder / "step-00000009").exists()
    save(tmp_path, 6)
    (step_folder(tmp_path / "checkpoints", 6) / "a.safetensors").write_bytes(bytes(50_000))
    mirrored(store.url, tmp_path, said := Lines(), **keys).wait(60)
    assert store.complete() == [2, 4, 5]
    assert any("step-00000006 is not copied" in line for line in said)
    shutil.rmtree(step_folder(tmp_path / "checkpoints", 5))
    mirrored(f"{store.url}-other", tmp_path, Lines(), **keys).wait(60)
    assert MirrorStore(f"{store.url}-other").complete() == [3, 4]


def test_no_end_of_the_process_and_no_print_of_it_ends_training(tmp_path: Path, store: FaultyStore) -> None:
    """Also where the system forgets how children end, and where Python greets."""
    (tmp_path / "package/sitecustomize.py").write_text("print('welcome')")
    save(tmp_path, 1)
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        mirror = mirrored(store.url, tmp_path, said := Lines())
        mirror.progress(0)
        assert mirror._process
        mirror._process.kill()
        until(mirror, lambda: store.complete() == [1] and mirror._doing is None)
    finally:
        signal.signal(signal.SIGCHLD, before)
    assert "takes no checkpoints; training goes on, and the copy is tried again. its process ended" in said[0]


@pytest.mark.parametrize("last_line", ["7", "{}"])
def test_json_that_is_no_outcome_ends_no_training(
    tmp_path: Path, store: FaultyStore, monkeypatch: pytest.MonkeyPatch, last_line: str
) -> None:
    monkeypatch.setattr(mirror_file, "_PROCESS", f"print({last_line!r}, end='')")
    mirror = mirrored(store.url, tmp_path, said := Lines())
    until(mirror, lambda: mirror._failures)
    mirror._kill()
    assert said[0].endswith("the copy is tried again. its process ended with 0")


def test_a_later_start_ends_an_earlier_one_in_the_middle_of_a_copy(tmp_path: Path, store: FaultyStore) -> None:
    """What it has begun gets no manifest, and it deletes nothing. What it has published after all is not counted."""
    save(tmp_path, 1)
    mirror = mirrored(store.url, tmp_path, said := Lines(), keep_latest_k=1)
    until(mirror, lambda: store.complete() == [1] and mirror._doing is None)
    store.becomes("slow")
    save(tmp_path, 2)
    with mirror.held():
        pass
    until(mirror, lambda: (store.folder / "step-00000002/a.safetensors").exists())
    MirrorStore(store.url).write_claim(replace(CLAIM, start=2))
    until(mirror, lambda: mirror._is_lost)
    assert store.complete() == [1]
    assert "a later start writes there" in said[-1]
    own, later = MirrorStore(store.url), replace(CLAIM, start=2)
    save(tmp_path / "earlier", 9)
    own.copy(step_folder(tmp_path / "earlier/checkpoints", 9), lambda: None)  # begun before the claim, ended after it
    own.write_claim(CLAIM)  # over the later one, which it has not seen
    save(tmp_path / "later", 3)
    mirrored(store.url, tmp_path / "later", Lines(), later, keep_latest_k=1).wait(60)
    assert store.complete() == [3, 9]
    assert own.claim() == later


def test_no_file_and_no_manifest_is_written_once_the_mirror_is_anothers(
    tmp_path: Path, store: FaultyStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 1)
    own = MirrorStore(store.url)
    own.write_claim(CLAIM)
    for n in range(5):
        looks = iter(range(n))
        with pytest.raises(StopIteration):
            own.copy(step_folder(tmp_path / "checkpoints", 1), looks.__next__)
        assert len([*store.folder.glob("step-00000001/*")]) == n
        assert store.complete() == []

    def copy(self: MirrorStore, *_: object) -> bool:
        self.write_claim(replace(CLAIM, start=2))
        return True

    (store.folder / "step-00000001/MANIFEST.json").touch()
    monkeypatch.setattr(MirrorStore, "copy", copy)
    task = mirrored(store.url, tmp_path, Lines())._task | {"step": 2, "newest": 2, "keep": 1}
    with pytest.raises(mirror_process._LostError):
        mirror_process._mirror_step(task)
    assert store.complete() == [1]


def test_the_step_of_a_branch_that_was_left_is_replaced_as_a_whole(tmp_path: Path, store: FaultyStore) -> None:
    for branch, size in {"left": 50_000, "taken": 60_000}.items():
        save(tmp_path / branch, 1, size=size)
    left, taken = (step_folder(tmp_path / branch / "checkpoints", 1) for branch in ("left", "taken"))
    own = MirrorStore(store.url)
    own.write_claim(CLAIM)
    for n in range(6):
        own.copy(left, lambda: None)
        looks = iter(range(n))
        with pytest.raises(StopIteration):
            own.copy(taken, looks.__next__)
        assert store.complete() == [1] * (n == 0)
    own.copy(taken, lambda: None)
    own.fetch([1], tmp_path / "back", lambda text: None)
    assert contents(step_folder(tmp_path / "back", 1)) == contents(taken)


@pytest.mark.parametrize(("fault", "says"), [("tears", "torn"), ("cuts", "has 1000 bytes there, not those sent")])
def test_half_a_file_is_none(tmp_path: Path, store: FaultyStore, fault: str, says: str) -> None:
    save(tmp_path, 1)
    MirrorStore(store.url).write_claim(CLAIM)
    store.becomes(fault)
    with pytest.raises(OSError, match=says):
        MirrorStore(store.url).copy(step_folder(tmp_path / "checkpoints", 1), lambda: None)
    assert store.complete() == []


def test_a_store_that_deletes_nothing_is_told_once(tmp_path: Path, store: FaultyStore) -> None:
    store.becomes("keeps")
    mirror = mirrored(store.url, tmp_path, said := Lines(), keep_latest_k=1)
    for step in (1, 2, 3):
        save(tmp_path, step)
        with mirror.held():
            pass
        until(mirror, lambda step=step: step in mirror._done)
    mirror.wait(60)
    assert store.complete() == [1, 2, 3]
    (warning,) = (line for line in said if "warning" in line)
    assert "does not delete what it need not keep: PermissionError" in warning
    assert SECRET not in warning


def test_a_folder_that_cannot_be_read_ends_no_training(
    tmp_path: Path, store: FaultyStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 1)
    mirror = mirrored(store.url, tmp_path, said := Lines())

    def stale(_: Path) -> list[Path]:
        raise OSError(116, "Stale file handle", "checkpoints")

    with monkeypatch.context() as broken:
        broken.setattr("titanlite.checkpoint.publish._named_as_steps", stale)
        until(mirror, lambda: mirror._failures > 2)
        with mirror.held():
            pass
        mirror.wait(1)
    assert len(said) == 1
    assert "Stale file handle" in said[0]
    mirror.wait(60)
    assert store.complete() == [1]


TRAINER = """
import sys, time
from pathlib import Path
from tests.ranks.checkpoint.test_mirror import Lines, mirrored
mirror = mirrored(sys.argv[1], Path(sys.argv[2]), Lines())
mirror.progress(0)
print(mirror._process.pid, flush=True)
time.sleep(1000)
"""


def test_the_process_ends_with_training(tmp_path: Path, store: FaultyStore) -> None:
    store.becomes("hangs")
    save(tmp_path, 1)
    words = [sys.executable, "-c", TRAINER, store.url, str(tmp_path)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[3]) as trainer:
        try:
            assert trainer.stdout
            copier, end = Path(f"/proc/{int(trainer.stdout.readline())}/cmdline"), time.monotonic() + 60
            while b"mirror_process" not in copier.read_bytes():  # empty for an instant
                assert time.monotonic() < end
        finally:
            trainer.kill()
    while copier.exists() and copier.read_bytes():  # that of a zombie is empty
        assert time.monotonic() < end
        time.sleep(0.05)


def test_a_signal_ends_the_wait(tmp_path: Path, store: FaultyStore) -> None:
    store.becomes("hangs")
    mirror, began = mirrored(store.url, tmp_path, said := Lines()), time.monotonic()
    save(tmp_path, 1)
    threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGTERM)).start()
    mirror.wait(600)
    assert time.monotonic() - began < 60
    assert "waits at most 600 s" in said[0]
    assert said[1].endswith("lacks step-00000001: the next start of the run copies them")
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_a_start_with_nothing_to_copy_does_not_say_that_it_waits(tmp_path: Path, store: FaultyStore) -> None:
    save(tmp_path, 1)
    mirrored(store.url, tmp_path, Lines()).wait(600)
    mirrored(store.url, tmp_path, said := Lines()).wait(600)
    (line,) = said
    assert line.startswith("looks whether the mirror faulty://")
    assert line.endswith(" has step-00000001, and copies the rest in at most 600 s")


def config(
    folder: Path,
    url: str,
    name: str = "run",
    tokenizer: str = "",
    resume: Any = "auto",
    keep_best: str = "",
    **more: Any,
) -> Config:
    default = Config()
    return replace(
        default,
        job=Job(name=name, dump_folder=str(folder)),
        data=replace(default.data, tokenizer=tokenizer or default.data.tokenizer),
        checkpoint=Checkpoint(mirror=url, resume=resume, keep_best=keep_best),
        training=replace(default.training, **more),
        comm=replace(default.comm, init_timeout_seconds=1),
    )


def start(folder: Path, url: str, **keys: Any) -> tuple[list[str], list[str]]:
    """Start a run as far as its mirror is concerned."""
    said = take_up_mirror(asked := config(folder, url, **keys))
    run = RunFolder.of(asked)
    run.claim(asked)
    run.release()
    pinned, _ = pin_names(asked, is_fresh=False, has_weights=False, is_start=True)
    run.config.write_text(to_toml(pinned))
    return said


def copy_all(folder: Path, url: str, name: str = "run") -> None:
    """Copy what the mirror lacks, as training would."""
    run = RunFolder.of(asked := config(folder, url, name))
    run.path.mkdir(parents=True, exist_ok=True)
    Mirror(Checkpoint(mirror=url, mirror_keep_latest_k=0), run.path, claim_of(run, asked), Lines()).wait(60)  # type: ignore[arg-type]


def interrupt_commit(is_there: bool) -> Callable[..., None]:
    def interrupted(*args: Any) -> None:
        if is_there:
            commit(*args)
        raise KeyboardInterrupt

    return interrupted


def test_an_empty_folder_takes_the_newest(
    tmp_path: Path, store: FaultyStore, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Broken, or too large for the disk: the start is refused, and nothing is deleted in the mirror."""
    start(tmp_path / "old", store.url)
    for step in (1, 2, 3):
        save(tmp_path / "old/run", step)
    copy_all(tmp_path / "old", store.url)
    old, new = tmp_path / "old/run/checkpoints", tmp_path / "new/run/checkpoints"
    for is_there in (False, True):  # before or after the checkpoint is published
        with monkeypatch.context() as interrupted:
            interrupted.setattr("titanlite.checkpoint.publish.commit", interrupt_commit(is_there))
            with pytest.raises(KeyboardInterrupt):
                start(tmp_path / str(is_there), store.url)
        assert complete_steps(tmp_path / str(is_there) / "run/checkpoints") == [3] * is_there
        start(tmp_path / str(is_there), store.url)
    with monkeypatch.context() as full:
        used = shutil.disk_usage(tmp_path)
        full.setattr(shutil, "disk_usage", lambda _: used._replace(free=1000))
        with pytest.raises(CheckpointError, match=r"free space = (.|\n)*step-00000003"):
            start(tmp_path / "new", store.url)
    with monkeypatch.context() as filled:  # by others, meanwhile
        filled.setattr(FaultyFileSystem, "get_file", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left")))
        with pytest.raises(CheckpointError, match=r"free space = No space left(.|\n)*make room"):
            start(tmp_path / "new", store.url)
    file = store.folder / "step-00000003/b.safetensors"
    content = file.read_bytes()
    file.write_bytes(bytes(len(content)))
    with pytest.raises(CheckpointError, match=r"step-00000003 = broken: b\.safetensors has another size or SHA-256"):
        start(tmp_path / "new", store.url)
    with pytest.raises(CheckpointError, match="the abandoned branch"):
        start(tmp_path / "new", store.url, resume=2)
    assert store.complete() == [1, 2, 3]
    assert complete_steps(new) == []
    file.write_bytes(content)
    (notice,), warnings = start(tmp_path / "new", store.url, resume=3)
    assert [*map(str, new.iterdir())] == [str(step_folder(new, 3))]
    assert contents(step_folder(new, 3)) == contents(step_folder(old, 3))
    assert "that of step 3 was taken from" in notice
    assert start(tmp_path / "new", store.url) == ([notice], warnings)  # of rank 0, if its launcher has taken it
    said = capsys.readouterr()
    assert "has no checkpoint: takes step-00000003" in said.err
    assert SECRET not in "".join([notice, *warnings, *said])
    copy_all(tmp_path / "new", store.url)
    assert start(tmp_path / "new", store.url) == ([], [])


def test_an_empty_folder_takes_the_best_too(
    tmp_path: Path, store: FaultyStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Published together, once both are there."""
    for step, loss in {1: 3.0, 2: 1.0, 3: 2.0, 4: None}.items():
        save(tmp_path / "old/run", step, loss)
    start(tmp_path / "old", store.url)
    copy_all(tmp_path / "old", store.url)
    new = tmp_path / "new/run/checkpoints"
    with monkeypatch.context() as interrupted:
        interrupted.setattr("titanlite.checkpoint.publish.commit", interrupt_commit(is_there=False))
        with pytest.raises(KeyboardInterrupt):
            start(tmp_path / "new", store.url, keep_best="validation_loss")
    assert complete_steps(new) == []
    (notice,), _ = start(tmp_path / "new", store.url, keep_best="validation_loss")
    assert complete_steps(new) == [2, 4]
    assert "those of step 4, the newest, and step 2, the best, were taken from" in notice
    for step in (2, 4):
        verify(step_folder(new, step))
    save(tmp_path / "new/run", 6, 59.0)
    assert asked_step("titanlite export", new, "best") == 2
    assert store.complete() == [1, 2, 3, 4]
    start(tmp_path / "without", store.url, keep_best="validation_loss_ema")
    assert complete_steps(tmp_path / "without/run/checkpoints") == [4]


def test_a_new_disk_has_the_commits_of_names_of_the_hub(tmp_path: Path, store: FaultyStore) -> None:
    """On the old disk and on a new one, with the name as the user gives it."""
    first = f"hf:me/base@{'a' * 40}"
    (tmp_path / "old/run").mkdir(parents=True)
    (tmp_path / "old/run/hub.json").write_text(json.dumps({"hf:me/base": first}))  # as `pin_names` does
    start(tmp_path / "old", store.url, tokenizer=first)
    save(tmp_path / "old/run", 1)
    copy_all(tmp_path / "old", store.url)
    take_up_mirror(config(tmp_path / "old", store.url, tokenizer="hf:me/base"))
    take_up_mirror(asked := config(tmp_path / "new", store.url, tokenizer="hf:me/base"))
    pinned, _ = pin_names(asked, is_fresh=False, has_weights=False, is_start=True)
    assert pinned.data.tokenizer == first
    assert [line.split(": ")[1] for line in RunFolder.of(asked).claim(pinned)] == ["job.dump_folder"]
    for other in ("hf:me/base@v2", f"hf:me/base@{'b' * 40}"):
        with pytest.raises(ConfigError, match=rf"tokenizer = .*{other}.*\n.*{first}"):
            take_up_mirror(config(tmp_path / "other", store.url, tokenizer=other))


def test_the_mirror_of_another_run_is_refused(tmp_path: Path, store: FaultyStore) -> None:
    start(tmp_path / "one", store.url)
    save(tmp_path / "one/run", 1)
    copy_all(tmp_path / "one", store.url)
    before, says = (
        (store.folder / "mirror.json").read_text(),
        r"(checkpoint\.mirror = .*, of the run run|seed = 7\n.*0, as in faulty.*store/config\.toml)",
    )
    save(tmp_path / "two/run", 1)  # without a mirror until now
    start(tmp_path / "three", f"{store.url}-own")
    for folder, given in {"two": {}, "three": {}, "four": {"name": "other"}, "five": {"seed": 7}}.items():
        for _ in range(2):
            with pytest.raises((CheckpointError, ConfigError), match=says) as e:
                start(tmp_path / folder, store.url, **given)
        assert SECRET not in str(e.value)
    shutil.copytree(tmp_path / "one/run", tmp_path / "one/branch")
    with pytest.raises(CheckpointError, match="of the run run with the id"):
        start(tmp_path / "one", store.url, name="branch")
    store.becomes("gone")
    start(tmp_path / "one", store.url, name="branch")
    store.becomes("ok")
    copy_all(tmp_path / "one", store.url, name="branch")
    assert (store.folder / "mirror.json").read_text() == before
    start(tmp_path / "five", store.url)  # the old seed
    (tmp_path / "one/run/checkpoints/step-00000001").rename(tmp_path / "one/run/checkpoints/step-00000000")
    with pytest.raises(CheckpointError, match="another branch"):
        start(tmp_path / "one", store.url)


@pytest.mark.parametrize("fault", ["gone", "closed"])
def test_a_store_that_cannot_be_read_at_the_start(tmp_path: Path, store: FaultyStore, fault: str) -> None:
    store.becomes(fault)
    with pytest.raises(DataError, match=r"checkpoint\.mirror .*no (route|right)"):  # it would begin at step 0
        start(tmp_path / "new", store.url)
    with pytest.raises(DataError, match="make the bucket or folder, or correct the URL"):
        start(tmp_path / "new", f"file://{tmp_path}/nowhere/mirror")
    save(tmp_path / "old/run", 1)
    _, (warning,) = start(tmp_path / "old", store.url)
    assert "training goes on" in warning
    store.becomes("ok")
    copy_all(tmp_path / "old", store.url)
    assert store.complete() == [1]
    start(tmp_path / "elsewhere", store.url)
    copy_all(tmp_path / "elsewhere", store.url)
    save(tmp_path / "old/run", 2)
    for _ in range(5):
        store.becomes(fault)
        start(tmp_path / "old", store.url)  # it cannot know of the start elsewhere
        store.becomes("ok")
        copy_all(tmp_path / "old", store.url)
    assert store.complete() == [1]


def test_without_its_package_a_protocol_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path / "old/run", 1)
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(DataError, match=r"(?s)checkpoint\.mirror.*pip install -e '\.\[url\]'"):
        start(tmp_path / "old", "s3://bucket/run")


def test_other_ranks_wait_for_rank_0(tmp_path: Path, store: FaultyStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until it has found nothing or taken a checkpoint; if it is refused, as long as processes may take to begin."""

    def other_rank(folder: str) -> None:
        with monkeypatch.context() as rank_1:
            rank_1.setenv("RANK", "1")
            assert take_up_mirror(config(tmp_path / folder, store.url)) == ([], [])

    with pytest.raises(CheckpointError, match="not written by rank 0 within 1 s"):
        other_rank("one")
    start(tmp_path / "one", store.url)
    other_rank("one")
    copy_all(tmp_path / "one", store.url)
    with pytest.raises(CheckpointError, match="not written by rank 0"):  # the mirror may have one by now
        other_rank("one")
    save(tmp_path / "one/run", 1)
    other_rank("one")
    copy_all(tmp_path / "one", store.url)
    store.becomes("slow")  # longer than the limit, but it grows
    taking = threading.Thread(target=take_up_mirror, args=(config(tmp_path / "new", store.url),))
    taking.start()
    while not (tmp_path / "new/run/checkpoints/step-00000001.tmp").exists():
        time.sleep(0.01)
    other_rank("new")
    assert complete_steps(tmp_path / "new/run/checkpoints") == [1]
    taking.join()


RUN = """
import sys, time
from pathlib import Path
from tests.ranks.checkpoint.test_mirror import Lines, config, save, start
from titanlite.checkpoint.mirror import Mirror
from titanlite.checkpoint.publish import complete_steps, prune
from titanlite.config.schema import Checkpoint
from titanlite.preflight.run_folder import RunFolder
from titanlite.preflight.take_up_mirror import claim_of
folder, url = Path(sys.argv[1]), sys.argv[2]
start(folder, url)
run = RunFolder.of(asked := config(folder, url))
first = max(complete_steps(run.checkpoints), default=0)
mirror = Mirror(Checkpoint(mirror=url, keep_latest_k=2), run.path, claim_of(run, asked), Lines())
mirror.progress(first)
print(first, flush=True)
for step in range(first + 1, first + 1000):
    save(run.path, step, size=1_000_000)
    with mirror.held() as copied:
        prune(run.checkpoints, 2, spare={copied, first})
    for _ in range(20):
        mirror.progress(step)
        time.sleep(0.005)
"""


@pytest.mark.parametrize("kills", [2, *slow(30)])
def test_kills_in_the_middle_of_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kills: int) -> None:
    """On S3. A new disk takes the newest complete checkpoint, with equal bits, and never one that goes back."""
    reached = torn = 0
    with s3(monkeypatch) as bucket:
        store = MirrorStore(f"{bucket}/run")
        for kill in range(kills):
            folder = tmp_path / str(kill)
            words = [sys.executable, "-c", RUN, str(folder), f"{bucket}/run"]
            run = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[3])
            assert run.stdout
            taken = int(run.stdout.readline())
            assert taken >= reached, "a newer checkpoint was there"
            if taken:
                verify(step_folder(folder / "run/checkpoints", taken))
            end = time.monotonic() + 60
            while max(store.complete(), default=0) <= taken and time.monotonic() < end:
                time.sleep(0.05)
            if kill % 3 == 2:
                time.sleep(random.Random(kill).uniform(0, 0.3))
            while kill % 3 < 2 and len(store._sizes()) == len(store.complete()) and time.monotonic() < end:
                time.sleep(0.02)  # until a copy has begun, or a deletion
            os.kill(run.pid, signal.SIGSTOP)
            for copier in Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split():
                os.kill(int(copier), signal.SIGKILL)
            os.kill(run.pid, signal.SIGKILL)
            run.communicate()
            torn += len(store._sizes()) > len(store.complete())
            reached = max(store.complete())
            assert reached > taken
            checked = tmp_path / f"checked-{kill}"
            for step in store.complete():
                store.fetch([step], checked / "checkpoints", lambda text: None)
                save(checked / "own", step, size=1_000_000)
                one, other = (step_folder(checked / at, step) for at in ("checkpoints", "own/checkpoints"))
                assert contents(one) == contents(other)
            shutil.rmtree(checked)
            shutil.rmtree(folder)
    assert torn, "no kill came in the middle of a copy"
