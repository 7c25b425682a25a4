"""What needs a package that is not installed is refused before any work, with the command that installs it."""

import gzip
import json
import shutil
import sys
import tomllib
from pathlib import Path

import pytest

from tests.support.refusals import problems_of
from tests.support.run_folder import make_run
from titanlite.config.schema import Config, Data
from titanlite.data.inputs import check_inputs
from titanlite.data.prepare import prepare
from titanlite.errors import DataError
from titanlite.extras import EXTRAS, missing_packages

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
FILES = "a.parquet", "a.jsonl.gz", "a.jsonl.zst"


@pytest.fixture
def hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    """No optional package is installed."""
    for package in EXTRAS:
        monkeypatch.setitem(sys.modules, package, None)


def test_each_package_is_of_its_extra_and_of_all_alone() -> None:
    for package, extra in EXTRAS.items():
        named = PROJECT["optional-dependencies"][extra]
        assert any(requirement.partition(">")[0] == package for requirement in named)
        assert not any(requirement.startswith(package) for requirement in PROJECT["dependencies"])
    assert PROJECT["optional-dependencies"]["all"] == [f"titanlite[{','.join(sorted(set(EXTRAS.values())))}]"]


@pytest.mark.parametrize(
    ("key", "value", "extras"),
    [
        ("metrics.wandb", "offline", "wandb"),
        ("metrics.wandb", 'offline"\nmodel.name = "qwen3_moe"\nmodel.flavor = "debug', "plot,wandb"),
        ("metrics.tensorboard", True, "tensorboard"),
        ("evaluation.tasks", ["piqa", "hellaswag"], "datasets"),
        *(("data.source", name, "datasets") for name in ("hf:allenai/c4:en", "a.parquet", "a.jsonl.gz")),
        *(("data.source", f"{name}/a.txt", "url") for name in ("https://host", "s3://bucket", "gs://bucket")),
        ("validation.source", 'a.jsonl.zst"\nvalidation.enable = true #"', "datasets"),
    ],
)
def test_what_a_key_needs_is_named_with_its_command(
    key: str, value: object, extras: str, hidden: None, tmp_path: Path
) -> None:
    config = {"run.toml": f'{key} = "{value}"' if isinstance(value, str) else f"{key} = {json.dumps(value)}"}
    found = problems_of("validate run.toml", config | dict.fromkeys(FILES, ""), tmp_path / "work")
    assert [problem.where for problem in found] == [key]
    assert found[0].fix.startswith(f"pip install -e '.[{extras}]'")


@pytest.mark.parametrize(
    ("argv", "where", "extra"),
    [
        ("compare run", "--out", "plot"),
        ("compare team/project/abcdefgh", "team/project/abcdefgh", "wandb"),
        ("explain run", "--out", "plot"),
        ("data debug.toml --sample 0 --picture mask.png", "--picture", "plot"),
    ],
)
def test_what_a_command_needs_is_named_with_its_command(
    argv: str, where: str, extra: str, hidden: None, tmp_path: Path
) -> None:
    run = {"run/config.toml": "", "run/metrics.jsonl": '{"step": 1, "tokens": 9, "loss": 5.0}\n'}
    found = problems_of(argv, run, tmp_path / "work")
    assert [(problem.where, problem.fix) for problem in found] == [(where, f"pip install -e '.[{extra}]'")]


def test_verdicts_are_not_computed_for_a_server_that_cannot_be_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = [make_run(tmp_path / name, [5.0, 4.0]) for name in "ab"]
    monkeypatch.setitem(sys.modules, "wandb", None)
    (found,) = problems_of(f"compare {' '.join(runs)} --wandb", {}, tmp_path / "work")
    assert (found.where, found.fix) == ("--wandb", "pip install -e '.[wandb]'")


def test_what_is_prepared_is_read_without_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "a.jsonl.gz"
    source.write_bytes(gzip.compress(b'{"text": "one and two"}\n' * 100))
    config = Config(data=Data(source=str(source), cache_dir=str(tmp_path / "cache")))
    prepare(config.data.source, config.data, 256, progress=False)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert check_inputs(config, 256).tokens["data.source"] == 1200
    shutil.rmtree(tmp_path / "cache")
    with pytest.raises(DataError, match="the package pyarrow, which is not installed here"):
        check_inputs(config, 256)


def test_a_folder_that_is_named_like_a_package_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(EXTRAS, "of_nobody", "plot")
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "of_nobody").mkdir()
    assert missing_packages("of_nobody") is not None
    (tmp_path / "of_nobody/__init__.py").touch()
    assert missing_packages("of_nobody") is None
