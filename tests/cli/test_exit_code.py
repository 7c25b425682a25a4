"""How a process ends: its exit code, and what it leaves on stderr and for torchrun."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import titanlite.exit_code
from titanlite.errors import DataError
from titanlite.exit_code import exit_code

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("error", "rank", "code", "folder"),
    [
        *((DataError, 0, 2, ""), (DataError, 1, 2, ""), (OSError, 0, 1, "")),
        *((DataError, 1, 2, "gone"), (RuntimeError, 1, 1, "gone")),  # of /tmp, where what is old is deleted
    ],
)
def test_secrets_are_kept_out_of_what_is_said(
    error: type[Exception],
    rank: int,
    code: int,
    folder: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    told = tmp_path / folder / "error.json"
    for name, value in {"HF_TOKEN": 'hf_abc"defgh', "RANK": str(rank), "TORCHELASTIC_ERROR_FILE": str(told)}.items():
        monkeypatch.setenv(name, value)
    for clock in ("_RANK_0_SPEAKS_S", "_TORCHRUN_CLOCK_S"):
        monkeypatch.setattr(titanlite.exit_code, clock, 0.0)
    monkeypatch.setenv("LOCAL_RANK", "0")

    def fails() -> None:
        raise error('GET https://user:hf_abc"defgh@host: refused')

    assert exit_code(fails) == code
    said = capsys.readouterr().err
    assert said.endswith("GET https://***@host: refused\n")
    assert ("Traceback" in said) == (error is not DataError)
    if not folder and (error is OSError or rank):
        message = json.loads(told.read_text())["message"]
        assert message["message"] == f"{error.__name__}: GET https://***@host: refused"
        assert "@host: refused" in message["extraInfo"]["py_callstack"]
        assert "defgh" not in told.read_text()


def test_who_is_ended_while_telling_torchrun_leaves_no_half_of_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torchrun reads it as JSON, without looking whether it is."""
    told = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(told))
    writes = []

    def ended(file: int) -> None:
        writes.append(told.exists())
        raise SystemExit

    monkeypatch.setattr(os, "fsync", ended)  # everything is written, and nothing in its place

    def fails() -> None:
        raise OSError

    with pytest.raises(SystemExit):
        exit_code(fails)
    assert writes == [False]
    assert not told.exists()


HANGS = "import threading; threading.Thread(target=threading.Event().wait).start()"


def test_no_thread_keeps_a_rank_from_ending() -> None:
    script = f"{HANGS}; print('said'); from titanlite.exit_code import leave; leave(3)"
    ended = subprocess.run(
        [sys.executable, "-c", script], env=os.environ | {"RANK": "0"}, capture_output=True, text=True, timeout=300
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (3, "said\n", "")


@pytest.mark.parametrize("is_rank", [True, False])
def test_a_reader_that_is_gone_changes_no_exit_code(is_rank: bool) -> None:
    gone = "import os; read, write = os.pipe(); os.dup2(write, 1); os.dup2(write, 2); os.close(read)"
    script = f"{HANGS if is_rank else ''}\n{gone}; print('said'); from titanlite.exit_code import leave; leave(3)"
    environment = {k: v for k, v in os.environ.items() if k != "RANK"} | {"PYTHONUNBUFFERED": ""}
    environment |= {"RANK": "0"} if is_rank else {}
    assert subprocess.run([sys.executable, "-c", script], env=environment, timeout=300).returncode == 3


PRINTED = {"little": "--version", "much": "schema"}
BUFFERED = {"PYTHONUNBUFFERED": ""}


@pytest.mark.parametrize("printed", PRINTED)
def test_a_command_whose_output_is_closed_or_full(printed: str) -> None:
    """As cron closes it, and as a disk is without room."""
    command = f"{sys.executable} -m titanlite {PRINTED[printed]}"
    for where, code, said in ((">&-", 0, ""), ("2>&- >&-", 0, ""), (">/dev/full", 2, "No space left on device")):
        outcome = {"shell": True, "capture_output": True, "text": True, "timeout": 300}
        ended = subprocess.run(f"{command} {where}", cwd=ROOT, env=os.environ | BUFFERED, **outcome)
        assert ended.returncode == code, ended.stderr
        assert "Traceback" not in ended.stderr
        assert "Exception ignored" not in ended.stderr
        assert (said in ended.stderr) if said else not ended.stderr


@pytest.mark.parametrize("where", ["2>&-", "2>/dev/full"])
def test_a_mistake_without_standard_error(where: str) -> None:
    command = f"{sys.executable} -m titanlite validate nothing.toml {where}"
    assert subprocess.run(command, shell=True, cwd=ROOT, timeout=300).returncode == 2


@pytest.mark.parametrize(("words", "code"), [("--version", 0), ("schema", 128 + signal.SIGPIPE)])
def test_a_command_whose_output_nobody_reads(words: str, code: int) -> None:
    """The first has done all before it learns of that."""
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "titanlite", words]
    streams = {"stdout": write, "stderr": subprocess.PIPE}
    ended = subprocess.run(command, cwd=ROOT, env=os.environ | BUFFERED, timeout=300, **streams)
    os.close(write)
    assert (ended.returncode, ended.stderr) == (code, b"")


def test_what_another_user_keeps_to_himself_is_a_mistake(capsys: pytest.CaptureFixture[str]) -> None:
    def fails() -> None:
        raise PermissionError(13, "Permission denied", "/home/other/run")

    assert exit_code(fails) == 2
    assert "/home/other/run = Permission denied" in capsys.readouterr().err


def test_nor_does_a_mistake_that_nobody_hears_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)

    def fails() -> None:
        raise DataError("no such file")

    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w", buffering=1) as stderr:
        monkeypatch.setattr("sys.stderr", stderr)
        assert exit_code(fails) == 2
        os.dup2(os.open(os.devnull, os.O_WRONLY), write)  # for what the stream still holds
