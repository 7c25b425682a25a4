"""Carry out what `tests/data/refusals.toml` and `tests/data/messages.txt` record: a command line beside a few files."""

import contextlib
import importlib
import io
import os
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.support.forks import LAUNCHER_VARIABLES
from titanlite.commands import module_of
from titanlite.errors import Problem, TitanliteError

FILE = Path(__file__).parents[1] / "data" / "refusals.toml"
CONFIG = "run.toml"  # the file that an entry's `config` is
ARGV = f"validate {CONFIG}"  # what is carried out, unless an entry has another


@contextlib.contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Stand in a new folder, which is the home as well, with no launcher, no network, no GPU and nobody logged in."""
    with pytest.MonkeyPatch.context() as patch:
        for name in (*LAUNCHER_VARIABLES, "WANDB_API_KEY", "NETRC", "COLUMNS"):
            patch.delenv(name, raising=False)
        for name, value in {"HOME": str(folder), "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}.items():
            patch.setenv(name, value)
        patch.setattr(os, "execv", lambda *_: pytest.fail("started"))
        folder.mkdir(parents=True)
        patch.chdir(folder)
        yield


def write_files(files: Mapping[str, str], folder: Path) -> None:
    """Write texts; a name that ends in a slash is an empty folder."""
    for name, text in files.items():
        path = folder / name
        (path if name.endswith("/") else path.parent).mkdir(parents=True, exist_ok=True)
        if not name.endswith("/"):
            path.write_text(text, encoding="utf-8")


def input_of(entry: Mapping[str, Any]) -> tuple[str, dict[str, str]]:
    """Return the command line of an entry of the file, and its files."""
    argv = entry.get("argv", ARGV)
    config = {CONFIG: entry.get("config", "")} if CONFIG in argv else {}
    return argv, {**config, **entry.get("files", {})}


def problems_of(argv: str, files: Mapping[str, str], folder: Path) -> list[Problem]:
    """Carry `titanlite ARGV` out in a new folder with these files, and return the problems that it ends with."""
    with alone(folder):
        write_files(files, folder)
        command, *words = shlex.split(argv)
        run = importlib.import_module(f"titanlite.commands.{module_of(command)}").run
        quiet = io.StringIO()
        try:
            with contextlib.redirect_stdout(quiet), contextlib.redirect_stderr(quiet):
                run(words)
        except TitanliteError as error:
            found = [problem for report in error.args for problem in getattr(report, "problems", ())]
            return [problem._replace(where=problem.where.replace(f"{folder}/", "")) for problem in found]
        except SystemExit:
            pass
    return []
