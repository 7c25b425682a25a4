"""What lies in another user's folder is not said to be absent, whichever command is to read it."""

import os
import re
from pathlib import Path

import pytest

from tests.support.run_folder import make_run
from titanlite.commands import main

DEBUG = str(Path(__file__).parents[3] / "configs" / "debug.toml")
COMMANDS = {
    "compare": "compare theirs/run",
    "compare, a run that is shown": "compare theirs",
    "explain": "explain theirs/run",
    "explain, a run that is shown": "explain theirs",
    "export": "export theirs/run",
    "evaluate": "evaluate theirs/run",
    "a config": "validate theirs/run/config.toml",
    "a config that is extended": "validate extends.toml",
    "a config to convert": "convert theirs/run/config.toml",
    "a run to branch off": "validate mine.toml --checkpoint.initial_load_path=theirs/run",
    "a source": "data mine.toml --data.source=theirs/run/*.txt",
    "a tokenizer": "prepare mine.toml --data.tokenizer=theirs/run/tokenizer.json",
    "a task": "validate mine.toml --evaluation.tasks=theirs/run/lines.jsonl",
    "rules": "validate mine.toml --optimizer.file=theirs/run/rules.py",
    "a model": "validate mine.toml --model.file=theirs/run/model.py",
    "recipes": "recipes model --job.recipe_dirs=theirs/run",
}


@pytest.fixture(scope="module")
def imported() -> None:
    """What commands import when they are called, which lies in root's folders."""
    for line in COMMANDS.values():
        main(line.replace("theirs", "absent").replace("mine.toml", DEBUG).split())


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.usefixtures("imported")
def test_it_is_not_said_to_be_absent(
    command: str, bound_by_permissions: None, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run(Path("theirs/run"), [5.0])
    Path("mine.toml").write_text('[model]\nflavor = "debug"\n[data]\ncache_dir = "cache"\n[job]\nname = "run"\n')
    Path("extends.toml").write_text('extends = "theirs/run/config.toml"\n')
    os.chmod("theirs", 0)
    code = main(COMMANDS[command].split())
    os.chmod("theirs", 0o700)
    said = capsys.readouterr().err
    assert code == 2
    assert re.search(r"theirs.*\n?.*permission denied", said, re.IGNORECASE), said
    assert "Traceback" not in said
    assert "no such" not in said
