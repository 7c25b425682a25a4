"""Every parameter of every architecture is updated by the rule that is meant for it."""

import re
from typing import get_args, get_type_hints

import pytest
import torch

from titanlite.config.architectures import ARCHITECTURES
from titanlite.config.parameter_groups import update_settings
from titanlite.config.recipe_schema import GROUP_OF_RULE, MATRIX_RULES, MuonGroup, OptimizerRecipe
from titanlite.config.schema import Config, Model, Optimizer
from titanlite.kernels.orthogonalise import ITERATIONS
from titanlite.models.find import build_model
from titanlite.models.matrices import matrices_of
from titanlite.optimizers.rule import ShippedRule
from titanlite.optimizers.sharded import shipped_rule
from titanlite.recipes import load, model_dims

# Of each block; all else is embeddings, head, norms, biases and routers.
ORTHOGONALISED = re.compile(r"layers\.\d+\.(attention\.(wqkv|wo)|feed_forward\.(w1|w13|w2)|experts\.(w13|w2))\.weight")


@pytest.mark.parametrize("rule", MATRIX_RULES)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_matrices_of_blocks_are_orthogonalised_and_adamw_has_all_else(architecture: str, rule: str) -> None:
    config = Config(model=Model(name=architecture, flavor="debug"))
    dims = model_dims(config)
    with torch.device("meta"):
        model = build_model(config.model, dims, 64)
    shapes, matrices = {name: p.shape for name, p in model.named_parameters()}, matrices_of(model)
    settings = update_settings(load("optimizer", rule), config.optimizer, shapes, of_matrices=matrices)
    assert settings.keys() == shapes.keys()
    found = {name for name, own in settings.items() if own.rule == rule}
    assert found == {name for name in shapes if ORTHOGONALISED.fullmatch(name)}
    assert len(found) == 4 * dims.n_layers
    assert {own.rule for name, own in settings.items() if name not in found} == {"adamw"}
    routers = {name for name in settings if re.search(r"\brouter\b", name)}
    assert bool(routers) == (dims.experts is not None)
    assert all(settings[name].group == "routers" for name in routers)
    assert {own.lr_factor for own in settings.values()} == {1.0}  # the learning rate is everyone's


@pytest.mark.parametrize("rule", GROUP_OF_RULE)
def test_every_key_of_a_group_reaches_its_rule(rule: str) -> None:
    values = {"polynomials": "newton_schulz", "nesterov": False}
    given = {key: values.get(key, 0.123) for key in GROUP_OF_RULE[rule](rule).own}
    recipe = OptimizerRecipe("", {"all": GROUP_OF_RULE[rule](rule, **given)})  # type: ignore[arg-type]
    of_rule = update_settings(recipe, Optimizer(weight_decay_exclude=()), {"w": (4, 4)})["w"].of_rule()
    assert given.items() <= of_rule.items()


def test_schema_and_code_know_the_same_rules_and_sequences() -> None:
    hints = get_type_hints(MuonGroup)
    assert all(issubclass(shipped_rule(rule), ShippedRule) for rule in GROUP_OF_RULE)
    assert set(GROUP_OF_RULE) > set(MATRIX_RULES)
    assert set(get_args(get_args(hints["polynomials"])[0])) == set(ITERATIONS)
