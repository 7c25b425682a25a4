"""`titanlite evaluate`: of a run, a checkpoint and a folder, and what it answers is what lm-eval answers."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import titanlite.checkpoint.store
from tests.support.questions import write_questions
from tests.unit.data.test_tokenizer import make_tokenizer
from titanlite.commands import main
from titanlite.config.read import read_config
from titanlite.config.schema import Evaluation
from titanlite.config.write import to_toml

if TYPE_CHECKING:
    from tests.cli.commands.conftest import Call
    from tests.support.launched import Desk, Ended

FLAGS = ("--training.seq_len=128", "--training.steps=6", "--training.local_batch_size=4")


@pytest.fixture(scope="module")
def task(desk: "Desk") -> Path:
    return write_questions(desk.folder / "lines.jsonl", 30)


@pytest.fixture(scope="module")
def trained(desk: "Desk", task: Path) -> "Ended":
    flags = (*FLAGS, f"--evaluation.tasks={task}", "--checkpoint.interval=3", "--optimizer.ema_decay=0.5")
    return desk.run("trained", 1, *flags)


def answers(file: Path, task: str = "lines") -> dict[str, Any]:
    return json.loads(file.read_text())["tasks"][task]


def test_a_run_is_evaluated_as_it_evaluates_itself(trained: "Ended", call: "Call") -> None:
    out = call("evaluate", str(trained.folder))
    found = answers(trained.folder / "evaluation.json")
    (row,) = (row for row in trained.rows if "evaluation_seconds" in row)
    assert found["accuracy"] == row["accuracy.lines"]
    assert found["accuracy_norm"] == row["accuracy_norm.lines"]
    assert found["questions"] == len(found["choices"]) == len(found["log_likelihoods"]) == 30
    assert found["accuracy_standard_error"] == pytest.approx(
        (row["accuracy.lines"] * (1 - row["accuracy.lines"]) / 29) ** 0.5
    )
    heading, line, *_, written = out.splitlines()
    assert heading.split() == ["task", "questions", "accuracy", "by", "bytes"]
    assert line.split()[:3] == ["lines", "30", f"{row['accuracy.lines']:.2%}"]
    assert written == str(trained.folder / "evaluation.json")


def test_an_older_checkpoint_by_its_folder_or_step(trained: "Ended", call: "Call", tmp_path: Path) -> None:
    folder, by_folder, by_step = trained.folder, tmp_path / "a.json", tmp_path / "b.json"
    call("evaluate", str(folder / "checkpoints/step-00000003"), "--out", str(by_folder))
    call("evaluate", str(folder), "--step", "3", "--out", str(by_step))
    call("evaluate", str(folder), "--out", str(tmp_path / "newest.json"))
    assert answers(by_folder) == answers(by_step)
    assert answers(by_folder)["log_likelihoods"] != answers(tmp_path / "newest.json")["log_likelihoods"]
    assert json.loads(by_step.read_text())["model"].endswith("checkpoints/step-00000003")


def test_the_average_of_weights_answers_as_its_export(
    trained: "Ended", task: Path, call: "Call", tmp_path: Path
) -> None:
    call("export", str(trained.folder), "--ema", "--dtype", "float32", "--out", str(tmp_path / "averaged"))
    call("evaluate", str(tmp_path / "averaged"), "--tasks", str(task))
    call("evaluate", str(trained.folder), "--ema")
    call("evaluate", str(trained.folder), "--out", str(tmp_path / "model.json"))
    files = tmp_path / "averaged/evaluation.json", trained.folder / "evaluation-ema.json", tmp_path / "model.json"
    of_export, of_run, of_model = ([x for of in answers(file)["log_likelihoods"] for x in of] for file in files)
    assert of_run == pytest.approx(of_export, rel=1e-4)
    assert of_run != pytest.approx(of_model, rel=1e-4)
    said = call("evaluate", str(tmp_path / "averaged"), "--tasks", str(task), "--ema", ends=2)
    assert "a folder of weights has no second ones" in said


def test_an_exported_folder_answers_as_its_run(trained: "Ended", task: Path, call: "Call", tmp_path: Path) -> None:
    """In batches of another shape: equal but for rounding, as in tests/ranks/evaluation/test_score.py."""
    folder, ours = trained.folder / "hugging_face/step-00000006", tmp_path / "run.json"  # named as a checkpoint is
    call("export", str(trained.folder))
    call("evaluate", str(folder), "--tasks", f"lines={task}")
    call("evaluate", str(trained.folder), "--out", str(ours))
    one, other = answers(folder / "evaluation.json"), answers(ours)
    assert one["choices"] == other["choices"]
    assert one["choices_norm"] == other["choices_norm"]
    flat = [[x for question in found["log_likelihoods"] for x in question] for found in (one, other)]
    assert flat[0] == pytest.approx(flat[1], abs=60 * 4 * 2.0**-22)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("{run}", "--tasks", "nothing.jsonl"), 'evaluation.tasks = "nothing.jsonl"'),
        (("{run}", "--step", "4"), "titanlite evaluate: 1 problem\n  --step = 4\n      want: one of 3, 6"),
        (("{run}/checkpoints/step-00000003", "--step", "3"), "fix:  leave it out"),
        (("{run}/logs",), "which has no config.json"),
        (("{run}", "--tokenizer", "{run}/other.json"), "want: the tokenizer that the run was trained with"),
    ],
)
def test_what_cannot_be_evaluated_is_said(trained: "Ended", call: "Call", words: tuple[str, ...], message: str) -> None:
    assert message in call("evaluate", *(word.format(run=trained.folder) for word in words), ends=2)


def test_an_interrupt_while_it_reads(trained: "Ended", monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(titanlite.checkpoint.store._Reader, "read_data", interrupted)
    assert main(["evaluate", str(trained.folder)]) == 130


def test_a_run_without_tasks_needs_some(trained: "Ended", call: "Call", tmp_path: Path) -> None:
    run = shutil.copytree(trained.folder, tmp_path / "run")
    config = read_config(run / "config.toml")[0]
    (run / "config.toml").write_text(to_toml(replace(config, evaluation=Evaluation())))
    assert "want: tasks: the config of what is evaluated names none" in call("evaluate", str(run), ends=2)


@pytest.mark.slow
def test_two_processes_answer_bit_for_bit_as_one(trained: "Ended", call: "Call", tmp_path: Path) -> None:
    from tests.support.launched import REPOSITORY

    one, two = tmp_path / "one.json", tmp_path / "two.json"
    call("evaluate", str(trained.folder), "--out", str(one))
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = [*launcher, "-m", "titanlite", "evaluate", str(trained.folder), "--out", str(two)]
    subprocess.run(command, check=True, cwd=REPOSITORY, env={**os.environ, "PYTHONPATH": str(REPOSITORY)})
    assert answers(one) == answers(two)


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # of lm-eval and what it imports
@pytest.mark.parametrize("tokenizer", ["bytes", "file", "file with bos"])
def test_answers_are_those_of_lm_eval(desk: "Desk", call: "Call", tokenizer: str, tmp_path: Path) -> None:
    lm_eval = pytest.importorskip("lm_eval")
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    file, flags = write_questions(tmp_path / "lines.jsonl"), list(FLAGS)
    if tokenizer != "bytes":
        path = make_tokenizer(tmp_path / "tokenizer.json", ("<|endoftext|>", "<s>"))
        flags += [f"--data.tokenizer={path}", "--model.vocab_size=384"]
        flags += ["--data.add_bos_token=true"] * (tokenizer == "file with bos")
    run = desk.run(f"lm-eval {tokenizer}", 1, *flags)
    folder = tmp_path / "exported"
    call("export", str(run.folder), "--out", str(folder))
    call("evaluate", str(folder), "--tasks", str(file))
    ours = answers(folder / "evaluation.json")
    (tmp_path / "task").mkdir()
    about = {
        "task": "lines",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(file)}},
        "output_type": "multiple_choice",
        "test_split": "test",
        "doc_to_text": "{{query}}",
        "doc_to_target": "{{gold}}",
        "doc_to_choice": "{{choices}}",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_bytes"}],
    }
    (tmp_path / "task/lines.yaml").write_text(json.dumps(about))  # which is YAML, too
    model = HFLM(pretrained=str(folder), device="cpu", dtype="float32", batch_size=8)
    tasks = TaskManager(include_path=str(tmp_path / "task"))
    theirs = lm_eval.simple_evaluate(
        model=model, tasks=["lines"], task_manager=tasks, log_samples=True, bootstrap_iters=0
    )
    assert theirs["results"]["lines"]["acc,none"] == ours["accuracy"]
    assert theirs["results"]["lines"]["acc_bytes,none"] == ours["accuracy_norm"]
    samples = sorted(theirs["samples"]["lines"], key=lambda sample: sample["doc_id"])
    found = [[float(answer[0]) for answer in sample["filtered_resps"]] for sample in samples]
    assert len(found) == 200
    assert [max(range(4), key=each.__getitem__) for each in found] == ours["choices"]
    for one, other in zip(found, ours["log_likelihoods"], strict=True):
        assert one == pytest.approx(other, abs=1e-3)
