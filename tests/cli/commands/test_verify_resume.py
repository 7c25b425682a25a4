import contextlib
import functools
import json
import os
import re
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.forks import fork
from tests.support.launched import Job, train_rank
from tests.support.needs import slow
from titanlite.checkpoint.saved_state import SavedState
from titanlite.checkpoint.state import Checkpoints
from titanlite.commands import main, verify_resume
from titanlite.config.toml_file import shipped_folder
from titanlite.errors import CheckpointError
from titanlite.preflight.run_folder import RunFolder

DEBUG = str(shipped_folder("configs") / "debug.toml")


def flags(folder: Path) -> list[str]:
    text = folder / "corpus.txt"
    text.write_text(Path(json.__file__).read_text() * 4)
    small = {"data.source": text, "data.cache_dir": folder / "cache", "job.dump_folder": folder / "runs"}
    small |= {"training.seq_len": 32, "training.global_batch_size": 8, "training.local_batch_size": 2}
    small |= {"compile.enable": "false", "validation.enable": "false", "model.n_layers": 1}
    return [f"--{key}={value}" for key, value in small.items()]


def forked(module: str, arguments: list[str], processes: int) -> int:
    """What `python -m titanlite.train` does, without a new interpreter for each run."""
    assert (module, processes) == ("titanlite.train", 1)
    with tempfile.NamedTemporaryFile("r") as log:
        rank = functools.partial(train_rank, 0, 1, 0, arguments, lambda: None)
        code = Job([fork(rank, Path(log.name))], [Path(log.name)]).wait()[0]
        sys.stderr.write(log.read() if code else "")
    return code


@pytest.mark.parametrize("world", ["1", *slow("2")])
def test_the_debug_run_resumes(
    world: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if world == "1":
        monkeypatch.setattr(verify_resume, "run_again", forked)
    assert main(["verify-resume", DEBUG, *flags(tmp_path), "--steps", "1", "--world", world]) == 0
    out, err = capfd.readouterr()
    assert out.splitlines()[-1] == "equal bit for bit: losses, gradient norms and all tensors after step 2", err
    assert os.listdir(tmp_path / "runs") == []


def test_an_interrupted_check_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        (tmp_path / "runs/debug-verify-resume/uninterrupted").mkdir(parents=True)
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(verify_resume, "run_again", interrupted)
    pid = fork(lambda: main(["verify-resume", DEBUG, *flags(tmp_path), "--steps", "1"]), tmp_path / "log")
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 128 + signal.SIGTERM
    assert os.listdir(tmp_path / "runs") == []


def make_run(folder: Path, losses: list[float], weight: float, generator: float = 0.0) -> RunFolder:
    run = RunFolder(folder)
    folder.mkdir()
    rows = [json.dumps({"step": n, "loss": loss, "grad_norm": 1.0}) for n, loss in enumerate(losses, 1)]
    run.metrics.write_text("".join(f"{row}\n" for row in rows))
    tensors = {"model/w": torch.full((2,), weight), "model/same": torch.ones(2)}
    tensors |= {"rng/rank00000/python": torch.full((1,), generator)}
    Checkpoints(run.checkpoints, keep=0).save(2, tensors, SavedState())
    return run


def test_what_is_not_equal_is_said(tmp_path: Path) -> None:
    whole = make_run(tmp_path / "whole", [5.0, 4.0], 1.0)
    verify_resume._require_equal(whole, make_run(tmp_path / "same", [5.0, 4.0], 1.0, generator=1.0), 2)
    with pytest.raises(CheckpointError) as caught:
        verify_resume._require_equal(whole, make_run(tmp_path / "other", [5.0, 4.0000001], 1.0000001), 2)
    assert "step 2 = loss 4.0000001, gradient norm 1.0" in str(caught.value)
    assert "want: 4.0 and 1.0, as without interruption" in str(caught.value)
    assert "tensors after step 2 = model/w (0,)\n" in str(caught.value)


EMPTY, SKIPPED, NOT_FINITE = {"targets": 0}, {"loss": 4.0, "grad_norm": None}, {"loss": None, "grad_norm": 1.0}
PLAIN = {"loss": 4.0, "grad_norm": 1.0}


@pytest.mark.parametrize(
    ("whole", "stopped", "said"),
    [
        (PLAIN, PLAIN, ""),
        (EMPTY, EMPTY, ""),
        (SKIPPED, SKIPPED, ""),
        (PLAIN, None, "step 2 = loss "),  # there is no such row
        (None, PLAIN, "step 2 = loss "),
        (None, None, "step 2 = loss "),
        (NOT_FINITE, NOT_FINITE, "step 2 = loss None"),
        (PLAIN, EMPTY, "step 2 = loss 'of no target'"),
        (PLAIN, SKIPPED, "step 2 = loss 4.0, gradient norm None"),
    ],
)
def test_a_step_is_equal_if_both_have_the_same_finite_loss(
    whole: dict[str, Any] | None, stopped: dict[str, Any] | None, said: str, tmp_path: Path
) -> None:
    runs = []
    for name, row in (("whole", whole), ("stopped", stopped)):
        runs.append(make_run(tmp_path / name, [5.0], 1.0))
        with runs[-1].metrics.open("a") as file:
            file.write(json.dumps({"step": 2, **row}) + "\n" if row else "")
    with pytest.raises(CheckpointError, match=re.escape(said)) if said else contextlib.nullcontext():
        verify_resume._require_equal(*runs, 2)


def test_a_run_that_fails_is_shown(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    cannot = "--comm.init_timeout_seconds=0"
    assert main(["verify-resume", DEBUG, *flags(tmp_path), cannot]) == 2  # seen before anything is started
    assert not (tmp_path / "runs").exists()
    capfd.readouterr()
    (tmp_path / "mine.py").write_text("import nothing_of_this_name\n")
    (tmp_path / "model").mkdir()
    (tmp_path / "model/mine-debug.toml").write_text((shipped_folder("recipes") / "model/llama3-debug.toml").read_text())
    own = [f"--model.file={tmp_path / 'mine.py'}", f"--job.recipe_dirs={tmp_path}"]
    assert main(["verify-resume", DEBUG, *flags(tmp_path), *own]) == 2
    err = capfd.readouterr().err
    assert "nothing_of_this_name" in err
    assert "uninterrupted, to step 10 = exit code 2" in err


def test_what_cannot_be_tried(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for steps in ("0", "76", "x"):
        assert main(["verify-resume", DEBUG, *flags(tmp_path), "--steps", steps]) == 2
        assert "at least 1, and at most half of training.steps = 150" in capfd.readouterr().err
    (tmp_path / "runs/debug-verify-resume").mkdir(parents=True)
    assert main(["verify-resume", DEBUG, *flags(tmp_path)]) == 2
    assert "an earlier check left it" in capfd.readouterr().err
