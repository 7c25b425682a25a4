import json
import shlex
from pathlib import Path

import pytest

from tests.support.profiles import rank_profile
from titanlite.commands import main
from titanlite.observe.step_profile import COMPUTE, MATMUL, OPTIMIZER, Interval


def write_run(folder: Path, config: str, spans: dict[str, list[Interval]], world: int = 1) -> str:
    (folder / "profile").mkdir(parents=True)
    (folder / "config.toml").write_text(config)
    for rank in range(world):
        profile = rank_profile(spans, rank=rank, world=world)
        (folder / "profile" / f"rank{rank}.json").write_text(profile.to_json())
    return str(folder)


@pytest.fixture
def plain(tmp_path: Path) -> str:
    config = "[compile]\nenable = false\n[optimizer]\nlr = 1e-3\n"
    return write_run(tmp_path / "plain", config, {MATMUL: [(0.0, 20.0)], COMPUTE: [(20.0, 90.0)]})


@pytest.fixture
def compiled(tmp_path: Path) -> str:
    config = "[compile]\nenable = true\n[optimizer]\nlr = 2e-3\n"
    return write_run(tmp_path / "compiled", config, {MATMUL: [(0.0, 20.0)], COMPUTE: [(20.0, 50.0)]})


def test_of_two_runs_the_key_that_did_it_comes_first(
    plain: str, compiled: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", compiled, plain]) == 0
    text = capsys.readouterr().out
    assert "first cause of the change: compile.enable: true → false\n  by other compute, " in text
    for folder in (compiled, plain):
        assert f"{folder}/profile/timeline.png\n" in text
        assert Path(folder, "profile", "timeline.png").exists()


@pytest.mark.parametrize(("rule", "key"), [("adamw", "optimizer.state_dtype"), ("muon", "training.global_batch_size")])
def test_the_rules_that_advice_is_for_are_those_of_the_receipt(
    rule: str, key: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_run(tmp_path / "run", '[optimizer]\nrecipe = "mine"\n', {OPTIMIZER: [(0.0, 96.0)]})
    entry = {"feature": "optimizer", "applied": {"groups": {"all": {"rule": rule}}}, "skipped": []}
    Path(folder, "receipt.json").write_text(json.dumps([entry]))
    assert main(["explain", folder]) == 0
    assert f"change: {key}" in capsys.readouterr().out


@pytest.mark.parametrize("more", [{"applied": {}}, {}, {"applied": {"groups": [5]}}, {"applied": {"groups": {"a": 5}}}])
def test_a_receipt_without_rules_leaves_it_to_the_recipe(
    more: dict, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_run(tmp_path / "run", '[optimizer]\nrecipe = "muon"\n', {OPTIMIZER: [(0.0, 96.0)]})
    Path(folder, "receipt.json").write_text(json.dumps([{"feature": "optimizer", "skipped": [], **more}]))
    assert main(["explain", folder]) == 0
    assert "change: training.global_batch_size" in capsys.readouterr().out
    Path(folder, "config.toml").write_text('[optimizer]\nrecipe = ["a"]\n')
    assert main(["explain", folder]) == 0


def test_a_picture_goes_where_it_is_asked_to(plain: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", plain, "--step", "11", "--out", str(tmp_path / "step.svg")]) == 0
    assert capsys.readouterr().out.endswith(f"{tmp_path / 'step.svg'}\n")
    assert not Path(plain, "profile", "timeline.png").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "want: one run with a profile, or two"),
        (["RUN", "RUN", "RUN"], "want: one run with a profile, or two"),
        (["RUN", "--step", "eleven"], "--step = eleven"),
        (["RUN", "--step", "12"], "want: a profiled step, 11 to 11"),
        (["RUN", "--out", "picture.doc"], "--out = picture.doc"),
        (["RUN", "--out", "/proc/nowhere/a.png"], "want: a file that can be written"),
        (
            ["nowhere"],
            "profile/rank0.json; there is no such folder\n      fix:  give the path <dump_folder>/<name> of a run",
        ),
    ],
)
def test_what_cannot_be_explained_says_what_is_wanted(
    words: list[str], said: str, plain: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", *(plain if word == "RUN" else word for word in words)]) == 2
    assert said in capsys.readouterr().err


def test_a_path_that_is_no_run_says_why_and_all_are_told_at_once(
    plain: str, capsys: pytest.CaptureFixture[str]
) -> None:
    above, file = str(Path(plain).parent), f"{plain}/config.toml"
    assert main(["explain", above, file]) == 2
    said = capsys.readouterr().err
    assert said.startswith("titanlite explain: 2 problems\n")
    want = "a run's folder, with config.toml and profile/rank0.json"
    assert f"  {above}\n      want: {want}; config.toml missing\n" in said
    assert f"      want: {want}; it is a file\n" in said
    assert said.count(f"fix:  did you mean {plain}?") == 2
    Path(plain, "profile/rank0.json").unlink()  # no run that could be explained either
    assert main(["explain", above, file]) == 2
    assert "did you mean" not in capsys.readouterr().err


def test_a_run_without_a_profile_gets_the_command_that_makes_one(
    plain: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path(plain, "profile/rank0.json").unlink()
    layout = {"data_parallel_replicate": 1, "tensor_parallel": 2, "data_parallel_shard": 2}
    Path(plain, "receipt.json").write_text(json.dumps([{"feature": "parallelism", "applied": layout}]))
    assert main(["explain", plain]) == 2
    said = capsys.readouterr().err
    assert "; it has no profile\n" in said
    command = f"titanlite train {plain}/config.toml --job.name plain-profiled --profiling.enable true --gpus 4"
    assert f"fix:  {command}\n" in said
    Path(plain, "config.toml").write_text(f"[job]\nname = 'plain'\ndump_folder = '{tmp_path}'\n")
    assert main(["validate", *shlex.split(command)[2:-2], "--world", "4"]) == 0


def test_a_damaged_config_is_named(plain: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path(plain, "config.toml").write_text("[compile")
    assert main(["explain", plain]) == 2
    assert "config.toml" in capsys.readouterr().err
