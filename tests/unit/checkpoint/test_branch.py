"""What `checkpoint.initial_load_path` leads to where it names a run of titanlite, or was to name one."""

import re
from pathlib import Path

import pytest

from titanlite.checkpoint.branch import branch_point, remember_branch
from titanlite.checkpoint.publish import MANIFEST, step_folder
from titanlite.errors import CheckpointError


def a_run(folder: Path, *steps: int) -> Path:
    """A run that has these checkpoints, as far as their names say."""
    folder.mkdir()
    for name in ("status.json", "config.toml"):
        (folder / name).touch()
    for step in steps:
        (place := step_folder(folder / "checkpoints", step)).mkdir(parents=True)
        (place / MANIFEST).touch()
    return folder


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    a_run(tmp_path / "stable", 5, 10)
    a_run(tmp_path / "young")
    (a_run(tmp_path / "empty") / "checkpoints").mkdir()
    (tmp_path / "other").mkdir()
    return tmp_path


@pytest.mark.parametrize(
    ("path", "step"),
    [
        ("stable", 10),
        ("stable/", 10),
        ("stable/checkpoints", 10),
        ("stable/checkpoints/step-00000005", 5),
        ("other", None),
        ("org/model", None),
    ],
)
def test_where_a_branch_begins(runs: Path, path: str, step: int | None) -> None:
    found = branch_point(f"{runs}/{path}", runs / "mine")
    assert found == (None if step is None else (runs / "stable" / "checkpoints", step))


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("stable/checkpoints/step-00000099", "is not there.*of step 5, 10.*step-00000010"),
        ("stable/checkpoints/step-5", "is not there.*of step 5, 10.*step-00000010"),
        ("stabel", r"is not there.*a run that is there \((?=.*stable)(?=.*young).*Hugging Face.*/stable\""),
        ("stabel/checkpoints", r"is not there.*a run that is there.*/stable\""),
        ("stabel/checkpoints/step-00000005", r"is not there.*a run that is there.*/stable\""),
        ("young", "this one has none"),
        ("young/checkpoints", "this one has none"),
        ("young/checkpoints/step-00000005", "this one has none"),
        ("empty", "this one has none"),
        ("empty/checkpoints", "this one has none"),
        ("empty/checkpoints/step-00000005", "this one has none"),
    ],
)
def test_what_is_missing_is_named_beside_what_is_there(runs: Path, path: str, says: str) -> None:
    with pytest.raises(CheckpointError) as e:
        branch_point(f"{runs}/{path}", runs / "mine")
    assert re.search(says, str(e.value), re.DOTALL), e.value


def test_a_checkpoint_copied_in_part_is_none(runs: Path) -> None:
    (step_folder(runs / "stable" / "checkpoints", 10) / MANIFEST).unlink()
    with pytest.raises(CheckpointError, match=r"no complete checkpoint\n.*of step 5\n"):
        branch_point(str(step_folder(runs / "stable" / "checkpoints", 10)), runs / "mine")


def test_a_branch_begins_again_where_it_began(runs: Path) -> None:
    mine, path = a_run(runs / "mine"), f"{runs}/stable"
    remember_branch(path, mine, 5)
    assert branch_point(path + "/", mine) == (runs / "stable" / "checkpoints", 5)
    assert branch_point(f"{path}/checkpoints", mine) == (runs / "stable" / "checkpoints", 10)  # which is asked for anew
    (step_folder(runs / "stable" / "checkpoints", 5) / MANIFEST).unlink()
    with pytest.raises(CheckpointError, match=r"of step 5 is gone(.|\n)*there are 10(.|\n)*delete .*branch.json"):
        branch_point(path, mine)
    (mine / "branch.json").write_text("{")
    with pytest.raises(CheckpointError, match="delete it"):
        branch_point(path, mine)
