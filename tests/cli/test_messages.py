"""Mistakes of data, of a folder and of a key, made as a person makes them: one message, exit code 2, in a moment."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.cpu import cpu_of_children
from tests.support.forks import LAUNCHER_VARIABLES
from tests.support.launched import REPOSITORY, torchrun


def start(folder: Path, flags: list[str]) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k not in LAUNCHER_VARIABLES}
    command = [sys.executable, str(REPOSITORY / "train.py"), *flags, "--job.dump_folder", str(folder)]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)


def debug(*flags: str) -> list[str]:
    return ["--config", str(REPOSITORY / "configs" / "debug.toml"), *flags]


def not_utf8(folder: Path) -> list[str]:
    (folder / "latin.txt").write_bytes("café au lait\n".encode("latin-1"))
    return debug("--data.source", "latin.txt")


def of_another_run(folder: Path) -> list[str]:
    (folder / "debug").mkdir()
    (folder / "debug" / "config.toml").write_text('[model]\nflavor = "debug"\n[training]\nseq_len = 256\nseed = 7\n')
    return debug()


Mistake = Callable[[Path], list[str]]  # makes its files in a folder, and returns the flags
MISTAKES: dict[str, tuple[Mistake, tuple[str, ...]]] = {  # with what the message must say, each once
    "text that is not UTF-8": (not_utf8, ("data.source = ", "latin.txt:1: not UTF-8: byte 0xe9")),
    "folder of a different run": (
        of_another_run,
        ("debug: output folder of a different run", "training.seed = 0", "want: 7", "another job.name"),
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_one_message_in_a_moment(mistake: str, tmp_path: Path) -> None:
    make, said = MISTAKES[mistake]
    with cpu_of_children(2.0):
        ended = start(tmp_path, make(tmp_path))
    assert ended.returncode == 2, ended.stderr
    assert ended.stdout == ""
    assert "Traceback" not in ended.stderr
    assert ended.stderr.count(": 1 problem\n") == 1, ended.stderr
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
