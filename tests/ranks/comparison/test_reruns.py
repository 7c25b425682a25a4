"""`titanlite compare --floor --layers` on real runs: what is trained once more is the first run, nudged."""

import json
from pathlib import Path

import pytest

from tests.support.launched import Desk
from titanlite.commands.compare import run
from titanlite.comparison import reruns
from titanlite.preflight.checked_run import checked_run


def first_losses(folder: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_what_a_rerun_turns_off_is_not_refused() -> None:
    asked = ["--validation.enable", "--validation.samples=def ", "--validation.sources=more=python_stdlib_held_out"]
    asked += ["--validation.weights=both", "--optimizer.ema_decay=0.9"]
    asked += ["--checkpoint.keep_best=validation_loss", "--checkpoint.mirror=file:///mirror"]
    checked_run(["--config", "configs/debug.toml", *asked, *reruns._ALONE])


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2])
def test_a_run_under_another_layout_and_one_of_another_rate(world: int, tmp_path: Path, capfd) -> None:
    desk = Desk(tmp_path)
    flags = ("--training.steps=8", "--job.stop_after=6", "--metrics.log_freq=1", "--checkpoint.enable=false")
    desk.run("a", world, *flags, "--validation.enable=false")
    desk.run("b", 2, *flags, "--validation.enable=false", "--optimizer.lr=4e-3")
    a, b = (tmp_path / "runs" / name for name in "ab")
    out = ["--out", str(tmp_path / "p.png")]
    capfd.readouterr()
    assert run([str(a), str(b), "--floor", "--layers", "1", *out]) == 1
    lines = capfd.readouterr().out.splitlines()
    assert lines[0].startswith(f"{a}-nudged: training 6 steps once more")
    assert any(line.startswith("b: differs: ") for line in lines)
    assert any(line.startswith("b: differs first in step 1: ") and "after the update" in line for line in lines)
    nudged, own = first_losses(tmp_path / "runs" / "a-nudged"), first_losses(a)
    assert len(nudged) == len(own) == 6
    assert nudged != own
    assert nudged == pytest.approx(own, rel=1e-4)
    before = (tmp_path / "runs" / "a-nudged" / "metrics.jsonl").stat().st_mtime_ns
    assert run([str(a), str(b), "--floor", *out]) == 1
    assert (tmp_path / "runs" / "a-nudged" / "metrics.jsonl").stat().st_mtime_ns == before
