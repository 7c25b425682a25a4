"""What a file of update rules says of itself is read without running it; what is wrong is told by file and line."""

from pathlib import Path

import pytest

from tests.support.own_rule import lion
from titanlite.commands import main
from titanlite.config.own_rules import rules_of_file
from titanlite.config.parameter_groups import update_settings
from titanlite.config.schema import Optimizer
from titanlite.errors import ConfigError
from titanlite.recipes import load

DEBUG = str(Path(__file__).parents[3] / "configs" / "debug.toml")
STATE, KEY, RULE = 'state = ("momentum",)', "beta2: float = 0.99", "class Lion(ElementwiseRule):"


def test_a_group_has_the_keys_of_its_rule(tmp_path: Path) -> None:
    lion(tmp_path)
    rules = rules_of_file(str(tmp_path / "lion.py"))
    assert {name: (rule.state, rule.keys) for name, rule in rules.items()} == {
        "Lion": (("momentum",), {"beta1": 0.9, "beta2": 0.99})
    }
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


def test_a_class_has_what_is_above_it(tmp_path: Path) -> None:
    flags = lion(tmp_path)
    with (tmp_path / "lion.py").open("a") as file:
        file.write("\n\nclass Slow(Lion):\n    beta1: float = 0.8\n    rate: int = 3\n    _secret: list = []\n")
    slow = rules_of_file(flags[0].partition("=")[2])["Slow"]
    assert (slow.state, slow.keys) == (("momentum",), {"beta1": 0.8, "beta2": 0.99, "rate": 3})


WRONG_FILES = {
    "a key of a class above without its type": (
        "        return direction",
        "        return direction\n\n\nclass Slow(Lion):\n    beta1 = 0.8",
        "line 22  Slow.beta1 = 0.8\n    want: the key with its type",
    ),
    "no class": (RULE, "class Lion:", 'lion.py", with no rule\n    want: a class that derives from ElementwiseRule'),
    "no Python": (RULE, "class Lion(ElementwiseRule:", "line 8  class Lion(ElementwiseRule: = SyntaxError: "),
    "a shipped rule's name": (
        RULE,
        "class adamw(ElementwiseRule):",
        "line 8  class adamw\n    want: a name of its own",
    ),
    "state that is computed": (STATE, "state = names()", "line 11  Lion.state = names()\n    want: a tuple of names"),
    "a string for a tuple": (STATE, 'state = ("momentum")', "line 11  Lion.state = 'momentum'\n    want: a tuple"),
    "the optimizer's own name": (STATE, 'state = ("updates",)', "line 11  Lion.state = ('updates',)"),
    "a default of another type": (
        KEY,
        "beta2: float = True",
        "line 13  Lion.beta2 = True\n    want: a default that is",
    ),
    "no default": (
        KEY,
        "beta2: float",
        "line 13  Lion.beta2\n    want: a default that is finite and a literal of type",
    ),
    "a type that TOML has not": (
        KEY,
        "beta2: Tensor = 0",
        "line 13  Lion.beta2 = 0\n    want: one of the types float,",
    ),
    "a key of every group": (KEY, "lr_factor: float = 0.5", "line 13  Lion.lr_factor = 0.5\n    want: another name"),
}


@pytest.mark.parametrize("case", WRONG_FILES)
def test_a_wrong_file_is_refused_by_its_line(case: str, tmp_path: Path) -> None:
    line, instead, said = WRONG_FILES[case]
    lion(tmp_path, (line, instead))
    file = str(tmp_path / "lion.py")
    with pytest.raises(ConfigError) as refused:
        rules_of_file(file)
    text = str(refused.value).replace("\n  ", "\n")
    assert text.startswith(f"{file}: 1 problem\n")
    assert said in text


WRONG_RECIPES = {
    "a key that it has not": (
        "beta2 = 0.98",
        "beta_2 = 0.98",
        "line 7  groups.matrices.beta_2 = 0.98",
        "matrices.beta2?",
    ),
    "a value of another type": ("beta2 = 0.98", 'beta2 = "x"', 'line 7  groups.matrices.beta2 = "x"', "want: a number"),
    "a value that is none": ("beta2 = 0.98", "beta2 = nan", "line 7  groups.matrices.beta2 = nan", "a finite number"),
    "a shipped rule's key": (
        "beta2 = 0.98",
        "eps = 1e-8",
        "line 7  groups.matrices.eps = 1e-08",
        "rule Lion is in line 8",
    ),
    "another rule": ('rule = "Lion"', 'rule = "lion"', 'line 4  groups.matrices.rule = "lion"', 'did you mean "Lion"?'),
    "its keys for another rule": ('rule = "adamw"', 'rule = "adamw"\nrate = 1', "groups.rest.rate = 1", "one of rule,"),
}


@pytest.mark.parametrize("case", WRONG_RECIPES)
def test_a_wrong_group_is_refused_by_its_line(case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line, instead, *said = WRONG_RECIPES[case]
    flags = lion(tmp_path, (line, instead))
    assert main(["validate", DEBUG, *flags]) == 2
    text = capsys.readouterr().err
    assert f"{tmp_path}/optimizer/lion.toml: 1 problem" in text
    assert all(part in text for part in said), text


def test_a_rule_of_a_file_that_is_not_given_names_the_key(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", DEBUG, *lion(tmp_path)[1:]]) == 2
    assert "fix:  --optimizer.file my_rule.py, which has the class Lion" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--optimizer.file=none.py"], 'optimizer.file = "none.py"\n      want: a file that exists'),
        (["--optimizer.file=lion.toml"], 'optimizer.file = "lion.toml"\n      want: a Python file'),
        (["--optimizer.recipe=adamw"], 'no group of adamw has rule = "Lion"'),
    ],
)
def test_a_file_that_is_not_there_or_not_used_is_refused(
    flags: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["validate", DEBUG, *lion(tmp_path), *flags]) == 2
    assert said in capsys.readouterr().err


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
