import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from titanlite.config.schema import Config, Float8, Model
from titanlite.observe.run_facts import commit_of, run_facts, tags_of

CPU = torch.device("cpu")


def git(folder: Path, *words: str) -> str:
    who = ("-c", "user.name=me", "-c", "user.email=me@example.com")
    done = subprocess.run(["git", *who, *words], cwd=folder, check=True, capture_output=True, text=True)
    return done.stdout.strip()


def test_the_commit_of_a_checkout(tmp_path: Path) -> None:
    assert commit_of(tmp_path) is None
    git(tmp_path, "init")
    assert commit_of(tmp_path) is None  # nothing is committed yet
    (tmp_path / "a").write_text("1")
    git(tmp_path, "add", "a")
    git(tmp_path, "commit", "-m", "x")
    commit = git(tmp_path, "rev-parse", "HEAD")
    (tmp_path / "b").write_text("untracked")
    assert commit_of(tmp_path) == commit
    (tmp_path / "a").write_text("2")
    assert commit_of(tmp_path) == f"{commit} with changes"
    (tmp_path / "site-packages").mkdir()
    assert commit_of(tmp_path / "site-packages") is None  # a package that is installed within somebody's checkout


@pytest.mark.parametrize(("flavor", "parameters"), [("debug", 1_705_216), ("8B", 8_030_261_248)])
def test_facts_and_tags(flavor: str, parameters: int) -> None:
    config = Config(model=Model(flavor=flavor))
    facts = run_facts(parameters, 8, CPU)
    assert (facts["world_size"], facts["gpu"]) == (8, "CPU")
    tags = tags_of(config, facts | {"commit": "0123456789 with changes"})
    assert {f"llama3 {flavor}", "world size 8", "8 × CPU", "bfloat16", "commit 01234567 with changes"} <= set(tags)
    assert ("8.03B parameters" in tags) == (flavor == "8B")


def test_tags_are_as_short_as_wandb_takes_them() -> None:
    config = replace(Config(), float8=Float8(recipe="x" * 100))
    tags = tags_of(config, {"world_size": 1, "gpu": "y" * 100, "parameters": 1})
    assert max(map(len, tags)) == 64
