"""A rule of a user's own is imported and tried before a run, and refused by its line where no rank could go by it."""

from contextlib import nullcontext
from pathlib import Path

import pytest

from tests.support.own_rule import lion
from titanlite.config.problems import Origin
from titanlite.config.recipe_schema import OwnRule
from titanlite.errors import ConfigError
from titanlite.update_rules.find import bytes_of_update, rules_of_file, try_rules

IMPORT = "from titanlite.update_rules.elementwise import ElementwiseRule"
RULE, STATE, RETURN = "class Lion(ElementwiseRule):", 'state = ("momentum",)', "        return direction"
UPDATE = "def update(self, gradient: Tensor, parameter: Tensor, state: dict[str, Tensor], updates: Tensor) -> Tensor:"
KEEP, KEY = 'state["momentum"] = state["momentum"].lerp(gradient, 1 - self.beta2)', "beta2: float = 0.99"
DEFINED = "line 15  Lion.update = "


def rules(folder: Path, *changes: tuple[str, str]) -> dict[str, OwnRule]:
    lion(folder, *changes)
    return rules_of_file(str(folder / "lion.py"), Origin("config"))


def tried(folder: Path, *changes: tuple[str, str]) -> None:
    try_rules([(rules(folder, *changes)["Lion"], {"beta2": 0.98})])


def test_the_rule_of_the_page_passes(tmp_path: Path) -> None:
    tried(tmp_path)
    (other := tmp_path / "other").mkdir()
    with pytest.raises(ConfigError, match=r"ValueError: 0\.9 and 0\.98"):  # it has the keys of the group
        tried(other, (RETURN, '        raise ValueError(f"{self.beta1} and {self.beta2}")'))


@pytest.mark.parametrize("first", ["", "from __future__ import annotations\n"])
def test_a_class_has_what_is_above_it(first: str, tmp_path: Path) -> None:
    more = "\n\nclass Slow(Lion):\n    beta1 = 0.8\n    rate: int = 3\n    power: float = 2\n"
    more += "    _secret: float = 1\n    tables: list = []\n"
    found = rules(tmp_path, (RETURN, f"{RETURN}{more}"), ("from torch import", f"{first}from torch import"))
    assert {name: (rule.state, rule.keys) for name, rule in found.items()} == {
        "Lion": (("momentum",), {"beta1": 0.9, "beta2": 0.99}),
        "Slow": (("momentum",), {"beta1": 0.8, "beta2": 0.99, "rate": 3, "power": 2.0}),
    }
    assert type(found["Slow"].keys["power"]) is float


def test_a_class_may_be_made_by_a_call(tmp_path: Path) -> None:
    made = f'{RETURN}\n\n\nMade = type("Made", (Lion,), {{"__module__": __name__, "beta1": BETA}})\n'
    for beta, said in (("0.8", ""), ("None", r"\n  Made\.beta1 = None\n")):
        (folder := tmp_path / beta).mkdir()
        with pytest.raises(ConfigError, match=said) if said else nullcontext():
            assert rules(folder, (RETURN, made.replace("BETA", beta)))["Made"].keys["beta1"] == 0.8


def test_the_bytes_of_an_update_are_those_of_its_operations(tmp_path: Path) -> None:
    assert bytes_of_update(rules(tmp_path)["Lion"]) == 12 + 8 + 12  # two of three tensors, and the sign


WRONG = {
    "no Python": (RULE, "class Lion(ElementwiseRule:", "line 8  class Lion(ElementwiseRule: = SyntaxError: "),
    "no import": (IMPORT, "from titanlite import ElementwiseRule", "line 5  in <module>: from titanlite import"),
    "an end of the process": (KEY, "beta2: float = exit(3)", "line 13  in Lion: beta2: float = exit(3) = SystemExit"),
    "no update": (
        UPDATE,
        UPDATE.replace("update", "step", 1),
        "line 8  Lion = TypeError: Can't instantiate abstract class",
    ),
    "another signature": (UPDATE, "def update(self, gradient, state):", f"{DEFINED}TypeError: Lion.update() takes 3"),
    "an __init__ of its own": (
        STATE,
        f"{STATE}\n\n    def __init__(self, lr):\n        self.lr = lr\n",
        "line 8  Lion = TypeError: Lion.__init__() missing 1 required",
    ),
    "an exception": (
        RETURN,
        "        return direction / self.beta3",
        "line 18  in update: return direction / self.beta3",
    ),
    "no state of that name": (
        KEEP,
        'state["mean"].mul_(0.9)',
        'line 17  in update: state["mean"].mul_(0.9) = KeyError',
    ),
    "more state": (KEEP, 'state["mean"] = gradient', f"{DEFINED}direction [96] torch.float32, state momentum"),
    "less state": (KEEP, 'del state["momentum"]', f"{DEFINED}direction [96] torch.float32\n"),
    "state of another dtype": (KEEP, 'state["momentum"] = gradient.bool()', "state momentum [96] torch.bool\n"),
    "another shape": (RETURN, "        return direction[:-1]", f"{DEFINED}direction [95] torch.float32, state"),
    "nothing returned": (RETURN, "        parameter.sub_(direction)", f"{DEFINED}direction NoneType, state"),
    "a moved parameter": (
        RETURN,
        "        return direction.sub_(parameter.mul_(0.9))",
        f"{DEFINED}a change of the param",
    ),
    "a decision on the host": (
        RETURN,
        "        return direction * gradient.sum().item()",
        "line 18  in update: return direction * gradient.sum().item() = ",
    ),
    "a tensor elsewhere": (RETURN, "        return direction * torch.ones(len(gradient))", "line 18  in update: "),
    "NaN where gradients are zero": (
        RETURN,
        '        return gradient / state["momentum"].abs()',
        f"{DEFINED}direction with",
    ),
    "a norm": (
        RETURN,
        "        return direction / gradient.norm()",
        f"{DEFINED}another direction where a rank has fewer",
    ),
    "state of a mean": (KEEP, 'state["momentum"] = gradient - gradient.mean()', f"{DEFINED}another state momentum"),
    "chance": (RETURN, "        return direction * torch.rand_like(gradient)", f"{DEFINED}another direction where"),
    "a shipped rule's name": (RULE, "class adamw(ElementwiseRule):", "line 8  class adamw\n"),
    "the name of no rule": (RULE, "class frozen(ElementwiseRule):", "line 8  class frozen\n"),
    "a string for a tuple": (STATE, 'state = ("momentum")', "line 8  Lion.state = 'momentum'\n"),
    "the optimizer's own name": (STATE, 'state = ("updates",)', "line 8  Lion.state = ('updates',)\n"),
    "a name twice": (STATE, 'state = ("momentum", "momentum")', "line 8  Lion.state = ('momentum', 'momentum')\n"),
    "no word": (STATE, "state = (None,)", "line 8  Lion.state = (None,)\n"),
    "nothing but a type": (
        KEY,
        "rate: float",
        "line 8  Lion.rate = None\n      want: a default that is a finite number",
    ),
    "no default": (
        KEY,
        "beta2: float = None",
        "line 8  Lion.beta2 = None\n      want: a default that is a finite number",
    ),
    "text for a number": (KEY, 'beta2: float = "0.9"', "line 8  Lion.beta2 = '0.9'\n"),
    "a default that is not finite": (KEY, "beta2: float = float('nan')", "line 8  Lion.beta2 = nan\n"),
    "a default that is too large": (KEY, "beta2: float = 10**400", "line 8  Lion.beta2 = 1000"),
    "half a step": (KEY, "steps: int = 0.5", "line 8  Lion.steps = 0.5\n      want: a default that is of type int"),
    "a flag for a number": (KEY, "steps: int = True", "line 8  Lion.steps = True\n"),
    "text for a flag": (KEY, 'flag: bool = "no"', "line 8  Lion.flag = 'no'\n"),
    "an attribute of every group": (KEY, "own: float = 0.5", "line 8  Lion.own = 0.5\n"),
    "a key of every group": (KEY, "lr_factor: float = 0.5", "line 8  Lion.lr_factor = 0.5\n"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_rule_is_refused_by_its_line(case: str, tmp_path: Path) -> None:
    line, instead, said = WRONG[case]
    changes = [(line, instead)]
    if case == "state of a mean":
        changes.append((RETURN, "        return gradient.sign()"))
    if "torch." in instead:
        changes.append(("from torch import Tensor", "import torch; from torch import Tensor"))
    with pytest.raises(ConfigError) as refused:
        tried(tmp_path, *changes)
    text = str(refused.value)
    assert text.startswith(f"{tmp_path}/lion.py: 1 problem\n")
    assert said in text, text
