"""A disk without room for the checkpoints is told before the first step, by `train.py` and by `titanlite validate`."""

import os
import shutil
from pathlib import Path

import pytest

from tests.support.measured import MEASURED_CONFIGS
from titanlite.checkpoint.disk_space import lack_of_disk_space
from titanlite.checkpoint.publish import MANIFEST, step_folder
from titanlite.commands import main
from titanlite.config.check import last_step
from titanlite.config.schema import Checkpoint, Config, Job, Training
from titanlite.preflight.checked_run import checked_run
from titanlite.training.assemble import try_assembly

PARAMETERS = 8_030_261_248
EACH = PARAMETERS * 12  # bytes: weights and two moments in float32
LARGE = str(MEASURED_CONFIGS / "llama3_8b.toml")


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What is free on every disk, in checkpoints of 8B."""
    amount = [0.0]
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=int(amount[0] * EACH)))
    return amount


def config(k: int, steps: int = 10_000, stop_after: int = 0, **more: str) -> Config:
    kept, trained = Checkpoint(keep_latest_k=k, interval=1000, **more), Training(steps=steps)  # type: ignore[arg-type]
    return Config(job=Job(stop_after=stop_after), checkpoint=kept, training=trained)


@pytest.mark.parametrize(
    ("config", "there", "needs"),
    [
        (config(3), 0, 4),  # the fourth is written before the first is deleted
        (config(3), 2, 3),  # the one that the run resumed from stays
        (config(3), 3, 2),
        (config(3), 9, 1),
        (config(3, keep_best="validation_loss"), 0, 5),
        (config(3, mirror="s3://b/run"), 0, 5),
        (config(3, steps=2000), 0, 2),
        (config(3, steps=2001), 0, 3),
        (config(3, stop_after=1000), 0, 1),
        (config(0), 4, 6),
        (config(3, steps=2000), 2, 0),  # nothing is left to do
    ],
)
def test_room_for_what_will_be_there_at_once(
    tmp_path: Path, free: list[float], config: Config, there: int, needs: float
) -> None:
    for step in range(1, there + 1):
        step_folder(tmp_path, 1000 * step).mkdir()
        (step_folder(tmp_path, 1000 * step) / MANIFEST).touch()
    free[0] = needs + 0.11
    assert lack_of_disk_space(tmp_path, config, EACH) is None
    free[0] = needs - 0.01
    told = lack_of_disk_space(tmp_path, config, EACH)
    if needs:
        assert told
        is_kept = f"checkpoint.keep_latest_k = {config.checkpoint.keep_latest_k}" in told
        assert is_kept != (f"(until step {last_step(config)})" in told)  # whichever of the two limits it
        assert f"GiB are free at {tmp_path}" in told
    else:
        assert told is None


@pytest.mark.parametrize(("newest", "needs"), [(150, 2), (999, 2), (1000, 1), (1050, 1)])
def test_a_run_that_was_stopped_between_its_saves(tmp_path: Path, free: list[float], newest: int, needs: float) -> None:
    step_folder(tmp_path, newest).mkdir()
    (step_folder(tmp_path, newest) / MANIFEST).touch()
    free[0] = needs - 0.01
    told = lack_of_disk_space(tmp_path, config(0, steps=1100), EACH)
    assert told
    assert f": {needs} more of " in told
    # What a killed save has left is removed at the start.
    (tmp_path / "step-00001100.tmp").mkdir()
    with (tmp_path / "step-00001100.tmp" / "tensors").open("wb") as file:
        file.truncate(int(0.15 * EACH))  # sparse
    assert lack_of_disk_space(tmp_path, config(0, steps=1100), EACH) is None


@pytest.mark.parametrize("flags", [["float32"], ["bfloat16"], ["bfloat16", "--optimizer.ema_decay=0.9"]])
def test_each_rule_keeps_what_it_keeps(flags: list[str]) -> None:
    """Muon one moment of the matrices of blocks; and there may be an average in float32."""
    in_blocks = 32 * (6144 * 4096 + 4096 * 4096 + 28672 * 4096 + 4096 * 14336)
    size, of_average = {"float32": 4, "bfloat16": 2}[flags[0]], 4 * (len(flags) - 1)
    asked = checked_run(["--config", LARGE, "--optimizer.recipe=muon", "--optimizer.state_dtype", *flags])
    wanted = (4 + of_average) * PARAMETERS + 2 * size * (PARAMETERS - in_blocks) + size * in_blocks
    assert try_assembly(asked, 2).saved == wanted


@pytest.mark.parametrize(("of_all", "left", "lacks"), [(1000, 27, True), (1000, 28, False), (0, 0, False)])
def test_a_disk_may_have_room_for_no_more_files(
    tmp_path: Path, free: list[float], monkeypatch: pytest.MonkeyPatch, of_all: int, left: int, lacks: bool
) -> None:
    free[0], seen = 10, list(os.statvfs(tmp_path))
    seen[5:8] = of_all, left, left  # f_files, f_ffree, f_favail
    monkeypatch.setattr(os, "statvfs", lambda path: os.statvfs_result(seen))
    told = lack_of_disk_space(tmp_path, config(3), EACH)
    assert (told is not None) == lacks
    assert not lacks or f", and {left} files (inodes) are free at {tmp_path}" in str(told)


def test_validate_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], free: list[float]
) -> None:
    monkeypatch.chdir(tmp_path)
    free[0] = 2
    argv = ["validate", LARGE]
    assert main(argv) == 0
    lack = "the disk has no room for the checkpoints: 4 more of 89.7 GiB are to come (checkpoint.keep_latest_k = 3 and"
    said = capsys.readouterr().out
    assert f"\n  warning: {lack}" in said
    assert "no problems" not in said
    free[0] = 0.5
    assert main([*argv, "--training.steps", "3"]) == 0
    assert "checkpoints: 1 more of 89.7 GiB is to come (until step 3), and " in capsys.readouterr().out
    assert main([*argv, "--checkpoint.enable", "false"]) == 0
    assert "room" not in capsys.readouterr().out
