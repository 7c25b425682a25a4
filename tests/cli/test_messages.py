"""A mistake made as a person makes it: one message for all ranks, exit code 2, in a moment."""

import os
import subprocess
import sys
from pathlib import Path

from tests.support.cpu import cpu_of_children
from tests.support.forks import LAUNCHER_VARIABLES
from tests.support.launched import REPOSITORY, torchrun


def debug(*flags: str) -> list[str]:
    return ["--config", str(REPOSITORY / "configs" / "debug.toml"), *flags]


def of_another_run(folder: Path) -> list[str]:
    (folder / "debug").mkdir()
    (folder / "debug" / "config.toml").write_text('[model]\nflavor = "debug"\n[training]\nseq_len = 256\nseed = 7\n')
    return debug()


def test_one_message_in_a_moment(tmp_path: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if k not in LAUNCHER_VARIABLES}
    command = [sys.executable, str(REPOSITORY / "train.py"), *of_another_run(tmp_path), f"--job.dump_folder={tmp_path}"]
    with cpu_of_children(2.0):
        ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert (ended.returncode, ended.stdout) == (2, ""), ended.stderr
    assert "Traceback" not in ended.stderr
    said = (
        ": 1 problem\n",
        "debug: output folder of a different run",
        "training.seed = 0",
        "want: 7",
        "another job.name",
    )
    for words in said:
        assert ended.stderr.count(words) == 1, f"{words!r} in\n{ended.stderr}"


def under_torchrun(folder: Path, flags: list[str]) -> str:
    """What two ranks print that fail."""
    log = folder / "log"
    argv = [*flags, "--job.dump_folder", str(folder)]
    run = torchrun(["--standalone", "--nproc-per-node", "2"], str(REPOSITORY / "train.py"), argv, log)
    try:
        assert run.wait(300) == 1  # torchrun's own
    finally:
        run.kill()
    return log.read_text()


def test_message_is_there_once_for_all_ranks(tmp_path: Path) -> None:
    output = under_torchrun(tmp_path, debug("--training.stepz", "3"))
    assert output.count("did you mean training.steps?") == 1, output
    assert 'train.py", line' not in output  # torchrun reports the exit code, and no traceback of ours
    assert not (tmp_path / "debug").exists()


def test_message_of_rank_0_alone_ends_all_ranks(tmp_path: Path) -> None:
    output = under_torchrun(tmp_path, of_another_run(tmp_path))
    assert output.count("output folder of a different run") == 1, output
    assert 'train.py", line' not in output
