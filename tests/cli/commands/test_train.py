"""titanlite train: a mistake costs no process, and how the run ends is how the command ends."""

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cli.commands.conftest import Call
from titanlite.commands import main
from titanlite.commands.train import _has_stopped_well
from titanlite.config.schema import Checkpoint, Config
from titanlite.config.toml_file import shipped_folder
from titanlite.preflight.checked_run import VERBOSE, VERBOSE_HELP, checked_run
from titanlite.preflight.run_folder import RunFolder

DEBUG = str(shipped_folder("configs") / "debug.toml")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--training.stepz", "3"), "did you mean training.steps?"),
        (("--gpus", "3"), "want: a multiple of local_batch_size × data-parallel ranks = 2 × 3 = 6"),
        (("--gpus", "0"), "want: a number of GPUs, at least 1"),
        (("--gpu", "2"), "did you mean --gpus?"),
    ],
)
def test_a_mistake_is_four_lines_before_a_process_is_started(
    call: Call, monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...], said: str
) -> None:
    monkeypatch.setattr("titanlite.commands.train._launch", None)
    monkeypatch.setattr("titanlite.commands.train.shows_gpus", lambda: False)
    text = call("train", DEBUG, *flags, ends=2)
    assert said in text
    assert len(text.splitlines()) == 4


def test_one_process_is_started_without_a_launcher(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    started: list[list[str]] = []
    monkeypatch.setattr("titanlite.commands.train.shows_gpus", lambda: False)
    monkeypatch.setattr("os.execv", lambda program, argv: started.append(argv))
    monkeypatch.setattr("titanlite.commands.train._launch", lambda *args: 0)
    monkeypatch.chdir(tmp_path)
    given = [sys.executable, "-m", "titanlite.train", "--config", DEBUG, "--training.steps", "100"]
    main(["train", DEBUG, "--training.steps", "100"])
    main(["train", DEBUG, "--verbose", "--training.steps", "100"])
    assert started == [given, [*given, "--verbose"]]


def test_verbose_is_a_flag_of_what_trains_and_on_its_help_pages(call: Call, capsys: pytest.CaptureFixture[str]) -> None:
    for page, lines in ((lambda: main(["train", "--help"]), 40), (lambda: checked_run(["--help"]), 24)):
        with pytest.raises(SystemExit):
            page()
        out = capsys.readouterr().out
        assert f"{VERBOSE}  {VERBOSE_HELP}\n" in out
        assert len(out.splitlines()) <= lines
    assert "--verbose" in call("validate", DEBUG, "--verbose", ends=2)


def test_more_gpus_than_there_are(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("titanlite.commands.train.shows_gpus", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    assert "want: at most 2, which this process sees" in call("train", DEBUG, "--gpus", "4", ends=2)


def test_under_a_launcher_it_is_refused(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    assert f"fix:  torchrun ... train.py {DEBUG}, or unset RANK" in call("train", DEBUG, ends=2)
    monkeypatch.delenv("RANK")
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "8")
    assert "srun: 1 problem" in call("train", DEBUG, ends=2)


@pytest.mark.parametrize(
    ("status", "saves", "is_well"),
    [
        ({"state": "stopped", "step": 7, "by": "SIGTERM"}, True, True),
        ({"state": "stopped", "step": 8, "by": "SIGTERM"}, True, False),  # whose checkpoint is not complete
        ({"state": "stopped", "step": 8, "by": "SIGTERM"}, False, True),
        ({"state": "stopped", "step": 7, "by": "a second signal, SIGINT"}, True, False),
        ({"state": "finished", "step": 9}, True, True),
        ({"state": "running", "step": 7}, True, False),
        ({"state": "failed", "step": 7, "error": {}}, True, False),
        ({"state": "stopped", "step": 7, "by": "SIGTERM", "started": "2026-01-01T00:00:00Z"}, True, False),  # before
        (None, True, False),
    ],
)
def test_a_stop_is_well_if_it_saved_its_last_step(
    tmp_path: Path, status: dict[str, Any] | None, saves: bool, is_well: bool
) -> None:
    began, folder = "2026-01-02T00:00:00Z", RunFolder(tmp_path)
    step = folder.checkpoints / "step-00000007"
    step.mkdir(parents=True)
    (step / "MANIFEST.json").write_text("{}")
    if status is not None:
        folder.status.write_text(json.dumps({"started": began, "updated": began, **status}))
    assert _has_stopped_well(folder, Config(checkpoint=Checkpoint(enable=saves)), began) == is_well


@pytest.fixture
def start(desk: Any, tmp_path: Path) -> Iterator[Any]:
    """Start the command with two processes that train longer than the test lasts."""
    from tests.support.launched import Launcher

    started: list[Launcher] = []

    def begin(name: str, *flags: str) -> tuple[Launcher, Path, Path]:
        argv, log = desk.flags(name, "--training.steps=100000", *flags), tmp_path / "log"
        started.append(Launcher(["train", *argv, "--gpus", "2"], log, main))
        return started[-1], desk.folder / "runs" / name, log

    yield begin
    for launcher in started:
        launcher.kill()


@pytest.mark.slow
def test_a_run_that_saved_when_it_was_told_to_stop_ends_with_0(start: Any) -> None:
    from tests.support.launched import Ended, wait_for_step

    hangup = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as under nohup
    try:
        launcher, folder, log = start("stopped")
    finally:
        signal.signal(signal.SIGHUP, hangup)
    wait_for_step(folder, 2)
    os.kill(launcher.pid, signal.SIGHUP)
    wait_for_step(folder, 4)
    launcher.terminate()
    assert launcher.wait(300) == 0, log.read_text()
    ended = Ended(folder, log.read_text())
    assert (ended.status["state"], ended.status["by"]) == ("stopped", "SIGTERM")
    assert ended.checkpoints() == [ended.status["step"]]
    assert "Traceback" not in ended.output
    assert "torch/distributed" not in ended.output  # as the agent's log says


@pytest.mark.slow
def test_a_second_signal_ends_it_at_once_and_says_so(start: Any) -> None:
    from tests.support.launched import wait_for_step

    launcher, folder, log = start("twice", "--checkpoint.async_mode=disabled")
    wait_for_step(folder, 3)
    launcher.terminate()
    time.sleep(1.2)  # sooner it would be one request
    launcher.terminate()
    code = launcher.wait(300)
    well = _has_stopped_well(RunFolder(folder), Config(), "")
    assert code == (0 if well else 128 + signal.SIGTERM), log.read_text()  # it may have been saved by then


@pytest.mark.slow
def test_a_rank_that_is_killed_is_named(start: Any) -> None:
    from tests.support.launched import wait_for_step

    launcher, folder, log = start("killed")
    wait_for_step(folder, 3)
    os.kill(json.loads((folder / "status.json").read_text())["pid"], signal.SIGKILL)
    assert launcher.wait(300) == 128 + signal.SIGKILL
    assert f"rank 0 ended first, with SIGKILL; its log is {folder}/logs/rank0.log\n" in log.read_text()
