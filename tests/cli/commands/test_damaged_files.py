"""What a command reads from the folder of a run, or of a model, is checked like any input: one message, and no waiting.

Each file is replaced by what cannot be read, by other JSON, and by itself with a value of another type at each key.
"""

import contextlib
import json
import math
import os
import re
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import matplotlib.figure
import pytest
import tomli
import tomli_w
from safetensors.torch import load_file, save_file

import titanlite.commands.evaluate
from tests.support.profiles import rank_profile
from tests.support.questions import write_questions
from titanlite.checkpoint.branch import remember_branch
from titanlite.commands import main
from titanlite.errors import ConfigError
from titanlite.observe.experts_file import ExpertsFile
from titanlite.observe.step_profile import COMMUNICATION, MATMUL, PeakMemory

WAITED_S = 60.0
FLAGS = ("--training.seq_len=128", "--training.steps=2", "--checkpoint.interval=2")


@pytest.fixture(scope="module")
def folder(shared_path: Path) -> Path:
    """A folder of a run that has ended, another that is to branch off it, its model as exported, and a task."""
    from tests.support.launched import Desk  # slow to import

    desk = Desk(shared_path)
    run = desk.run("run", 1, *FLAGS, "--validation.enable=false").folder
    branch, profile = run.with_name("branch"), run / "profile"
    for made in (branch, profile):
        made.mkdir()
    remember_branch(str(run), branch, 2)
    spans = {MATMUL: [(0.0, 50.0)], f"{COMMUNICATION} dp_shard": [(50.0, 70.0)]}
    more: dict[str, Any] = {"groups": {"dp_shard": [0, 1]}, "memory": PeakMemory({"weights": 10}, 20, 30)}
    for rank in range(2):
        text = rank_profile(spans, rank=rank, world=2, forecast={"weights": 9}, **more).to_json()
        (profile / f"rank{rank}.json").write_text(text)
    experts = ExpertsFile(run / "experts.jsonl", 0, 2)
    for step in (1, 2):
        experts.experts(step, 512 * step, {"layers.0.experts": [3, 1], "layers.1.experts": [2, 2]})
    experts.close()
    shutil.copytree(run, desk.folder / "other", ignore=shutil.ignore_patterns("checkpoints"))
    shutil.copy(run / "config.toml", desk.folder / "mine.toml")
    write_questions(desk.folder / "lines.jsonl", 2)
    assert main(["export", str(run), "--out", str(desk.folder / "model"), "--dtype", "float32"]) == 0
    return desk.folder


COMMANDS = {
    "compare": "compare {run} {f}/other --out {f}/c.png",
    "report": "compare {run} --report {f}/r.html --out {f}/c.png",
    "explain": "explain {run} --out {f}/e.png",
    "evaluate": "evaluate {run} --tasks {f}/lines.jsonl",
    "export": "export {run} --out {f}/exported",
    "validate": "validate {f}/mine.toml",
    "data": "data {f}/mine.toml",
    "branch": "validate {f}/mine.toml --job.name=branch --checkpoint.initial_load_path={run} --training.steps=4",
    "evaluate model": "evaluate {f}/model --tasks {f}/lines.jsonl",
    "model": "validate {f}/mine.toml --job.name=new --checkpoint.initial_load_path={f}/model --model.flavor=debug",
}
READ = {
    "runs/run/config.toml": ("compare", "explain", "evaluate", "validate"),
    "runs/run/metrics.jsonl": ("compare", "explain"),
    "runs/run/experts.jsonl": ("compare",),
    "runs/run/receipt.json": ("report", "explain"),
    "runs/run/status.json": ("report", "validate", "branch"),
    "runs/run/lock": ("validate",),
    "runs/run/profile/rank0.json": ("explain",),
    "runs/run/profile/rank1.json": ("explain",),
    "runs/run/checkpoints/step-00000002/MANIFEST.json": ("evaluate", "export", "validate", "branch"),
    "runs/run/checkpoints/step-00000002/state.json": ("evaluate", "export", "validate", "data", "branch"),
    "runs/run/checkpoints/step-00000002/rank00000-0.safetensors": ("evaluate", "export", "validate"),
    "runs/branch/branch.json": ("branch",),
    "model/config.json": ("evaluate model", "model"),
    "model/model.safetensors": ("evaluate model", "model"),
    "model/model.safetensors.index.json": ("evaluate model", "model"),
    "model/tokenizer.json": ("evaluate model",),
    "model/tokenizer_config.json": ("evaluate model",),
}
COMPUTED_WITH = {"training": ("steps",), "job": ("stop_after",), "metrics": ("log_freq",), "optimizer": ("recipe",)}
DAMAGE: dict[str, Callable[[Path], object]] = {
    "a pipe": os.mkfifo,
    "a folder": Path.mkdir,
    "empty": Path.touch,
    "broken": lambda path: path.write_text('{"state": '),
    "another type": lambda path: path.write_text("[[5]]\n"),
    "NaN": lambda path: path.write_text("NaN\n"),
}


def other_values(value: Any, other: Any = ({"x": []},)) -> Iterator[Any]:
    """The value with each that stands in it, of lists the first, replaced by one of another type."""
    if isinstance(value, dict):
        for key, each in value.items():
            yield from ({**value, key: one} for one in [[*other], *other_values(each)])
    elif isinstance(value, list) and value:
        yield from ([one, *value[1:]] for one in [5, "x", *other_values(value[0])])


@contextlib.contextmanager
def nobody_waits(pipe: Path) -> Iterator[None]:
    """Fail if somebody waits for what a pipe has to say, which then has an end."""
    waits: list[int] = []

    def end_wait(number: int, _: object) -> None:
        waits.append(number)
        with contextlib.suppress(OSError):
            os.close(os.open(pipe, os.O_WRONLY | os.O_NONBLOCK))

    before = signal.signal(signal.SIGALRM, end_wait)
    signal.setitimer(signal.ITIMER_REAL, WAITED_S, 1.0)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)
    assert not waits


@pytest.fixture
def until_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """What takes time once all is read: pictures, and a model's answers."""

    def no_answers(*_: object) -> None:
        raise ConfigError("all is read")

    monkeypatch.setattr(matplotlib.figure.Figure, "savefig", lambda *_: None)
    monkeypatch.setattr(titanlite.commands.evaluate, "_score_tasks", no_answers)


@pytest.mark.usefixtures("until_it_is_read")
def test_what_is_whole_is_read(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command, line in COMMANDS.items():
        code = main(line.format(f=folder, run=folder / "runs/run").split())
        said = re.sub(r".* …\n", "", capsys.readouterr().err)
        assert (code, said) == ((2, "all is read\n") if command.startswith("evaluate") else (0, "")), command
    shutil.rmtree(folder / "exported")


def test_weights_that_are_not_finite_answer_nothing(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = shutil.copytree(folder / "model", tmp_path / "model")
    weights = load_file(model / "model.safetensors")
    weights["model.norm.weight"][3] = math.nan
    save_file(weights, model / "model.safetensors")
    assert main(["evaluate", str(model), "--tasks", str(folder / "lines.jsonl")]) == 2
    assert "lines = a log-likelihood that is not finite" in capsys.readouterr().err
    assert not (model / "evaluation.json").exists()


@pytest.mark.parametrize("name", READ)
@pytest.mark.usefixtures("until_it_is_read")
def test_a_damaged_file_is_said_in_one_message(name: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = folder / name
    original = path.read_bytes() if path.exists() else None
    damage = dict(DAMAGE)
    if name.endswith("config.toml"):
        damage["what no config has"] = lambda path: path.write_text("[a]\nb = [1, {c = 2}]\nd = 2026-01-01\n")
        config = tomli.loads((original or b"").decode())
        for table, keys in COMPUTED_WITH.items():
            for value in other_values({key: config[table][key] for key in keys}):
                text = tomli_w.dumps({**config, table: {**config[table], **value}})
                damage[f"{table} {value}"] = lambda path, text=text: path.write_text(text)
        text = "[training]\nsteps = 9\n[job]\nstop_after = 5\n[metrics]\nlog_freq = 0\n"
        damage["every zeroth step"] = lambda path: path.write_text(text)
    if name.endswith("index.json"):
        (folder / "model/model.safetensors").rename(folder / "model/one.safetensors")
        original = b'{"metadata": {}, "weight_map": {"model.norm.weight": "one.safetensors"}}'
        for file in ("../model.safetensors", "/etc/passwd", "lines.jsonl", 5, None):
            text = json.dumps({"weight_map": {"model.norm.weight": file}})
            damage[f"names {file}"] = lambda path, text=text: path.write_text(text)
    if name.endswith(("receipt.json", "status.json", "branch.json", "rank0.json", "model/config.json", "index.json")):
        whole = json.loads(original or b"{}")
        if name.endswith("receipt.json"):
            whole.sort(key=lambda entry: entry["feature"] != "optimizer")  # whose entry is read
        for n, value in enumerate(other_values(whole)):
            damage[f"value {n}: {json.dumps(value)[:200]}"] = lambda path, value=value: path.write_text(
                json.dumps(value)
            )
    if name.endswith(".jsonl"):
        first, *rest = (original or b"").decode().splitlines()
        for n, value in enumerate(other_values(json.loads(first))):
            text = "\n".join([json.dumps(value), *rest, ""])
            damage[f"row {n}: {text[:200]}"] = lambda path, text=text: path.write_text(text)
        damage["another order"] = lambda path: path.write_text("\n".join([*rest, first, ""]))
        damage["a layer less"] = lambda path: path.write_text(
            "\n".join([first.replace("layers.1", "layers.2"), *rest, ""])
        )
    try:
        for what, plant in damage.items():
            if path.exists():
                path.unlink()
            plant(path)
            for command in READ[name]:
                with nobody_waits(path) if what == "a pipe" else contextlib.nullcontext():
                    code = main(COMMANDS[command].format(f=folder, run=folder / "runs/run").split())
                said = capsys.readouterr().err
                assert code in (0, 2) or (code, said) == (1, ""), f"{command}, {what}:\n{said}"  # they differ
            path.rmdir() if path.is_dir() else path.unlink()
    finally:
        shutil.rmtree(folder / "exported", ignore_errors=True)
        if path.is_dir():
            path.rmdir()
        if name.endswith("index.json"):
            path.unlink(missing_ok=True)
            (folder / "model/one.safetensors").rename(folder / "model/model.safetensors")
        elif original is not None:
            path.write_bytes(original)
