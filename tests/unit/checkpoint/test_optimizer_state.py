"""A checkpoint of another optimizer is refused, or its state left where it is."""

import json
from pathlib import Path
from typing import Any

import pytest

from titanlite.checkpoint.optimizer_state import leaves_state, optimizer_identity
from titanlite.checkpoint.saved_state import SavedState
from titanlite.config.recipe_schema import OwnRule
from titanlite.config.schema import Optimizer
from titanlite.errors import CheckpointError

ADAMW = {"layers.0.wo.weight": "adamw", "layers.1.wo.weight": "adamw", "norm.weight": "adamw"}
MUON = {"layers.0.wo.weight": "muon", "layers.1.wo.weight": "muon", "norm.weight": "adamw"}
FOLDER = Path("step-00000002")


def saved(rules: dict[str, str], own: dict[str, OwnRule] | None = None, **keys: Any) -> SavedState:
    return SavedState(optimizer=json.loads(json.dumps(optimizer_identity(Optimizer(**keys), rules, own or {}))))


def test_the_same_optimizer_goes_on_whatever_its_numbers_and_its_recipe() -> None:
    for config in (Optimizer(), Optimizer(recipe="mine", lr=1.0, beta1=0.5, fresh_state=True)):
        assert not leaves_state(FOLDER, saved(MUON), config, MUON, {})


@pytest.mark.parametrize(
    ("state", "config", "rules", "parts"),
    [
        (
            saved(MUON),
            Optimizer(),
            ADAMW,
            ['optimizer.recipe = "adamw"\n', 'were updated: "muon" for layers.*.wo.weight\n'],
        ),
        (
            saved(ADAMW),
            Optimizer(recipe="muon"),
            MUON,
            ['optimizer.recipe = "muon"\n', '"adamw" for layers.*.wo.weight\n'],
        ),
        (
            saved(ADAMW, state_dtype="bfloat16"),
            Optimizer(),
            ADAMW,
            ['optimizer.state_dtype = "float32"', 'want: "bfloat16", as the checkpoint has it'],
        ),
    ],
)
def test_another_is_refused_unless_state_may_be_fresh(
    state: SavedState, config: Optimizer, rules: dict[str, str], parts: list[str]
) -> None:
    with pytest.raises(CheckpointError) as caught:
        leaves_state(FOLDER, state, config, rules, {})
    for part in ("step-00000002: 1 problem\n", "or optimizer.fresh_state = true", *parts):
        assert part in str(caught.value)
    assert leaves_state(FOLDER, state, Optimizer(config.recipe, fresh_state=True), rules, {})


def test_checkpoints_that_do_not_say_their_rules_are_of_adamw() -> None:
    assert not leaves_state(FOLDER, SavedState(), Optimizer(state_dtype="bfloat16"), ADAMW, {})


def test_other_parameters_are_for_those_to_say_who_know_the_model() -> None:
    assert not leaves_state(FOLDER, saved(ADAMW), Optimizer(), {**ADAMW, "layers.2.wo.weight": "muon"}, {})


def test_a_rule_of_ones_own_that_keeps_something_else_is_another() -> None:
    """Without the parameters, too: those of a model file are not known without torch."""
    rules = dict.fromkeys(ADAMW, "Lion")
    was, ordered, now = (
        {"Lion": OwnRule("Lion", "lion.py", "", state, {}, type)}
        for state in (("momentum", "scale"), ("scale", "momentum"), ("momentum",))
    )
    state = saved(rules, was)
    for known in (rules, {}):
        assert not leaves_state(FOLDER, state, Optimizer(), known, ordered)
        with pytest.raises(CheckpointError) as caught:
            leaves_state(FOLDER, state, Optimizer(), known, now)
        for part in (
            "step-00000002: 1 problem\n",
            "optimizer.file = class Lion with state momentum\n",
            "want: momentum, scale, which the checkpoint has of this rule\n",
            "or optimizer.fresh_state = true",
        ):
            assert part in str(caught.value)
        assert leaves_state(FOLDER, state, Optimizer(fresh_state=True), known, now)
    assert not leaves_state(
        FOLDER, SavedState(optimizer={"rules": rules}), Optimizer(), rules, now
    )  # who did not say it
