"""Read multiple-choice tasks: questions, their choices, and the index of the right choice. Does not import torch.

A task is a .jsonl file, one question a line:

    {"query": "The capital of France is", "choices": ["Rome", "Paris"], "gold": 1}

`context` is another name for `query`. A blank separates query and choice. HellaSwag, ARC and PIQA can be given by name:
they are read from the hub, or from the cache of `datasets`, and brought into this form as lm-eval does.
"""

import hashlib
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from titanlite.config.build import show
from titanlite.durable import require_reachable
from titanlite.errors import DataError, Problem, describe, nearest
from titanlite.extras import missing_packages
from titanlite.hub import without_retries_told
from titanlite.json_file import parse_json
from titanlite.streams import say_first

KEY = "evaluation.tasks"
_NAME = re.compile(r"[A-Za-z0-9_-]+")
_FORM = 'an object such as {"query": "The capital of France is", "choices": ["Rome", "Paris"], "gold": 1}'


class Question(NamedTuple):
    """A question of a task, with its choices."""

    context: str  # may be empty
    choices: tuple[str, ...]  # at least two, none of them empty
    gold: int  # index of the right choice


@dataclass(frozen=True)
class Task:
    """The questions of a task."""

    name: str  # in metrics.jsonl, as `accuracy.<name>`
    source: str  # as the user wrote it
    questions: tuple[Question, ...]  # at least one

    @property
    def fingerprint(self) -> str:
        """Return a hash of all questions, with which ranks check that theirs are the same."""
        return hashlib.blake2b(json.dumps(self.questions).encode(), digest_size=16).hexdigest()


class _HubTask(NamedTuple):
    path: str  # name of the dataset on the hub
    config: str | None
    split: str
    question: Callable[[Mapping[str, Any]], Question]


def _hellaswag(row: Mapping[str, Any]) -> Question:
    context = f"{row['activity_label']}: {row['ctx_a']} {row['ctx_b'].capitalize()}"
    return Question(_cleaned(context), tuple(map(_cleaned, row["endings"])), int(row["label"]))


def _cleaned(text: str) -> str:
    """Remove WikiHow's markup, such as [title], from a text of HellaSwag."""
    return re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". ")).replace("  ", " ")


def _arc(row: Mapping[str, Any]) -> Question:
    choices, gold = row["choices"], row["choices"]["label"].index(row["answerKey"])
    return Question(f"Question: {row['question']}\nAnswer:", tuple(choices["text"]), gold)


def _piqa(row: Mapping[str, Any]) -> Question:
    return Question(f"Question: {row['goal']}\nAnswer:", (row["sol1"], row["sol2"]), int(row["label"]))


HUB = {
    "hellaswag": _HubTask("Rowan/hellaswag", None, "validation", _hellaswag),
    "arc_easy": _HubTask("allenai/ai2_arc", "ARC-Easy", "test", _arc),
    "arc_challenge": _HubTask("allenai/ai2_arc", "ARC-Challenge", "test", _arc),
    "piqa": _HubTask("baber/piqa", None, "validation", _piqa),
}


def load_tasks(tasks: Sequence[str], with_hub: bool = True) -> list[Task]:
    """Read the tasks of a config.

    Args:
        tasks: each is the path of a .jsonl file, `NAME=PATH`, or a name in `HUB`.
        with_hub: False: read only files; of tasks on the hub only the names are checked.

    Raises:
        DataError: tasks cannot be read; it names all problems.
    """
    messages, found, names = list[Any](), list[Task](), set[str]()
    if (of_hub := [text for text in tasks if text in HUB]) and (missing := missing_packages("datasets")):
        messages += DataError.of("evaluation", KEY, show(of_hub), *missing).args
    for text in tasks:
        try:
            name, path = _name_and_path(text)
            if name in names:
                raise DataError.of("evaluation", KEY, show(text), f"one task of the name {name}", "name it: NAME=PATH")
            names.add(name)
            if path is not None:
                found.append(_of_file(name, text, path))
            elif with_hub and not messages:
                found.append(_of_hub(name))
        except DataError as error:
            messages += error.args
    if messages:
        raise DataError(*messages)
    return found


def _name_and_path(text: str) -> tuple[str, Path | None]:
    """Return the name of a task, and its file, which is None for a task on the hub."""
    if text in HUB:
        return text, None
    name, is_named, path = text.partition("=")
    if not (is_named and _NAME.fullmatch(name)):
        name, path = re.sub(r"[^A-Za-z0-9_-]+", "-", Path(text).stem), text
    file = Path(os.path.expanduser(path))
    require_reachable(file)
    if not path.endswith(".jsonl") or not file.is_file():
        near = nearest(text, HUB) if "/" not in text else None
        want = f"{', '.join(HUB)}, the path of a .jsonl file, or NAME=PATH (working directory: {Path.cwd()})"
        raise DataError.of("evaluation", KEY, show(text), want, f"did you mean {near}?" if near else "correct the path")
    return name, file


def _of_file(name: str, text: str, path: Path) -> Task:
    questions, problems = list[Question](), list[Problem]()
    try:
        with path.open("rb") as file:
            for number, line in enumerate(map(bytes.strip, file), start=1):
                found = _question(line) if line else ""
                if isinstance(found, Question):
                    questions.append(found)
                elif found:
                    problems.append(
                        Problem("question", line[:60].decode(errors="replace"), found, "correct it", number)
                    )
    except OSError as error:
        want, fix = "a file that can be read", "make it readable"
        raise DataError.of("evaluation", KEY, f"{show(text)} ({error})", want, fix) from error
    if not questions and not problems:
        problems.append(Problem(KEY, show(text), "at least one question", "give a file with some"))
    if problems:
        raise DataError(describe(str(path), problems))
    return Task(name, text, tuple(questions))


def _question(line: bytes) -> Question | str:
    """Read the question in a line; if it is malformed, return a description of what is wanted instead."""
    try:
        row = parse_json(line)
    except ValueError:
        row = None
    if not isinstance(row, dict):
        return _FORM
    context, choices, gold = row.get("query", row.get("context")), row.get("choices"), row.get("gold")
    if not isinstance(context, str):
        return f"a text as query, or context, in {_FORM}"
    if not isinstance(choices, list) or len(choices) < 2 or not all(isinstance(c, str) and c for c in choices):
        return f"two texts or more, none of them empty, as choices in {_FORM}"
    if type(gold) is not int or not 0 <= gold < len(choices):
        return f"the place of the right choice, 0 to {len(choices) - 1}, as gold in {_FORM}"
    return Question(context, tuple(choices), gold)


def _of_hub(name: str) -> Task:
    task = HUB[name]
    say_first(f"looking for {task.path} on the hub, asked again while it is silent, then in the cache of `datasets`")
    import datasets  # slow to import

    try:
        with without_retries_told():
            rows: Any = datasets.load_dataset(task.path, task.config, split=task.split)
        questions = tuple(map(task.question, rows))
    except Exception as error:  # the network or the cache may fail, or the dataset may have changed
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        want = f"the dataset {task.path} of the hub, or its copy in the cache of `datasets` ({reason})"
        fix = f"hf download --repo-type dataset {task.path} where there is a network; or name a .jsonl file"
        raise DataError.of("evaluation", KEY, show(name), want, fix) from error
    return Task(name, name, questions)
