"""Tasks: what a file may say, what the hub's rows become, and every mistake by its line."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from titanlite.errors import DataError
from titanlite.evaluation import tasks
from titanlite.evaluation.tasks import HUB, Question, load_tasks

GOOD = {"query": "1 + 1 =", "choices": ["2", "3"], "gold": 0}


def write(path: Path, *rows: object) -> str:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(path)


def message(*given: str) -> str:
    with pytest.raises(DataError) as caught:
        load_tasks(given, with_hub=False)
    return str(caught.value)


def test_a_file_is_a_task(tmp_path: Path) -> None:
    other = {"context": "", "choices": ["ä", "b", "c"], "gold": 2, "id": 7}
    file = write(tmp_path / "my sums.v1.jsonl", GOOD, "", other)
    load_tasks([file], with_hub=False)
    plain, named = load_tasks([file, f"sums={file}"])
    assert plain.name == "my-sums-v1"
    assert named.name == "sums"
    assert plain.questions == (Question("1 + 1 =", ("2", "3"), 0), Question("", ("ä", "b", "c"), 2))
    assert plain.fingerprint == named.fingerprint
    assert load_tasks([write(tmp_path / "other.jsonl", GOOD)])[0].fingerprint != plain.fingerprint


@pytest.mark.parametrize(
    ("row", "want"),
    [
        ("no JSON", "want: an object such as"),
        ([1], "want: an object such as"),
        (GOOD | {"query": 1}, "want: a text as query, or context,"),
        (GOOD | {"choices": ["a"]}, "want: two texts or more, none of them empty,"),
        (GOOD | {"choices": ["a", ""]}, "want: two texts or more, none of them empty,"),
        (GOOD | {"gold": 2}, "want: the place of the right choice, 0 to 1,"),
        (GOOD | {"gold": "0"}, "want: the place of the right choice, 0 to 1,"),
        (GOOD | {"gold": True}, "want: the place of the right choice, 0 to 1,"),
    ],
)
def test_a_line_that_is_no_question_is_named(row: object, want: str, tmp_path: Path) -> None:
    said = message(write(tmp_path / "t.jsonl", GOOD, row, GOOD))
    assert f"{tmp_path}/t.jsonl: 1 problem\n  line 2  question" in said
    assert want in said


def test_all_that_is_wrong_is_said_at_once(tmp_path: Path) -> None:
    empty, twice = write(tmp_path / "empty.jsonl"), write(tmp_path / "twice.jsonl", GOOD)
    said = message("helaswag", empty, twice, f"twice={twice}", str(tmp_path / "not there.jsonl"))
    assert "fix:  did you mean hellaswag?" in said
    assert "want: at least one question" in said
    assert "want: one task of the name twice" in said
    assert 'not there.jsonl"\n' in said


def test_rows_of_the_hub_are_put_as_lm_eval_puts_them() -> None:
    hellaswag = {
        "activity_label": "Clean sink",
        "ctx_a": "[header] How to clean [title] Start.",
        "ctx_b": "the man",
        "endings": ["[substeps] rinses  it.", " sits [x]down."],
        "label": "1",
    }
    found = HUB["hellaswag"].question(hellaswag)
    assert found == Question("Clean sink: How to clean. Start. The man", (" rinses it.", "sits down."), 1)
    arc = {"question": "Why?", "choices": {"text": ["x", "y"], "label": ["A", "B"]}, "answerKey": "B"}
    assert HUB["arc_easy"].question(arc) == Question("Question: Why?\nAnswer:", ("x", "y"), 1)
    piqa = {"goal": "To do", "sol1": "so", "sol2": "or so", "label": 0}
    assert HUB["piqa"].question(piqa) == Question("Question: To do\nAnswer:", ("so", "or so"), 0)


def test_datasets_are_read_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a local folder in the place of the hub's, in the splits that it has."""
    rows = [{"goal": f"goal {n}", "sol1": "a", "sol2": "b", "label": n % 2} for n in range(3)]
    write(tmp_path / "validation.jsonl", *rows)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setitem(HUB, "piqa", HUB["piqa"]._replace(path=str(tmp_path)))
    (task,) = load_tasks(["piqa"])
    assert [q.gold for q in task.questions] == [0, 1, 0]
    assert task.questions[2].context == "Question: goal 2\nAnswer:"


def test_a_dataset_that_is_not_there_is_said_with_the_way_to_get_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import datasets

    def offline(*_: Any, **__: Any) -> None:
        assert capsys.readouterr().err.startswith("looking for Rowan/hellaswag on the hub, ")  # before the retries
        retries.warning("Retrying in 1s [Retry 1/5].")  # by huggingface_hub, before it gives up
        raise ConnectionError("no network")

    retries, told = logging.getLogger("huggingface_hub.utils._http"), list[logging.LogRecord]()
    handler = logging.Handler()
    monkeypatch.setattr(handler, "emit", told.append)
    monkeypatch.setattr(logging.getLogger("huggingface_hub"), "handlers", [handler])
    monkeypatch.setattr(datasets, "load_dataset", offline)
    load_tasks(["hellaswag"], with_hub=False)  # without a look at the hub
    with pytest.raises(DataError) as caught:
        load_tasks(["hellaswag"])
    assert 'evaluation.tasks = "hellaswag"' in str(caught.value)
    assert "(no network)" in str(caught.value)
    assert "fix:  hf download --repo-type dataset Rowan/hellaswag" in str(caught.value)
    assert not told
    retries.warning("of another command")
    assert len(told) == 1
    assert tasks.HUB["arc_easy"].config == "ARC-Easy"
