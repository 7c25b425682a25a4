"""What a launcher must set up is asked for before anything that takes long."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.forks import LAUNCHER_VARIABLES
from titanlite.config.toml_file import shipped_folder
from titanlite.errors import ConfigError
from titanlite.preflight.launcher import Launcher, check_launcher

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("restarts", "disabled", "legal"),
    [(None, None, True), ("0", None, True), ("3", "1", True), ("3", None, False), ("1", "0", False)],
)
def test_restarts_need_a_store_of_their_own(
    monkeypatch: pytest.MonkeyPatch, restarts: str | None, disabled: str | None, legal: bool
) -> None:
    for name, value in (("TORCHELASTIC_MAX_RESTARTS", restarts), ("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", disabled)):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    if legal:
        check_launcher()
    else:
        with pytest.raises(ConfigError, match=r"export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"):
            check_launcher()


@pytest.mark.parametrize("given", [("RANK",), ("WORLD_SIZE",), ("RANK", "WORLD_SIZE", "MASTER_ADDR")])
def test_a_part_of_what_a_launcher_says_is_refused(monkeypatch: pytest.MonkeyPatch, given: tuple[str, ...]) -> None:
    said = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    for name in said:
        monkeypatch.delenv(name, raising=False)
    check_launcher()
    monkeypatch.setenv("MASTER_ADDR", "localhost")  # of others, too
    check_launcher()
    for name in given:
        monkeypatch.setenv(name, "1")
    with pytest.raises(ConfigError, match="MASTER_PORT = not set") as refused:
        check_launcher()
    assert ("WORLD_SIZE = not set" in str(refused.value)) == ("WORLD_SIZE" not in given)
    for name in said:
        monkeypatch.setenv(name, "1")
    check_launcher()


OTHERS = [("SLURM_STEP_NUM_TASKS", "srun"), ("OMPI_COMM_WORLD_SIZE", "mpirun"), ("PMI_SIZE", "mpiexec")]


@pytest.mark.parametrize(("name", "launcher"), OTHERS)
def test_several_processes_that_each_would_be_the_whole_run(
    monkeypatch: pytest.MonkeyPatch, name: str, launcher: str
) -> None:
    for other in (*LAUNCHER_VARIABLES, *(name for name, _ in OTHERS)):
        monkeypatch.delenv(other, raising=False)
    monkeypatch.setenv(name, "1")  # a shell on a node, or a torchrun that is about to say more
    check_launcher()
    monkeypatch.setenv(name, "16")
    with pytest.raises(
        ConfigError, match=rf"{launcher}: 1 problem\n  processes = 16\n.*want: 1 on each host"
    ) as refusal:
        check_launcher()
    assert f"for one process, unset {name}" in str(refusal.value)  # in a shell that `srun --pty` started
    for said in LAUNCHER_VARIABLES:  # it was translated
        monkeypatch.setenv(said, "1")
    check_launcher()


def test_a_run_under_srun_touches_nothing(tmp_path: Path) -> None:
    clean = {name: value for name, value in os.environ.items() if name not in LAUNCHER_VARIABLES}
    clean |= {"SLURM_STEP_NUM_TASKS": "2", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "titanlite.train", "--config", str(shipped_folder("configs") / "debug.toml")]
    done = subprocess.run(command, env=clean, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2
    assert "srun --ntasks-per-node 1 torchrun" in done.stderr
    assert list(tmp_path.iterdir()) == []


LOOKS = """
import sys
from titanlite.preflight.launcher import Launcher
launcher = Launcher()
for _ in sys.stdin:
    print(launcher.is_gone(), flush=True)
"""
TOLD = "RANK=0 LOCAL_RANK=0 WORLD_SIZE=2 MASTER_ADDR=localhost MASTER_PORT=1"


@pytest.mark.parametrize(
    ("says", "before", "is_seen"),
    [
        (TOLD, "", True),
        (f"{TOLD} sh -c", "", True),  # a shell stays between, and lives on
        (f"{TOLD} sh -c", TOLD.replace("RANK=0", "RANK=7"), True),  # of a rank of something else
        (f"{TOLD.replace(' LOCAL_RANK=0', '')} sh -c", "", True),
        ("", "", False),
        ("sh -c", "", False),
    ],
)
def test_a_launcher_that_was_killed_is_gone(tmp_path: Path, says: str, before: str, is_seen: bool) -> None:
    (tmp_path / "looks.py").write_text(LOOKS)
    rank = f"{sys.executable} {tmp_path / 'looks.py'}"
    rank = f"{says} '{rank}; true'" if says.endswith("sh -c") else f"{says} {rank}"
    clean = {name: value for name, value in os.environ.items() if name not in LAUNCHER_VARIABLES}
    clean |= dict(word.split("=") for word in before.split()) | {"PYTHONPATH": str(ROOT)}
    command = ["sh", "-c", f"{rank}; true"]
    with subprocess.Popen(command, env=clean, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdin
        assert launcher.stdout
        for expected in (False, is_seen):
            print("look", file=launcher.stdin, flush=True)
            assert launcher.stdout.readline() == f"{expected}\n"
            launcher.kill()
            launcher.wait()


@pytest.mark.parametrize("parent", [0, 1])
def test_in_a_container_there_may_be_none_to_be_seen(monkeypatch: pytest.MonkeyPatch, parent: int) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(os, "getppid", lambda: parent)
    launcher = Launcher()
    monkeypatch.setattr(os, "getppid", lambda: 4711)
    assert not launcher.is_gone()


def test_a_process_that_cannot_be_looked_into_is_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another user's, or any without /proc."""

    def refused(path: Path) -> bytes:
        raise PermissionError(path)

    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(Path, "read_bytes", refused)
    launcher = Launcher()
    assert not launcher.is_gone()
    monkeypatch.setattr(os, "getppid", lambda: 1)
    assert launcher.is_gone()


@pytest.mark.parametrize(
    ("number", "is_gone"), [(errno.EMFILE, False), (errno.EACCES, False), (errno.ESRCH, True), (errno.ENOENT, True)]
)
def test_only_a_process_that_has_ended_is_gone(monkeypatch: pytest.MonkeyPatch, number: int, is_gone: bool) -> None:
    def fails(path: Path) -> str:
        raise OSError(number, os.strerror(number), str(path))

    launcher = Launcher()
    launcher._line = [os.getppid(), 4711]
    monkeypatch.setattr(Path, "read_text", fails)
    assert launcher.is_gone() == is_gone
