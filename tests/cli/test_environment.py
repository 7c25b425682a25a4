"""scripts/environment.py with a stand-in for Python and pip: what it says while a person waits."""

import os
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.cli.test_bench import BENCH, script

PYTHON = sys.executable  # before it is replaced
# What pip 23 and pip 25 say, but for the packages, and the time that unpacking takes.
STAND_IN = """
import os, sys, time
open(__file__ + ".calls", "a").write(" ".join(sys.argv[1:]) + "\\n")
if "-e" in sys.argv:
    print("Collecting torch<2.15,>=2.11", flush=True)
    print("  Downloading https://host/whl/cpu/torch-2.13.0%2Bcpu-cp311-cp311-linux_x86_64.whl (190.1 MB)", flush=True)
    print("  Downloading https://host/idna-3.9-py3-none-any.whl (70 kB)", flush=True)
    print("Downloading pyarrow-26.0.1-cp311-cp311-manylinux_2_28_x86_64.whl (47.6 MB)", flush=True)
    print("Installing collected packages: idna, pyarrow, torch", flush=True)
    time.sleep(0.3)
    sys.exit(int(os.environ.get("PIP_ENDS_WITH", 0)))
"""


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script, as a module whose `.venv` is elsewhere."""
    module = script("environment", BENCH.parent)
    python = tmp_path / "python"
    python.write_text(f"#!{sys.executable}\n{STAND_IN}")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setattr(module.shutil, "which", lambda name: None)
    for name, value in {"VENV": tmp_path / ".venv", "PYTHON": python, "STILL_S": 0.1}.items():
        monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(module, "UNFINISHED", tmp_path / ".venv" / "unfinished")
    return module


def test_an_installation_says_step_by_step_what_it_does(
    environment: ModuleType, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment.sys, "platform", "linux")
    environment.install([], [environment.EVERYTHING])
    out, said = capfd.readouterr()
    assert out == ""  # which is for the result
    lines = [line for line in said.splitlines() if "still at it" not in line]
    assert lines[0].endswith("; about 350 MB to download")
    assert lines[1:-1] == [
        "1/4 make the environment",
        "2/4 install torch without CUDA",
        "3/4 install titanlite and what it needs",
        "    downloading torch 2.13.0+cpu, 190.1 MB",
        "    downloading pyarrow 26.0.1, 47.6 MB",
        "    unpacking 3 packages",
        "4/4 compile what was installed",
    ]
    assert lines[-1].startswith("installed in ")
    unpacking = said.partition("unpacking")[2].partition("4/4")[0]
    assert "still at it, 0 s" in unpacking  # where nothing else is said
    assert not environment.UNFINISHED.exists()


@pytest.mark.parametrize("word", ["--help", "gpus"])
def test_what_is_no_extra_is_refused_and_nothing_installed(
    environment: ModuleType, monkeypatch: pytest.MonkeyPatch, word: str
) -> None:
    monkeypatch.setattr(environment.sys, "argv", ["environment.py", "dev", word])
    with pytest.raises(SystemExit, match=f": {word}; there are all, "):
        environment.main()
    assert not environment.UNFINISHED.exists()


def test_an_installation_that_fails_ends_there_and_is_made_anew(
    environment: ModuleType, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_ENDS_WITH", "7")
    with pytest.raises(SystemExit) as ended:
        environment.install(["dev"], ["ruff"])
    assert ended.value.code == 7
    assert environment.UNFINISHED.exists()
    said = capfd.readouterr().err
    assert "adding to" in said
    assert "compile" not in said


def calls(environment: ModuleType) -> list[str]:
    return Path(f"{environment.PYTHON}.calls").read_text().splitlines()


def test_what_another_python_has_made_is_completed_by_its_own_pip(environment: ModuleType) -> None:
    """Making it again would have one Python run another's ensurepip, which ends there."""
    environment.install(["dev"], ["ruff"])
    assert not any(call.startswith("-m venv") for call in calls(environment))
    assert any("-m pip install" in call and "[dev]" in call for call in calls(environment))


@pytest.mark.parametrize(("capability", "is_served"), [("9.0", True), ("10.0", True), ("8.9", False), ("", False)])
def test_kernels_for_hopper_and_blackwell_come_where_there_is_one(
    capability: str, is_served: bool, environment: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a host with two GPUs, and of one whose driver does not answer."""
    smi = tmp_path / "nvidia-smi"
    smi.write_text(f"#!/bin/sh\necho {capability}\necho {capability}\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(environment.shutil, "which", lambda name: str(smi))
    environment.install(["dev"], ["ruff"])
    assert any(("[dev,gpu]" if is_served else "[dev]") in call for call in calls(environment))


@pytest.mark.parametrize("is_anothers", [True, False])
def test_what_has_no_pip_is_made_anew_where_another_python_has_made_it(
    is_anothers: bool, environment: ModuleType, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    own = environment.PYTHON
    if is_anothers:
        other = own.with_name("other")
        other.write_text(own.read_text())
        other.chmod(0o755)
        monkeypatch.setattr(environment, "PYTHON", other)
    environment.install([], [environment.NO_PIP])
    monkeypatch.setattr(environment, "PYTHON", own)
    assert ("-m venv --clear " in calls(environment)[0]) == is_anothers
    assert (f"{own.with_name('other')} has made it, another Python than " in capfd.readouterr().err) == is_anothers


def test_an_extra_that_names_others_lacks_what_they_lack(
    environment: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pyproject.toml").write_text("""
[project]
name = "mine"
dependencies = ["pip"]
optional-dependencies = {inner = ["nobodys>=1"], outer = ["mine[inner]", "pip<1"], other = ["others"]}
""")
    monkeypatch.setattr(environment, "ROOT", tmp_path)
    outer = environment.missing(Path(PYTHON), ["outer"])
    assert [line.partition(" ")[0] for line in outer] == ["pip<1", "nobodys>=1"]
    assert environment.missing(Path(PYTHON), []) == []
