"""JSON that is nested a hundred thousand deep is damage like any other, whoever reads it."""

import json
import re
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest

from tests.unit.data.test_tokenizer import make_tokenizer
from titanlite.checkpoint.publish import MANIFEST, hash_files, verify
from titanlite.checkpoint.saved_state import read_state
from titanlite.commands.compare import read_runs
from titanlite.config.config_json import recipe_of
from titanlite.config.problems import Origin, Problems
from titanlite.config.schema import Config, Data, Job
from titanlite.data.prepare import prepare
from titanlite.data.shards import Meta
from titanlite.data.tokenizer import load_tokenizer
from titanlite.errors import TitanliteError
from titanlite.json_file import parse_json
from titanlite.observe.metrics import read_metrics
from titanlite.preflight.run_folder import RunFolder

PACKAGE = Path(__file__).parents[2] / "titanlite"
DEEP = "[" * 100_000
OWN = (
    "json_file.py",
    "json_schema.py",  # numbers of its own table of ranges
    "wandb.py",
    "wandb_process.py",
    "profiler.py",
    "exit_code.py",
)  # these read what was just written


def of_folder(path: Path) -> None:
    problems = Problems(Origin("a.toml"))
    recipe_of(str(path), problems, "checkpoint.initial_load_path")
    problems.raise_all()


def of_tokenizer(path: Path) -> None:
    make_tokenizer(path / "tokenizer.json")
    load_tokenizer(str(path / "tokenizer.json"))


def of_records(path: Path) -> None:
    prepare(f"{path}/a.jsonl", Data(cache_dir=str(path / "cache")), 256, progress=False)


def of_run(path: Path) -> None:
    (path / "metrics.jsonl").write_text('{"step": 1, "loss": 1.0, "tokens": 1}\n')
    (path / "config.toml").touch()
    read_runs([path])


def of_checkpoint(path: Path) -> None:
    entries = {"state.json": asdict(hash_files(path, ["state.json"])["state.json"])}
    (path / MANIFEST).write_text(json.dumps({"files": entries}))
    read_state(path, 1)


READERS: list[tuple[str, Callable[[Path], object], str]] = [
    ("meta.json", Meta.read, "token shards = ValueError: nested too deeply"),
    (MANIFEST, verify, f"{MANIFEST} = ValueError: nested too deeply"),
    ("state.json", of_checkpoint, "state.json = ValueError: nested too deeply"),
    ("config.json", of_folder, "with config.json and safetensors (nested too deeply)"),
    ("tokenizer.json", lambda path: load_tokenizer(str(path / "tokenizer.json")), "which is no tokenizer"),
    ("tokenizer_config.json", of_tokenizer, "is not a JSON object: nested too deeply"),
    ("a.jsonl", of_records, "a.jsonl:1: not JSON: nested too deeply"),
    ("metrics.jsonl", lambda path: read_metrics(path / "metrics.jsonl"), "want: a JSON object with a step"),
    ("status.json", of_run, "want: a JSON object, as the run wrote it"),
]


@pytest.mark.parametrize(("name", "read", "said"), READERS, ids=[name for name, *_ in READERS])
def test_what_is_nested_too_deeply_is_said_in_one_message(
    tmp_path: Path, name: str, read: Callable[[Path], object], said: str
) -> None:
    (tmp_path / name).write_text(DEEP + "\n")
    with pytest.raises(TitanliteError, match=re.escape(said)):
        read(tmp_path)


@pytest.mark.parametrize("text", [f"a = {DEEP}", "a." * 10_000 + "a = 1", '"\\ud800'])
def test_a_runs_config_that_is_damaged(tmp_path: Path, text: str) -> None:
    config = Config(job=Job(dump_folder=str(tmp_path)))
    folder = RunFolder.of(config)
    folder.path.mkdir()
    folder.config.write_text(text)
    with pytest.raises(TitanliteError, match="want: the config of this run"):
        folder.foresee(config)
    (folder.path / "metrics.jsonl").touch()
    with pytest.raises(TitanliteError, match="want: TOML, as the run wrote it"):
        read_runs([folder.path])


def test_all_numbers_of_a_runs_config_that_are_none_are_said_at_once(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").touch()
    (tmp_path / "config.toml").write_text("training.steps = 'abc'\njob.stop_after = true\nmetrics.log_freq = 0\n")
    with pytest.raises(TitanliteError) as refusal:
        read_runs([tmp_path])
    report = refusal.value.args[0]
    assert [(problem.where, problem.saw, problem.want) for problem in report.problems] == [
        ("training.steps", "'abc'", "a whole number, at least 0"),
        ("job.stop_after", "True", "a whole number, at least 0"),
        ("metrics.log_freq", "0", "a whole number, at least 1"),
    ]


def test_what_may_be_absent_or_somebody_elses_is_left_alone(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.status.write_text(DEEP)
    assert folder.seems_in_use() is None


def test_files_are_read_as_damaged_ones_must_be() -> None:
    others = {p.name for p in PACKAGE.rglob("*.py") if re.search(r"\bjson\.loads?\(", p.read_text())}
    others -= {"background.py"}  # which reads a pipe that its own process writes
    assert others <= {*OWN, "tokenizer.py", "hugging_face.py"}  # of a tokenizer that its library has accepted
    with pytest.raises(ValueError, match="nested too deeply"):
        parse_json(DEEP)
