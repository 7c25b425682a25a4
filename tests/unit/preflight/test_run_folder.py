"""The guard of a run's folder: one job at a time, and the same run for its whole life."""

import errno
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
from dataclasses import asdict, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import tomli_w

from titanlite.checkpoint.resume import changed_routing, check_state, identity_of
from titanlite.checkpoint.saved_state import SavedState
from titanlite.config.problems import show
from titanlite.config.schema import Config, Data, MixtureSource, Stage
from titanlite.config.write import to_toml
from titanlite.data.prepare import prepare
from titanlite.durable import write_durably
from titanlite.errors import CheckpointError, ConfigError, DataError, FolderLostError
from titanlite.observe.status import Status
from titanlite.preflight.run_folder import RunFolder
from titanlite.preflight.same_run import changes_since
from titanlite.recipes import load

ROOT = Path(__file__).parents[3]


CHANGED = "changed since the last start: "


def change(config: Config, key: str, value: object) -> Config:
    section, name = key.split(".")
    return replace(config, **{section: replace(getattr(config, section), **{name: value})})


def claim(path: Path, config: Config, save_list: str | None = None) -> list[str]:
    folder = RunFolder(path)
    notices = folder.claim(config)
    folder.record(to_toml(config), save_list)
    folder.release()
    return notices


def test_a_new_folder_and_the_same_run_again(tmp_path: Path) -> None:
    path = tmp_path / "outputs" / "run"
    assert claim(path, Config()) == []
    assert (path / "config.toml").read_text() == to_toml(Config())
    assert claim(path, Config()) == []
    assert sorted(p.name for p in path.iterdir()) == ["config.toml", "lock"]
    folder = RunFolder(path)
    assert folder.claim(change(Config(), "optimizer.lr", 1e-3)) == [f"{CHANGED}optimizer.lr: 0.0003 → 0.001"]
    folder.release()
    assert (path / "config.toml").read_text() == to_toml(Config())  # which a claim alone leaves


def test_what_earlier_starts_left_is_kept_under_one_number(tmp_path: Path) -> None:
    configs = [change(Config(), "optimizer.lr", lr) for lr in (1e-3, 2e-3, 3e-3, 4e-3)]
    configs[1] = change(configs[1], "activation_checkpoint.recipe", "auto")
    claim(tmp_path, configs[0])
    claim(tmp_path, configs[1], "of the second")  # the first ended before its first step, and has no receipt
    (tmp_path / "receipt.json").write_text("of the second")
    claim(tmp_path, configs[2])
    for key, value in (("job.stop_after", 5), ("checkpoint.resume", 5)):  # no other config
        claim(tmp_path, change(configs[2], key, value))
    claim(tmp_path, configs[3])
    kept = {path.name: path.read_text() for path in tmp_path.glob("*.earlier-*")}
    assert kept == {
        "config.earlier-1.toml": to_toml(configs[0]),
        "config.earlier-2.toml": to_toml(configs[1]),
        "config.earlier-3.toml": to_toml(change(configs[2], "checkpoint.resume", 5)),
        "receipt.earlier-2.json": "of the second",
        "activation_checkpoint.earlier-2.toml": "of the second",
    }
    assert (tmp_path / "activation_checkpoint.toml").read_text() == "of the second"  # the third may name it


def refused(path: Path, config: Config) -> dict[str, tuple[str, str, str]]:
    """Claim the folder of another run, and return what was seen, wanted and proposed, by key."""
    with pytest.raises(ConfigError, match="output folder of a different run") as e:
        claim(path, config)
    return {p.where: (p.saw, p.want.partition(", as in")[0], p.fix) for report in e.value.args for p in report.problems}


IDENTITY = {
    "model.flavor": ("1B", '"8B"'),
    "model.n_layers": (3, "32"),
    "model.rope_theta": (1e4, "500000.0"),
    "data.source": ("other/*.txt", '"python_stdlib"'),
    "data.tokenizer": ("t.json", '"bytes"'),
    "training.seq_len": (4096, "2048"),
    "training.seed": (1, "0"),
    "optimizer.state_dtype": ("bfloat16", '"float32"'),
}


@pytest.mark.parametrize("key", IDENTITY)
def test_a_different_run_is_refused(tmp_path: Path, key: str) -> None:
    claim(tmp_path, Config())
    value, before = IDENTITY[key]
    other = change(Config(), key, value)
    ((saw, want, fix),) = refused(tmp_path, other).values()
    assert (saw, want) == (show(value), before)
    assert "job.name" in fix
    assert (f"write the new one into {tmp_path / 'config.toml'} as well" in fix) == key.startswith("data.")
    assert (tmp_path / "config.toml").read_text() == to_toml(Config())
    assert refused(tmp_path, change(other, "data.separator_id", 1)).keys() == {key, "data.separator_id"}
    claim(tmp_path, Config())  # a refused claim holds no lock


def test_another_dtype_of_state_is_the_same_run_if_it_begins_afresh(tmp_path: Path) -> None:
    claim(tmp_path, Config())
    other = change(Config(), "optimizer.state_dtype", "bfloat16")
    assert "or optimizer.fresh_state = true" in refused(tmp_path, other)["optimizer.state_dtype"][2]
    assert [*claim(tmp_path, change(other, "optimizer.fresh_state", True))] == [
        f'{CHANGED}optimizer.state_dtype: "float32" → "bfloat16"',
        f"{CHANGED}optimizer.fresh_state: false → true",
    ]


def test_another_flavor_is_refused_with_the_dimensions_that_differ(tmp_path: Path) -> None:
    mixture = change(change(Config(), "model.name", "qwen3_moe"), "model.flavor", "debug")
    claim(tmp_path, mixture)
    with pytest.raises(ConfigError, match=r"; they differ in .*experts\.n_experts \(8 → 128\)"):
        claim(tmp_path, change(mixture, "model.flavor", "30B-A3B"))


def test_changes_of_mixture_and_stages_are_told_by_key(tmp_path: Path) -> None:
    """In both files' own order; what a file does not say is no change."""
    sources = (MixtureSource("a", "a.txt", 1.0, 2.0), MixtureSource("b", "b.txt", 1.0))
    stages = (Stage(10, weights={"a": 0.5, "b": 0.5}), Stage(20, seq_len=64))
    before = change(change(Config(), "data.mixture", sources), "data.stage", stages)
    (recorded := tmp_path / "config.toml").write_text(to_toml(before))
    assert changes_since(recorded, before) == []
    sources = (sources[0], replace(sources[1], weight=3.0))
    stages = (Stage(10, weights={"a": 0.5, "b": 1.5}, lr_decay_to=0.0),)
    now = change(change(before, "data.mixture", sources), "data.stage", stages)
    assert sorted(changes_since(recorded, now)) == [
        f"{CHANGED}data.mixture[1].weight: 1.0 → 3.0",
        f"{CHANGED}data.stage[0].lr_decay_to: not given → 0.0",
        f"{CHANGED}data.stage[0].weights.b: 0.5 → 1.5",
        f"{CHANGED}data.stage[1].from_tokens: 20 → not given",
        f"{CHANGED}data.stage[1].seq_len: 64 → not given",
    ]


def test_a_mixture_in_place_of_a_source_is_another_run(tmp_path: Path) -> None:
    mixed = change(Config(), "data.mixture", (MixtureSource("a", "a.txt", 1.0, 2.0),))
    for n, (first, second) in enumerate([(Config(), mixed), (mixed, Config())]):
        claim(tmp_path / str(n), first)
        ((saw, want, _),) = refused(tmp_path / str(n), second).values()
        assert "[[data.mixture]]" in saw + want
    # What a file that is extended says of a source is replaced, at each start.
    assert claim(tmp_path / "1", change(mixed, "data.source", "x.txt")) == []


SIZES = """help = "width {dim} of {flavor}"
n_layers = 2
dim = {dim}
n_heads = 4
n_kv_heads = 4
ffn_dim = 256
vocab_size = 256
norm_eps = 1e-5
rope_theta = 1e4
"""


@pytest.fixture
def own(tmp_path: Path) -> Config:
    """A config of the flavor a, with b of the same dimensions and c of others beside it."""
    recipes = tmp_path / "recipes" / "model"
    recipes.mkdir(parents=True)
    for flavor, dim in (("a", 64), ("b", 64), ("c", 128)):
        (recipes / f"llama3-{flavor}.toml").write_text(SIZES.format(dim=dim, flavor=flavor))
    return change(change(Config(), "job.recipe_dirs", (str(tmp_path / "recipes"),)), "model.flavor", "a")


def test_the_same_dimensions_are_the_same_model_however_they_are_given(tmp_path: Path, own: Config) -> None:
    run = tmp_path / "run"
    claim(run, own)
    assert claim(run, change(own, "model.n_layers", 2)) == [f"{CHANGED}model.n_layers: not given → 2"]
    assert claim(run, own) == [f"{CHANGED}model.n_layers: 2 → not given"]
    assert claim(run, change(own, "model.flavor", "b")) == [f'{CHANGED}model.flavor: "a" → "b"']
    as_before = change(change(own, "model.flavor", "c"), "model.dim", 64)
    assert claim(run, as_before) == [f'{CHANGED}model.flavor: "b" → "c"', f"{CHANGED}model.dim: not given → 64"]


def test_a_flavor_that_trains_routers_otherwise_is_the_same_model(tmp_path: Path) -> None:
    """A bias is part of the model, and its rate is not."""
    (folder := tmp_path / "recipes" / "model").mkdir(parents=True)
    for flavor, rate in (("a", 0.01), ("b", 0.001), ("c", 0.0)):
        text = f'extends = "qwen3_moe-debug"\n[experts]\nbalance_loss = {rate}\nbalance_bias = {rate}\n'
        (folder / f"qwen3_moe-{flavor}.toml").write_text(text)
    run = tmp_path / "run"
    first = change(change(Config(), "job.recipe_dirs", (str(tmp_path / "recipes"),)), "model.name", "qwen3_moe")
    claim(run, change(first, "model.flavor", "a"))
    assert claim(run, change(first, "model.flavor", "b")) == [f'{CHANGED}model.flavor: "a" → "b"']
    assert refused(run, change(first, "model.flavor", "c")).keys() == {"model.flavor"}


def test_a_change_of_how_routers_are_trained_is_told_and_a_refusal_names_the_key() -> None:
    dims, config = load("model", "qwen3_moe-torchtitan-debug"), Config()
    assert dims.experts is not None
    still = replace(dims, experts=replace(dims.experts, balance_bias=0.0))
    state, without = (SavedState(**json.loads(json.dumps(identity_of(config, of)))) for of in (dims, still))
    assert state.model["experts"] == asdict(dims)["experts"]  # of which its model is built again
    folder = Path("step-00000002")
    assert changed_routing(state, dims) == []
    faster = replace(dims, experts=replace(dims.experts, balance_bias=0.01, z_loss=0.001))
    check_state(folder, state, config, faster, None)
    assert changed_routing(state, faster) == [
        "changed: experts.z_loss: 0.0 → 0.001",
        "changed: experts.balance_bias: 0.001 → 0.01",
    ]
    for saved, now in ((state, still), (without, dims)):
        with pytest.raises(CheckpointError, match=r"1 problem\n  model\.experts\.balance_bias = "):
            check_state(folder, saved, config, now, None)
    other = replace(faster, experts=replace(dims.experts, top_k=4, z_loss=0.001))
    with pytest.raises(CheckpointError, match=r"1 problem\n  model\.experts\.top_k = 4\n"):
        check_state(folder, state, config, other, None)


@pytest.mark.parametrize(
    ("changes", "wants"),
    [
        ({"n_layers": 3}, ["2"]),
        ({"flavor": "c"}, ['"a"']),
        ({"flavor": "b", "n_layers": 3}, ['"a"', "2"]),
        ({"flavor": "c", "dim": 32}, ['"a"', "64"]),
    ],
)
def test_other_dimensions_are_another_run(tmp_path: Path, own: Config, changes: dict, wants: list[str]) -> None:
    claim(tmp_path / "run", own)
    found = refused(tmp_path / "run", replace(own, model=replace(own.model, **changes)))
    expected = {f"model.{key}": (show(value), want) for (key, value), want in zip(changes.items(), wants, strict=True)}
    assert {key: each[:2] for key, each in found.items()} == expected


def test_a_run_whose_recipe_is_gone_is_held_to_its_keys(tmp_path: Path, own: Config) -> None:
    claim(tmp_path / "run", own)
    (tmp_path / "recipes" / "model" / "llama3-a.toml").unlink()
    found = refused(tmp_path / "run", change(own, "model.flavor", "b"))
    assert found["model.flavor"][:2] == ('"b"', '"a"')


def test_other_changes_are_told(tmp_path: Path) -> None:
    claim(tmp_path, Config())
    now = change(change(Config(), "optimizer.lr", 1e-3), "training.global_batch_size", 64)
    now = change(now, "float8.filter_fqns", ("output", "w2"))
    assert claim(tmp_path, now) == [
        f"{CHANGED}training.global_batch_size: not given → 64",
        f"{CHANGED}optimizer.lr: 0.0003 → 0.001",
        f'{CHANGED}float8.filter_fqns: ["output"] → ["output", "w2"]',
    ]
    assert (tmp_path / "config.toml").read_text() == to_toml(now)
    assert claim(tmp_path, now) == []
    assert claim(tmp_path, change(now, "job.stop_after", 3)) == []  # of this start alone
    assert len(claim(tmp_path, Config())) == 3


def test_a_config_of_another_version(tmp_path: Path) -> None:
    """A key that was unknown then had its default; a key that is unknown now is told."""
    old = {"training": {"seed": 0}, "gone": {"key": 1}, "model": {"gone": 2}}
    (tmp_path / "config.toml").write_text(tomli_w.dumps(old))
    told = ["gone.key: no longer a key, ignored", "model.gone: no longer a key, ignored"]
    assert claim(tmp_path, Config()) == told


def test_a_config_with_values_of_no_type_that_a_key_has(tmp_path: Path) -> None:
    """The file is a person's to edit, so each is named, whatever it is."""
    claim(tmp_path, Config())
    text = (tmp_path / "config.toml").read_text()
    (tmp_path / "config.toml").write_text(text.replace("lr = 0.0003", "lr = 1979-05-27"))
    assert claim(tmp_path, Config()) == [f'{CHANGED}optimizer.lr: "1979-05-27" → 0.0003']
    (tmp_path / "config.toml").write_text(text.replace('file = ""', "file = 3"))
    assert refused(tmp_path, Config())["model.file"][:2] == ('""', "3")


def test_a_damaged_config_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("[job\n")
    with pytest.raises(ConfigError, match=r"config\.toml = .*line 1"):
        claim(tmp_path, Config())


@pytest.mark.parametrize("used", ["metrics.jsonl", "checkpoints/step-00000001/x"])
def test_never_resume_needs_a_new_folder(tmp_path: Path, used: str) -> None:
    never = change(Config(), "checkpoint.resume", "never")
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "metrics.jsonl").touch()
    claim(tmp_path, never)  # nothing in them yet
    (tmp_path / used).parent.mkdir(exist_ok=True)
    (tmp_path / used).write_text("x")
    with pytest.raises(ConfigError, match="never") as e:
        claim(tmp_path, never)
    assert used.split("/")[0] in str(e.value)
    claim(tmp_path, Config())


def test_a_start_without_checkpoints_does_not_begin_anew_beside_those_that_are_there(tmp_path: Path) -> None:
    without = change(Config(), "checkpoint.enable", False)
    claim(tmp_path, without)
    (tmp_path / "metrics.jsonl").write_text("x")
    claim(tmp_path, without)  # a run that never saved begins anew each time
    (tmp_path / "checkpoints" / "step-00000001").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"checkpoint\.enable = false\n.*beside the checkpoints"):
        claim(tmp_path, without)
    claim(tmp_path, Config())


@pytest.mark.parametrize("where", ["file", "file/run", "locked/run", "closed"])
def test_a_folder_that_cannot_be_written(where: str, bound_by_permissions: None) -> None:
    Path("file").touch()
    Path("locked").mkdir(mode=0o500)
    Path("closed").mkdir(mode=0o000)
    for look in (RunFolder(where).foresee, RunFolder(where).claim):
        with pytest.raises(ConfigError, match=r"job\.dump_folder"):
            look(Config())


def test_checkpoints_that_cannot_be_looked_at_are_named(bound_by_permissions: None) -> None:
    Path("checkpoints").mkdir(mode=0o000)
    with pytest.raises(ConfigError, match=r"Permission denied: 'checkpoints'\)\n.*can be read and written"):
        claim(Path(), change(Config(), "checkpoint.enable", False))


@pytest.mark.parametrize("kind", ["locked", "link"])
@pytest.mark.parametrize(("later", "key"), [("checkpoints", "checkpoint.enable"), ("profile", "profiling.enable")])
def test_what_a_run_writes_later_is_asked_before_it_starts(
    kind: str, later: str, key: str, bound_by_permissions: None
) -> None:
    if kind == "link":
        Path(later).symlink_to("nowhere")
    else:
        Path(later).mkdir(mode=0o500)
    off = change(change(Config(), "checkpoint.enable", False), "profiling.enable", False)
    for look in (RunFolder(Path()).foresee, RunFolder(Path()).claim):
        with pytest.raises(ConfigError, match=rf"{later} = (Permission denied|a link that leads nowhere)\n"):
            look(change(off, key, True))
    claim(Path(), off)


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK, errno.EIO])
def test_a_file_system_without_locks_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def flock(lock: int, how: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)
    if number == errno.EIO:  # which is no other job
        with pytest.raises(ConfigError, match=rf"job\.dump_folder = .*{os.strerror(errno.EIO)}"):
            claim(tmp_path, Config())
    else:
        no_locks = "this file system has no locks; make sure that no second job uses the folder"
        assert claim(tmp_path, Config()) == [f"{tmp_path}: {no_locks}"]


def test_a_lock_that_was_removed_is_taken_anew(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.claim(Config())
    (folder.path / "lock").unlink()
    folder.require_ours()
    assert "was removed, and is taken anew" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="in use"):
        RunFolder(tmp_path / "run").claim(Config())
    folder.release()


@pytest.mark.parametrize("is_moved", [False, True])
def test_a_folder_is_lost_once_its_lock_is_anothers(tmp_path: Path, is_moved: bool) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.claim(Config())
    folder.require_ours()
    if is_moved:
        folder.path.rename(tmp_path / "gone")
    else:  # a copy of it, as an editor saves one
        write_durably(folder.path / "lock", "{}")
    for look in (folder.require_ours, lambda: explained(folder)):
        with pytest.raises(FolderLostError, match="not this job's any more"):
            look()
    folder.release()


def explained(folder: RunFolder) -> None:
    with folder.write_errors_explained():
        raise FileNotFoundError(errno.ENOENT, "No such file", str(folder.metrics))


@pytest.mark.parametrize(
    ("state", "age_s", "is_told"), [("running", 5, True), ("running", 300, False), ("stopped", 5, False)]
)
def test_a_job_at_work_is_foreseen(tmp_path: Path, state: str, age_s: float, is_told: bool) -> None:
    folder = RunFolder(tmp_path)
    status = Status(folder.status, step=7)
    if state == "stopped":
        status.stopped(7, by="SIGTERM")
    said = json.loads(folder.status.read_text())
    said["updated"] = (datetime.now(UTC) - timedelta(seconds=age_s)).strftime("%Y-%m-%dT%H:%M:%SZ")
    folder.status.write_text(json.dumps(said))
    told = folder.seems_in_use()
    assert bool(told) == is_told
    if told:
        assert f"in use by another job (process {os.getpid()} on {socket.gethostname()}, at step 7 " in told
    folder.claim(Config())  # the lock decides
    folder.release()


@pytest.mark.parametrize("text", ["", '{"state": "running", "updated": "2026-01-01"}'])
def test_a_status_of_another_kind_is_no_job(tmp_path: Path, text: str) -> None:
    (tmp_path / "status.json").write_text(text)
    assert RunFolder(tmp_path).seems_in_use() is None


HOLDER = """
import os, sys, time
from titanlite.config.schema import Config
from titanlite.preflight.run_folder import RunFolder
RunFolder(sys.argv[1]).claim(Config())  # the object may be dropped: the lock is the process's
assert "torch" not in sys.modules
if not os.fork():
    print(os.getpid(), flush=True)
time.sleep(3600)
"""


def test_a_second_job_is_refused_until_the_first_is_dead(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    first = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert first.stdout
    child = int(first.stdout.readline())
    try:
        assert json.loads((tmp_path / "lock").read_text())["pid"] == first.pid
        with pytest.raises(ConfigError, match=rf"in use(.|\n)*{first.pid} on {socket.gethostname()}(.|\n)*job\.name"):
            claim(tmp_path, Config())
        first.kill()
        first.wait()
        os.kill(child, 0)  # it lives on, without the lock
        claim(tmp_path, Config())  # at once
    finally:
        first.kill()
        first.wait()
        first.stdout.close()
        os.kill(child, signal.SIGKILL)


@pytest.mark.parametrize("inodes", [0, 1])
def test_a_disk_without_room_is_told_apart_from_one_without_inodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, inodes: int
) -> None:
    def no_file(*args: object, **kwargs: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(tmp_path / "run" / "a"))

    text, disk = tmp_path / "text.txt", os.statvfs(tmp_path)
    text.write_text("text")
    names = [name for name in dir(disk) if name.startswith("f_")]
    now = SimpleNamespace(**{name: getattr(disk, name) for name in names} | {"f_files": 9, "f_favail": inodes})
    monkeypatch.setattr(os, "statvfs", lambda path: now)
    free = "are free, but no inode for another file in this folder" if not inodes else "are free in this folder"
    fix = "delete files of whatever size" if not inodes else "make room"
    with (
        pytest.raises(ConfigError, match=f"{free}(.|\n)*fix:  {fix}, or clear"),
        RunFolder(tmp_path / "run").write_errors_explained(),
    ):
        no_file()
    monkeypatch.setattr(Path, "mkdir", no_file)
    with pytest.raises(ConfigError, match=f"fix:  set job.dump_folder to one, {fix}, or"):
        RunFolder(tmp_path / "run").claim(Config())
    with pytest.raises(DataError, match=f"fix:  {fix}, or set data.cache_dir"):
        prepare(str(text), Data(cache_dir=str(tmp_path / "cache")), 256, progress=False)
