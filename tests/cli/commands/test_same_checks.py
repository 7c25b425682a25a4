"""What one command refuses or warns of is refused or told by each other that it concerns, before its work begins."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

import titanlite.train
import titanlite.training.train
from tests.cli.commands.conftest import Call
from tests.support.run_folder import make_run, saved_run
from titanlite.commands import main
from titanlite.exit_code import exit_code

SMALL = """
[model]
flavor = "debug"
[data]
source = "text.jsonl"
cache_dir = "cache"
max_bad_records = 2
[training]
steps = 10
seq_len = 128
global_batch_size = 2
[lr_scheduler]
warmup_steps = 2
[checkpoint]
interval = 4
"""


@pytest.fixture
def _small_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """run.toml and its text."""
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE", "WANDB_API_KEY", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    Path("run.toml").write_text(SMALL)
    Path("text.jsonl").write_text("\n".join(json.dumps({"text": f"once upon a time {n} " * 20}) for n in range(100)))


def start(words: list[str], monkeypatch: pytest.MonkeyPatch) -> int:
    """`python train.py` up to where it would train, which prints the warnings that it would begin with."""
    told = lambda run, folder, notices, warnings, launcher, is_verbose: print("\n".join([*notices, *warnings]))  # noqa: E731
    monkeypatch.setattr(titanlite.training.train, "train", told)
    monkeypatch.setattr("sys.argv", ["train.py", *words])
    return exit_code(titanlite.train.main)


BAD = '\n{"text": 7}\n{"no": "text"}\n'
LATE = "[[data.stage]]\nfrom_tokens = 10_000_000\nlr_decay_to = 0.1\n"


@pytest.mark.usefixtures("_small_run")
@pytest.mark.parametrize(
    ("more", "text", "flags", "named"),
    [
        ("", "", ["--training.steps=800"], 'data.source = "text.jsonl": 5.'),
        ("", "", ["--metrics.wandb=online"], 'metrics.wandb = "online"'),
        ("", BAD, [], "data.source = text.jsonl: 2 bad records skipped"),
        (LATE, "", [], "data.stage[0].lr_decay_to = 0.1"),
    ],
    ids=["epochs", "login", "bad records", "decay"],
)
def test_what_a_run_would_end_with_is_told_before_its_first_step(
    more: str,
    text: str,
    flags: list[str],
    named: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    Path("run.toml").write_text(SMALL + more)
    with Path("text.jsonl").open("a") as file:
        file.write(text)
    assert main(["validate", "run.toml", *flags]) == 0
    out = capsys.readouterr().out
    assert "run.toml: 1 warning\n" in out
    assert f"  warning: {named}" in out
    assert start(["--config", "run.toml", *flags], monkeypatch) == 0
    assert named in capsys.readouterr().out


def in_run(name: str) -> Path:
    """A place in a new folder of the run."""
    Path("outputs/run").mkdir(parents=True)
    return Path("outputs/run") / name


BEFORE: dict[str, Callable[[], object]] = {
    "nothing": lambda: None,
    "another run": lambda: saved_run(["run.toml"], 1, 8),
    "a link for its logs": lambda: in_run("logs").symlink_to("nowhere"),
    "a pipe for its metrics": lambda: os.mkfifo(in_run("metrics.jsonl")),
    "a folder for its status": lambda: in_run("status.json").mkdir(),
    "a link for its lock": lambda: in_run("lock").symlink_to("nowhere"),
}
STARTS = "validate", "train", "train.py"
ALL = (*STARTS, "data", "prepare", "verify-resume")
TABLE: list[tuple[str, tuple[str, ...], str, tuple[str, ...]]] = [
    ("another run", ("--training.seq_len=2048", "--data.packing=best_fit"), "training.seq_len = ", ALL[:-1]),
    ("nothing", ("--job.dump_folder=/proc/titanlite",), "job.dump_folder = ", (*STARTS, "verify-resume")),
    ("nothing", ("--data.cache_dir=/proc/titanlite",), "data.cache_dir = ", ALL),
    ("a link for its logs", (), "outputs/run/logs = ", STARTS),
    ("a pipe for its metrics", (), "a pipe in place of a file: 'outputs/run/metrics.jsonl'", STARTS),
    ("a folder for its status", (), "Is a directory: 'outputs/run/status.json'", STARTS),
    ("a link for its lock", (), "a link in place of a file: 'outputs/run/lock'", STARTS),
    ("another run", ("--checkpoint.resume=4",), "checkpoint.resume = ", STARTS),
]


@pytest.mark.usefixtures("_small_run")
@pytest.mark.parametrize(
    ("command", "before", "flags", "named"),
    [(command, *row[:3]) for row in TABLE for command in row[3]],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_start_that_is_refused_is_refused_by_each_command_before_its_work(
    command: str,
    before: str,
    flags: tuple[str, ...],
    named: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    BEFORE[before]()
    monkeypatch.setattr("os.execv", lambda *_: pytest.fail("started"))
    if command == "train.py":
        monkeypatch.setattr("titanlite.training.assemble.assemble", lambda *_: pytest.fail("began to build"))
        code = start(["--config", "run.toml", *flags], monkeypatch)
    else:
        code = main([command, "run.toml", *flags, *(["--gpus=1"] if command == "train" else [])])
    out, err = capsys.readouterr()
    assert (code, out) == (2, "")
    assert named in err


@pytest.mark.usefixtures("_small_run")
def test_a_plan_in_the_folder_of_another_run_is_of_the_one_that_is_planned(call: Call) -> None:
    saved_run(["run.toml"], 1, 8)
    assert "stages, " not in call("plan", "run.toml", "--world=2", "--training.seq_len=256")


RUN, OUT = "outputs/run", "run.toml/file.png"


@pytest.mark.usefixtures("_small_run")
@pytest.mark.parametrize(
    ("words", "flag"),
    [
        (["compare", RUN, RUN, "--floor", "--out", OUT], "--out"),
        (["compare", RUN, RUN, "--floor", "--report", "run.toml/file.html"], "--report"),
        (["compare", RUN, RUN, "--floor", "--wandb"], "--wandb"),
        (["data", "run.toml", "--sample", "0", "--picture", OUT], "--picture"),
        (["data", "run.toml", "--sample", "20"], "--sample"),
        (["plan", "run.toml", "--world", "2", "--json", "missing/plan.json"], "--json"),
        (["plan", "run.toml", "--world", "2", "--json", "."], "--json"),
        (["evaluate", RUN, "--tasks", "no_such.jsonl", "--out", "missing/answers.json"], "--out"),
        (["evaluate", RUN, "--tasks", "no_such.jsonl", "--out", "/proc/answers.json"], "--out"),
        (["new", "/proc/mine.toml", "--model", "debug", "--data", "text.jsonl"], "FILE"),
        (["schema", "--out", "missing/schema.json"], "--out"),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_what_cannot_be_written_or_shown_is_told_before_what_takes_long(
    words: list[str], flag: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("titanlite.commands.new.machine_here", lambda *_: pytest.fail("began"))
    monkeypatch.setattr("titanlite.commands.planned_run.plan_run", lambda *_: pytest.fail("began"))
    make_run(saved_run(["run.toml"], 1, 8).path, [5.0, 4.0]) if words[0] in ("compare", "evaluate") else None
    assert main(words) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert f"\n  {flag} = " in err
    assert not Path("cache").exists()


@pytest.mark.usefixtures("_small_run")
@pytest.mark.parametrize("command", ["train.py", "train", "evaluate"])
def test_half_of_what_a_launcher_says_is_refused(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "0")
    words = ["--config", "run.toml"]
    code = start(words, monkeypatch) if command == "train.py" else main([command, *words[1:]])
    assert code == 2
    assert "RANK" in capsys.readouterr().err
