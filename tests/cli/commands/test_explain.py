import json
import shlex
from pathlib import Path

import pytest

from tests.cli.commands.conftest import Call
from tests.support.profiles import rank_profile
from titanlite.observe.step_profile import COMPUTE, MATMUL, Interval


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


def test_a_run_without_a_profile_is_not_proposed(plain: str, call: Call) -> None:
    assert "did you mean" in call("explain", str(Path(plain).parent), ends=2)
    Path(plain, "profile/rank0.json").unlink()
    assert "did you mean" not in call("explain", str(Path(plain).parent), ends=2)


def test_the_table_the_first_cause_and_the_picture(plain: str, call: Call) -> None:
    text = call("explain", plain)
    assert "first cause: host, 0.0 ms a step (10%)\n" in text
    assert "  change: compile.enable = true" in text
    assert text.endswith(f"{plain}/profile/timeline.png\n")
    assert Path(plain, "profile", "timeline.png").exists()


def test_a_picture_goes_where_it_is_asked_to(plain: str, tmp_path: Path, call: Call) -> None:
    picture = str(tmp_path / "step.svg")
    assert call("explain", plain, "--step", "11", "--out", picture).endswith(f"{picture}\n")
    assert not Path(plain, "profile", "timeline.png").exists()


def test_a_run_without_a_profile_gets_the_command_that_makes_one(plain: str, tmp_path: Path, call: Call) -> None:
    Path(plain, "profile/rank0.json").unlink()
    layout = {"data_parallel_replicate": 1, "tensor_parallel": 2, "data_parallel_shard": 2}
    Path(plain, "receipt.json").write_text(json.dumps([{"feature": "parallelism", "applied": layout, "skipped": []}]))
    said = call("explain", plain, ends=2)
    assert "; profile/rank0.json missing\n" in said
    command = f"titanlite train {plain}/config.toml --job.name plain-profiled --profiling.enable true --gpus 4"
    assert f"fix:  {command}\n" in said
    Path(plain, "config.toml").write_text(f"[job]\nname = 'plain'\ndump_folder = '{tmp_path}'\n")
    call("validate", *shlex.split(command)[2:-2], "--world", "4")
