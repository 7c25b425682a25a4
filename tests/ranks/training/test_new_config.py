"""The config that titanlite new writes for a CPU trains as it is."""

import math
from pathlib import Path

import pytest

from tests.support.launched import Desk, Ended
from titanlite.commands import main


def test_a_config_for_a_cpu_takes_a_step(desk: Desk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("titanlite.observe.peak_flops._LARGEST", 256)
    flags = ("--model", "debug", "--data", str(desk.folder / "train.txt"), "--tokens", "200K", "--gpu", "cpu")
    assert main(["new", *flags, "--world", "2"]) == 0
    desk.rerun(Path("llama3-debug.toml"), "--job.stop_after=1", "--data.cache_dir=cache", world=2)
    run = Ended(Path("outputs/llama3-debug"), "")
    assert run.status["by"] == "job.stop_after"
    assert run.losses() == [pytest.approx(math.log(256), rel=0.05)]  # all 256 ids are as likely
    assert run.receipt["parallelism"]["applied"]["data_parallel_shard"] == 2
