"""A rule of a user's own is tried before a run, and refused by its line where no rank could go by it."""

from pathlib import Path

import pytest

from tests.support.own_rule import lion
from titanlite.config.own_rules import rules_of_file
from titanlite.errors import ConfigError
from titanlite.update_rules.find import bytes_of_update, try_rules

IMPORT = "from titanlite.update_rules.elementwise import ElementwiseRule"
STATE, RETURN = 'state = ("momentum",)', "        return direction"
UPDATE = "def update(self, gradient: Tensor, parameter: Tensor, state: dict[str, Tensor], updates: Tensor) -> Tensor:"
KEEP = 'state["momentum"] = state["momentum"].lerp(gradient, 1 - self.beta2)'
DEFINED = "line 15  Lion.update = "


def tried(folder: Path, *changes: tuple[str, str]) -> None:
    lion(folder, *changes)
    rules = rules_of_file(str(folder / "lion.py"))
    try_rules([(rules["Lion"], {"beta2": 0.98})])


def test_the_rule_of_the_page_passes(tmp_path: Path) -> None:
    tried(tmp_path)


def test_it_has_the_keys_of_the_group(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"ValueError: 0\.9 and 0\.98"):
        tried(tmp_path, (RETURN, '        raise ValueError(f"{self.beta1} and {self.beta2}")'))


def test_the_bytes_of_an_update_are_those_of_its_operations(tmp_path: Path) -> None:
    lion(tmp_path)
    rule = rules_of_file(str(tmp_path / "lion.py"))["Lion"]
    assert bytes_of_update(rule) == 12 + 8 + 12  # two of three tensors, and the sign


WRONG = {
    "no import": (IMPORT, "from titanlite import ElementwiseRule", "line 5  in <module>: from titanlite import"),
    "no base": (IMPORT, "class ElementwiseRule: ...", "line 8  class Lion = <class 'titanlite_model_lion.Lion'>"),
    "no update": (UPDATE, UPDATE.replace("update", "step", 1), "line 8  class Lion = no method update"),
    "another signature": (
        UPDATE,
        "def update(self, gradient, state):",
        f"{DEFINED}update(self, gradient, state): ",
    ),
    "an __init__ of its own": (
        STATE,
        f"{STATE}\n\n    def __init__(self, lr):\n        self.lr = lr\n",
        "line 13  Lion.",
    ),
    "state that is set elsewhere": (RETURN, f'{RETURN}\n\n\nLion.state = ("a",)', "line 8  Lion.state = ('a',)"),
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
    "more state": (KEEP, 'state["mean"] = gradient', f"{DEFINED}state mean"),
    "less state": (KEEP, 'del state["momentum"]', f"{DEFINED}no state momentum"),
    "state of another shape": (
        KEEP,
        'state["momentum"] = gradient.sum()',
        f"{DEFINED}state momentum: [] torch.float32",
    ),
    "state of another dtype": (
        KEEP,
        'state["momentum"] = gradient.bool()',
        f"{DEFINED}state momentum: [96] torch.bool",
    ),
    "another shape": (RETURN, "        return direction[:-1]", f"{DEFINED}direction: [95] torch.float32"),
    "nothing returned": (RETURN, "        parameter.sub_(direction)", f"{DEFINED}direction: NoneType"),
    "a moved parameter": (
        RETURN,
        "        return direction.sub_(parameter.mul_(0.9))",
        f"{DEFINED}a change of the param",
    ),
    "a decision on the host": (
        RETURN,
        "        return direction if gradient[0] > 0 else -direction",
        "line 18  in update: ",
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
    "chance": (RETURN, "        return direction * torch.rand_like(gradient)", f"{DEFINED}another direction where"),
}


def test_state_that_depends_on_other_numbers_is_refused(tmp_path: Path) -> None:
    mean = KEEP, 'state["momentum"] = gradient - gradient.mean()'
    with pytest.raises(ConfigError, match="another state momentum where a rank has fewer numbers"):
        tried(tmp_path, mean, (RETURN, "        return gradient.sign()"))


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_rule_is_refused_by_its_line(case: str, tmp_path: Path) -> None:
    line, instead, said = WRONG[case]
    changes = [(line, instead)]
    if "torch." in instead:
        changes.append(("from torch import Tensor", "import torch; from torch import Tensor"))
    with pytest.raises(ConfigError) as refused:
        tried(tmp_path, *changes)
    text = str(refused.value)
    assert text.startswith(f"{tmp_path}/lion.py: 1 problem\n")
    assert said in text
