"""Groups of a recipe have the keys of the user's own rules; what is wrong is told by file and line."""

from pathlib import Path

import pytest

from tests.support.own_rule import lion
from titanlite.commands import main
from titanlite.config.parameter_groups import update_settings
from titanlite.config.problems import Origin
from titanlite.config.schema import Optimizer
from titanlite.recipes import load
from titanlite.update_rules.find import rules_of_file

DEBUG = str(Path(__file__).parents[3] / "configs" / "debug.toml")


def test_a_group_has_the_keys_of_its_rule(tmp_path: Path) -> None:
    lion(tmp_path)
    rules = rules_of_file(str(tmp_path / "lion.py"), Origin("config"))
    recipe = load("optimizer", "lion", [str(tmp_path)], rules=rules)
    assert list(recipe.groups) == ["matrices", "rest"]  # the first that matches decides
    shapes = {"a.weight": (4, 4), "norm.weight": (4,)}
    settings = update_settings(recipe, Optimizer(beta1=0.5, weight_decay=0.2), shapes)
    assert settings["a.weight"].of_rule() == {
        "group": "matrices",
        "rule": "Lion",
        "lr_factor": 0.3,
        "weight_decay": 0.2,
        "beta1": 0.9,  # the class's, not that of [optimizer]
        "beta2": 0.98,
    }
    assert settings["norm.weight"].of_rule()["beta1"] == 0.5


WRONG_RECIPES = {
    "a key that it has not": (
        "beta2 = 0.98",
        "beta_2 = 0.98",
        "line 7  groups.matrices.beta_2 = 0.98",
        "matrices.beta2?",
    ),
    "another rule": ('rule = "Lion"', 'rule = "lion"', 'line 4  groups.matrices.rule = "lion"', 'did you mean "Lion"?'),
    "a rule that is a list": ('rule = "Lion"', 'rule = ["Lion"]', "line 4  groups.matrices.rule = ", "want: a string"),
}


@pytest.mark.parametrize("case", WRONG_RECIPES)
def test_a_wrong_group_is_refused_by_its_line(case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line, instead, *said = WRONG_RECIPES[case]
    flags = lion(tmp_path, (line, instead))
    assert main(["validate", DEBUG, *flags]) == 2
    text = capsys.readouterr().err
    assert f"{tmp_path}/optimizer/lion.toml: 1 problem" in text
    assert all(part in text for part in said), text


def test_a_recipe_that_is_none_is_refused_before_the_file_is_imported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = lion(tmp_path, ("from torch import Tensor", 'raise RuntimeError("run")'))
    assert main(["validate", DEBUG, *flags, "--optimizer.recipe=lino", "--data.source=none.txt"]) == 2
    assert 'did you mean "lion"?' in (said := capsys.readouterr().err)
    assert "RuntimeError" not in said


def test_recipes_are_shown_with_the_rules_keys(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, _, dirs = lion(tmp_path)
    assert main(["recipes", "optimizer", "lion", file, dirs]) == 0
    assert 'rule = "Lion"' in (shown := capsys.readouterr().out)
    assert "beta1 = 0.9\nbeta2 = 0.98" in shown
    assert main(["recipes", "optimizer", file, dirs]) == 0
    assert "lion" in capsys.readouterr().out


def test_validate_tries_the_rules_of_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", DEBUG, *lion(tmp_path)]) == 0
    (other := tmp_path / "other").mkdir()
    flags = lion(other, ("from torch import Tensor", 'raise RuntimeError("run")'))
    assert main(["validate", DEBUG, *flags]) == 2
    assert "RuntimeError: run" in capsys.readouterr().err
