"""Evaluation in a run: when it is due, what it logs, and that training goes on as if it had not been."""

import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.ranks.training.test_stop import at_step, kill
from tests.support.launched import Desk, Ended
from tests.support.questions import write_questions
from titanlite.training import evaluation

FLAGS = ("--training.seq_len=256", "--training.steps=10")


@pytest.fixture(scope="module")
def task(desk: Desk) -> Path:
    return write_questions(desk.folder / "lines.jsonl", 12)


@pytest.fixture(scope="module")
def evaluated(desk: Desk, task: Path) -> Ended:
    return desk.run("evaluated", 1, *FLAGS, f"--evaluation.tasks={task},again={task}", "--evaluation.freq=4")


def evaluations(run: Ended) -> dict[int, dict[str, Any]]:
    return {row["step"]: row for row in run.rows if "evaluation_seconds" in row}


def test_it_is_due_every_freq_steps_and_after_the_last(evaluated: Ended) -> None:
    found = evaluations(evaluated)
    assert list(found) == [4, 8, 10]
    assert [row["step"] for row in evaluated.rows] == [1, 2, 3, 4, 4, 5, 6, 7, 8, 8, 9, 10, 10]
    for row in found.values():
        assert 0 <= row["accuracy.lines"] <= 1
        assert row["accuracy.lines"] == row["accuracy.again"]
        assert row["accuracy_norm.lines"] == row["accuracy_norm.again"]
    said = rf"step  4/10  accuracy lines {found[4]['accuracy.lines']:.2%} \(norm .*%\)  again "
    assert re.search(said, evaluated.output)


def test_what_it_costs_is_said(evaluated: Ended) -> None:
    applied = evaluated.receipt["evaluation.tasks"]["applied"]
    assert applied["questions"] == 24
    assert applied["of_tasks"] == {"lines": 12, "again": 12}
    assert applied["freq"] == 4
    said = re.findall(r"24 questions took (.*) s: (.*)% of the time at evaluation.freq = 4; (.*)\n", evaluated.output)
    ((seconds, share, fix),) = said
    step_s = evaluated.steps[3]["seconds"]
    assert float(share) == pytest.approx(100 * float(seconds) / (float(seconds) + 4 * step_s), rel=0.05)
    assert re.fullmatch(r"evaluation.freq = \d+ makes it 1 %", fix)


def test_training_goes_on_as_if_it_had_not_been(desk: Desk, evaluated: Ended) -> None:
    plain = desk.run("plain", 1, *FLAGS)
    assert plain.trained() == evaluated.trained()
    assert plain.content(10) == evaluated.content(10)


def test_ranks_that_read_other_questions_do_not_start(desk: Desk, task: Path) -> None:
    (desk.folder / "other").mkdir()
    other = write_questions(desk.folder / "other/lines.jsonl", 12, seed=1)

    def plant() -> None:
        if os.environ["RANK"] == "1":
            read = evaluation.load_tasks
            evaluation.load_tasks = lambda tasks: read([str(other)])

    run = desk.run("other questions", 2, *FLAGS, f"--evaluation.tasks={task}", plant=plant, ends=2)
    assert "evaluation.tasks = other questions on rank 1 than on rank 0" in run.output


@pytest.mark.slow
def test_a_stop_postpones_it_to_the_next_start(desk: Desk, task: Path) -> None:
    flags = (*FLAGS, f"--evaluation.tasks={task}", "--evaluation.freq=4")
    assert evaluations(desk.run("stopped", 1, *flags, plant=at_step(3, kill(signal.SIGTERM)))) == {}
    assert list(evaluations(desk.run("stopped", 1, *flags))) == [4, 8, 10]
