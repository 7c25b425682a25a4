"""`titanlite generate`: of a run, a checkpoint and a folder; samples of a run; and `load` in Python."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.cpu import cpu_of_children
from titanlite.generation.model import load_text_model
from titanlite.observe.status import now

if TYPE_CHECKING:
    from tests.cli.commands.conftest import Call
    from tests.support.launched import Desk, Ended

ROOT = Path(__file__).parents[3]
PROMPTS = ["for ", "return x\n    self"]
FLAGS = ("--training.steps=6", "--checkpoint.interval=3", "--validation.freq=3", "--validation.enable=true")


@pytest.fixture(scope="module")
def tied(desk: "Desk") -> "Ended":
    return desk.run(
        "tied", 1, "--training.steps=2", "--model.name=gpt2", "--model.flavor=debug", "--model.n_kv_heads=4"
    )


@pytest.fixture(scope="module")
def trained(desk: "Desk") -> "Ended":
    return desk.run("trained", 1, *FLAGS, f"--validation.samples={json.dumps(PROMPTS)}", "--validation.sample_tokens=9")


def rows(run: "Ended") -> list[dict[str, object]]:
    return [json.loads(line) for line in (run.folder / "samples.jsonl").read_text().splitlines()]


def test_a_run_says_what_its_samples_say(trained: "Ended", call: "Call") -> None:
    """At each validation: on the console, in samples.jsonl; and again by the command, of each checkpoint."""
    found = rows(trained)
    assert [row["step"] for row in found] == [3, 6]
    for row in found:
        for sample in row["samples"]:  # type: ignore[attr-defined]
            given = ("--prompt", sample["prompt"], "--temperature", "0", "--tokens", "9", "--step", str(row["step"]))
            assert call("generate", str(trained.folder), *given) == f"{sample['prompt']}{sample['text']}\n"
    assert trained.output.count("sample  for → ") == 2
    assert f"\ngenerate  titanlite generate {trained.folder} --prompt 'for '\n" in trained.output


def test_samples_after_a_resume_are_those_of_one_run(desk: "Desk", trained: "Ended") -> None:
    flags = (*FLAGS, f"--validation.samples={json.dumps(PROMPTS)}", "--validation.sample_tokens=9")
    desk.run("resumed", 1, *flags, "--job.stop_after=3")
    assert rows(desk.run("resumed", 1, *flags)) == rows(trained)


def test_several_prompts_of_a_file_and_of_an_exported_folder(trained: "Ended", call: "Call", tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("for \n\nclass A(B)")
    given = ("--file", str(tmp_path / "prompts.txt"), "--tokens", "5", "--temperature", "0")
    said = call("generate", str(trained.folder), *given)
    assert said.startswith("for ")
    assert "\n\nclass A(B)" in said
    call("export", str(trained.folder), "--dtype", "float32", "--out", str(tmp_path / "exported"))
    assert call("generate", str(tmp_path / "exported"), *given) == said


def test_tied_embeddings_of_a_run_and_of_its_folder(tied: "Ended", call: "Call", tmp_path: Path) -> None:
    given = ("--prompt", "for ", "--tokens", "5", "--temperature", "0")
    said = call("generate", str(tied.folder), *given)
    call("export", str(tied.folder), "--dtype", "float32", "--out", str(tmp_path / "exported"))
    assert call("generate", str(tmp_path / "exported"), *given) == said
    model = load_text_model(tied.folder)
    assert model.module.output.weight is model.module.tok_embeddings.weight  # type: ignore[union-attr]


def test_equal_seeds_sample_equal_texts(trained: "Ended", call: "Call") -> None:
    of_seed = lambda n: call("generate", str(trained.folder), "--prompt", "if ", "--tokens", "20", "--seed", n)  # noqa: E731
    assert of_seed("1") == of_seed("1") != of_seed("2")


# Ends at the first text on stderr: 0 if torch is not there yet.
FIRST_LINE = """
import os, sys
class Watch:
    flush = isatty = lambda self: None
    def write(self, text):
        os.write(1, text.encode())
        os._exit("torch" in sys.modules)
sys.stderr = Watch()
"""


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("generate", "RUN", "--prompt", "if "), "loading RUN/checkpoints/step-00000006 …"),
        (("export", "RUN"), "exporting RUN/checkpoints/step-00000006 …"),
        (("evaluate", "RUN", "--tasks", "q.jsonl"), "loading q.jsonl, and RUN/checkpoints/step-00000006 …"),
        (("train", "RUN/config.toml", "--gpus", "2"), "starting 2 processes …"),
        ((), "loading torch, assembling the model …"),
    ],
    ids=lambda value: value[0] if value and isinstance(value, tuple) else "",
)
def test_what_takes_seconds_is_said_before(
    words: tuple[str, ...], says: str, trained: "Ended", monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(trained.folder.parent)
    run = "from titanlite.commands import main" if words else "from titanlite.train import main"
    given = [word.replace("RUN", trained.folder.name) for word in words or ("--config", "RUN/config.toml")]
    with cpu_of_children(2.0):
        command = [sys.executable, "-c", f"{FIRST_LINE}{run}\nmain()", *given]
        ended = subprocess.run(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert (ended.stdout, ended.returncode) == (f"{says.replace('RUN', trained.folder.name)}\n", 0)


def test_lines_are_typed_in_a_terminal(trained: "Ended", call: "Call", monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    one = call("generate", str(trained.folder), "--prompt", "for ", "--tokens", "4", "--temperature", "0")
    monkeypatch.setattr(sys, "stdin", Terminal("for \nfor \n"))
    said = call("generate", str(trained.folder), "--tokens", "4", "--temperature", "0")
    assert said == 2 * one.removeprefix("for ")


def test_python_loads_a_run(trained: "Ended") -> None:
    model = load_text_model(trained.folder)
    *_, last = rows(trained)
    texts = [sample["text"] for sample in last["samples"]]  # type: ignore[attr-defined]
    assert model.generate(PROMPTS, 9) == texts
    assert model.generate(PROMPTS[0], 9) == texts[0]
    assert model.generate([], 9) == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "TARGET\n      want: one folder"),
        (("{run}",), "want: a prompt: there is no terminal to type one in"),
        (("{run}/..", "--prompt", "a"), '{run}/..", which is none itself\n'),
        (("{run}/..", "--prompt", "a"), "fix:  one of those in it: {run}"),
        (("{run}/checkpoints", "--prompt", "a"), "{run}/checkpoints/step-00000003, {run}/checkpoints/step-00000006\n"),
        (("{run}/logs", "--prompt", "a"), "which has no config.json"),
        (("{run}", "--prompt", "a", "--file", "b"), "want: either --prompt or --file"),
        (("{run}", "--file", "/nowhere.txt"), "want: a text file with a prompt in each line"),
        (("{run}", "--prompt", "a", "--tokens", "0"), "--tokens = 0"),
        (("{run}", "--prompt", "a", "--temperature", "-1"), "--temperature = -1"),
        (("{run}", "--prompt", "a", "--top-p", "1.5"), "--top-p = 1.5"),
        (("{run}", "--prompt", "a", "--step", "4"), "titanlite generate: 1 problem\n  --step = 4"),
    ],
)
def test_what_cannot_be_done_is_said(trained: "Ended", call: "Call", words: tuple[str, ...], message: str) -> None:
    said = call("generate", *(word.format(run=trained.folder) for word in words), ends=2)
    assert message.format(run=trained.folder) in said


@pytest.mark.parametrize(
    ("changes", "state", "message"),
    [
        ("", "stopped", "fix:  start the run again, or name one that has saved a checkpoint"),
        ("interval = 50", "running", "fix:  wait: the run is still training, and saves its first one after step 50"),
        ("interval = 500", "running", "saves its first one after step 150"),
        ("enable = false", "running", "fix:  train with checkpoint.enable = true: this run saves none"),
    ],
)
@pytest.mark.parametrize("command", ["generate", "export"])
def test_a_run_without_a_checkpoint_is_told_what_to_do(
    call: "Call", tmp_path: Path, command: str, changes: str, state: str, message: str
) -> None:
    config = f"[model]\nflavor = 'debug'\n[training]\nsteps = 150\n[checkpoint]\n{changes}\n"
    (tmp_path / "config.toml").write_text(config)
    status = {"state": state, "step": 7, "pid": 1, "host": "here", "updated": now()}
    (tmp_path / "status.json").write_text(json.dumps(status))
    said = call(command, str(tmp_path), *(("--prompt", "a") if command == "generate" else ()), ends=2)
    assert "  checkpoints = " in said
    assert message in said
