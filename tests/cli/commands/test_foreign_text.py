"""What others wrote (names of files and folders, keys, lines) reaches no terminal as a command, whoever prints it."""

import json
import sys
import unicodedata
from collections.abc import Callable
from pathlib import Path

import pytest

import titanlite.train
from tests.support.profiles import rank_profile
from tests.support.run_folder import make_run
from titanlite.commands import main
from titanlite.exit_code import exit_code
from titanlite.observe.step_profile import MATMUL

DEBUG = str(Path(__file__).parents[3] / "configs" / "debug.toml")
# A title for the window, a bell, colours by ESC and C1, text from right to left, a return, a backspace; and a formula.
HOSTILE = "a\x1b]0;t\x07\x1b[31m\x9b32m\u202eb\r\x08\u2066c$x^$"
TOML = json.dumps(HOSTILE)


def controls(text: str) -> list[str]:
    """What of a text a terminal obeys, other than newlines and tabs."""
    return [c for c in text if unicodedata.category(c) in ("Cc", "Cf", "Cs") and c not in "\n\t"]


def config(folder: Path, text: str = "") -> list[str]:
    """A config of that name that extends the small one."""
    file = folder / f"{HOSTILE}.toml"
    file.write_text(f'extends = "{DEBUG}"\n{text}')
    return [str(file), f"--data.cache_dir={folder}/cache", f"--job.dump_folder={folder}"]


def corpus(folder: Path, last: bytes = b"") -> str:
    (folder / f"{HOSTILE}.jsonl").write_bytes(b'{"text": "%s"}\n' % (b"a word " * 9000) + last)
    return f"--data.source={folder}/*.jsonl"


def tasks(folder: Path) -> str:
    file = folder / "task.jsonl"
    file.write_text(f"{HOSTILE}\n")
    return f"--evaluation.tasks={file}"


def recipe(folder: Path) -> list[str]:
    (folder / "optimizer").mkdir()
    text = f'help = ""\n[groups.{TOML}]\nrule = "adamw"\nparams = ["*"]\n'
    (folder / "optimizer" / "mine.toml").write_text(text)
    return ["recipes", "optimizer", "mine", "--job.recipe_dirs", str(folder)]


def run(folder: Path) -> str:
    receipt = [{"feature": HOSTILE, "requested": HOSTILE, "applied": HOSTILE, "skipped": []}]
    made = make_run(folder / HOSTILE, [5.0, 4.0], state=HOSTILE, receipt=receipt)
    (Path(made) / "profile").mkdir()
    (Path(made) / "profile/rank0.json").write_text(rank_profile({MATMUL: [(0.0, 20.0)]}).to_json())
    return made


def two_runs(folder: Path) -> list[str]:
    (folder / "b").mkdir()
    return [run(folder), run(folder / "b"), "--out", f"{folder}/{HOSTILE}.png", "--report", f"{folder}/r.html"]


# By what is planted: the command line, and what is to be seen of it.
PLANTED: dict[str, tuple[Callable[[Path], list[str]], str]] = {
    "a source's file, of validate": (lambda f: ["validate", *config(f), corpus(f)], "c$x^$"),
    "a source's file, of data": (lambda f: ["data", *config(f), corpus(f), "--training.steps=1"], "*.jsonl"),
    "a source's file that is no JSON": (lambda f: ["prepare", *config(f), corpus(f, b"{\n")], "jsonl:2"),
    "a source's file that is skipped": (lambda f: ["prepare", *config(f), corpus(f)], "tokens"),
    "a line of a task": (lambda f: ["validate", *config(f), tasks(f)], "question = "),
    "a key": (lambda f: ["validate", *config(f, f"[training]\n{TOML} = 1\n")], "training.a"),
    "a value": (lambda f: ["validate", *config(f, f"[model]\nflavor = {TOML}\n")], "line 3  model.flavor"),
    "a key, of a start": (lambda f: ["train.py", "--config", *config(f, f"[training]\n{TOML} = 1\n")], "training.a"),
    "a group of a recipe": (recipe, "groups.a"),
    "runs": (lambda f: ["compare", *two_runs(f)], "equal bits"),
    "a run that is not there": (lambda f: ["compare", f"{f}/{HOSTILE}"], "no such folder"),
    "a run with a profile": (lambda f: ["explain", run(f)], "matmul"),
    "a folder to explain": (lambda f: ["explain", f"{f}/{HOSTILE}"], "no such folder"),
    "a folder to export": (lambda f: ["export", f"{f}/{HOSTILE}"], "want: a run's folder"),
    "a folder to evaluate": (lambda f: ["evaluate", f"{f}/{HOSTILE}"], "TARGET"),
    "a file to convert": (lambda f: ["convert", config(f, f"[training]\n{TOML} = 1\n")[0]], "1 problem"),
    "a command": (lambda f: [HOSTILE], "titanlite --help"),
    "a shell": (lambda f: ["--tyro-print-completion", HOSTILE], "bash or zsh"),
    "a schema's file": (lambda f: ["schema", "--out", f"{f}/{HOSTILE}"], "c$x^$"),
}


@pytest.mark.parametrize("planted", PLANTED)
def test_no_terminal_obeys_what_others_wrote(
    planted: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make, seen = PLANTED[planted]
    argv = make(tmp_path)
    monkeypatch.setattr(sys, "argv", argv)
    code = exit_code(titanlite.train.main) if argv[0] == "train.py" else main(argv)
    said = "".join(capsys.readouterr())
    assert code in (0, 2), said
    assert "Traceback" not in said
    assert controls(said) == []
    assert seen in said
