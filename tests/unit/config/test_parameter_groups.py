"""Which group of an optimizer's recipe takes each parameter, and what is refused."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from titanlite.config.parameter_groups import UpdateSettings, update_settings
from titanlite.config.problems import Origin, Place
from titanlite.config.recipe_schema import AdamWGroup, MuonGroup, OptimizerRecipe, ParameterGroup
from titanlite.config.schema import Optimizer
from titanlite.errors import ConfigError, RecipeError
from titanlite.recipes import load

SHAPES: dict[str, Sequence[int]] = {
    "tok_embeddings.weight": (256, 64),
    "layers.0.attention_norm.weight": (64,),
    "layers.0.wqkv.weight": (192, 64),
    "layers.0.experts.w13.weight": (8, 256, 64),
    "layers.1.attention_norm.weight": (64,),
    "layers.1.wqkv.weight": (192, 64),
    "layers.1.experts.w13.weight": (8, 256, 64),
    "norm.weight": (64,),
    "output.weight": (256, 64),
}


def recipe_of(**groups: ParameterGroup) -> OptimizerRecipe:
    return OptimizerRecipe("mine", groups)


def group(*pattern: str, **keys: object) -> ParameterGroup:
    return AdamWGroup("adamw", pattern, **keys)  # type: ignore[arg-type]


def adamw(group: str, lr_factor: float, weight_decay: float, *own: float) -> UpdateSettings:
    keys = tuple(zip(("beta1", "beta2", "eps"), own, strict=True))
    return UpdateSettings(group, "adamw", lr_factor, weight_decay, keys)


def groups_of(recipe: OptimizerRecipe, config: Optimizer | None = None) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name, own in update_settings(recipe, config or Optimizer(), SHAPES).items():
        found.setdefault(own.group, []).append(name)
    return found


def refused(recipe: OptimizerRecipe, config: Optimizer | None = None, origin: Origin | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        update_settings(recipe, config or Optimizer(), SHAPES, origin)
    return str(caught.value)


def test_the_default_is_what_the_keys_of_the_config_say() -> None:
    config = Optimizer(
        weight_decay=0.2, beta1=0.8, beta2=0.7, eps=1e-6, weight_decay_exclude=("*norm.weight", "output.*")
    )
    settings = update_settings(load("optimizer", "adamw"), config, SHAPES)
    assert list(settings) == list(SHAPES)
    for name, own in settings.items():
        is_excluded = "norm" in name or name == "output.weight"
        assert own == adamw("all", 1.0, 0.0 if is_excluded else 0.2, 0.8, 0.7, 1e-6)


def test_a_factor_of_zero_freezes_a_group_whatever_its_rule_and_its_decay() -> None:
    recipe = recipe_of(frozen=MuonGroup("muon", ("output.*",), lr_factor=0.0, weight_decay=0.5), rest=group())
    settings = update_settings(recipe, Optimizer(), SHAPES, of_matrices=[])
    for name, own in settings.items():
        frozen = UpdateSettings("frozen", "frozen", 0.0, 0.0, ())
        decay = 0.0 if "norm" in name else 0.1
        assert own == (frozen if name == "output.weight" else adamw("rest", 1.0, decay, 0.9, 0.95, 1e-8))
    said = refused(recipe_of(all=group(lr_factor=0.0), none=group("*.bias", optional=True)))
    assert "groups.all.lr_factor = 0.0\n      want: a group with another factor: this one freezes" in said


def test_the_first_group_with_a_pattern_that_matches_takes_a_parameter_and_then_one_without() -> None:
    recipe = recipe_of(
        rest=group(),
        first=group("layers.0.*", shape="matrix"),
        inside=group("layers.*", shape="matrix"),
        outside=group("tok_embeddings.*", "output.*"),
    )
    assert groups_of(recipe) == {
        "outside": ["tok_embeddings.weight", "output.weight"],
        "first": ["layers.0.wqkv.weight", "layers.0.experts.w13.weight"],
        "inside": ["layers.1.wqkv.weight", "layers.1.experts.w13.weight"],
        "rest": ["layers.0.attention_norm.weight", "layers.1.attention_norm.weight", "norm.weight"],
    }
    assert [*groups_of(recipe_of(matrices=group(shape="matrix"), vectors=group(shape="vector")))["vectors"]] == [
        name for name in SHAPES if "norm" in name
    ]


def test_a_group_says_what_it_has_otherwise() -> None:
    own = group("tok_embeddings.*", lr_factor=0.1, weight_decay=0.0, beta1=0.8, beta2=0.99, eps=1e-10)
    settings = update_settings(recipe_of(embeddings=own, rest=group()), Optimizer(), SHAPES)
    assert settings["tok_embeddings.weight"] == adamw("embeddings", 0.1, 0.0, 0.8, 0.99, 1e-10)
    assert settings["output.weight"] == adamw("rest", 1.0, 0.1, 0.9, 0.95, 1e-8)


def test_an_optional_group_may_take_nothing() -> None:
    recipe = recipe_of(a=group("router.*", optional=True), rest=group())
    assert groups_of(recipe) == {"rest": list(SHAPES)}


def test_a_weight_decay_is_said_once() -> None:
    """By the group or by the exclusion: neither wins on the quiet."""
    decays, decays_not = (recipe_of(norms=group("*norm.weight", weight_decay=d), rest=group()) for d in (0.01, 0.0))
    said = refused(decays)
    assert 'optimizer.weight_decay_exclude = "*norm.weight"' in said
    assert "layers.0.attention_norm.weight has groups.norms.weight_decay = 0.01" in said
    assert "fix:  weight_decay_exclude = [], or no weight decay in the recipe" in said
    settings = update_settings(decays, Optimizer(weight_decay_exclude=()), SHAPES)
    assert settings["norm.weight"].weight_decay == 0.01
    assert update_settings(decays_not, Optimizer(), SHAPES)["norm.weight"].weight_decay == 0.0


def test_muons_own_keys_and_their_defaults() -> None:
    recipe = recipe_of(
        first=MuonGroup("muon", ("layers.0.*",), "matrix", momentum=0.9, polynomials=((1.5, -0.5, 0.0),)),
        others=MuonGroup("muon", ("layers.*",), "matrix", nesterov=False, lr_factor=0.5),
        rest=group(),
    )
    settings = update_settings(recipe, Optimizer(), SHAPES)
    first, second = (settings[f"layers.{n}.wqkv.weight"].of_rule() for n in (0, 1))
    common = {"rule": "muon", "weight_decay": 0.1}
    own = {"momentum": 0.9, "nesterov": True, "polynomials": ((1.5, -0.5, 0.0),)}
    assert first == {**common, "group": "first", "lr_factor": 1.0, **own}
    own = {"momentum": 0.95, "nesterov": False, "polynomials": "polar_express"}
    assert second == {**common, "group": "others", "lr_factor": 0.5, **own}
    assert settings["norm.weight"].of_rule().keys() - second.keys() == {"beta1", "beta2", "eps"}


@pytest.mark.parametrize(
    ("pattern", "meant"),
    [("layer.*", "layers.*"), ("layers.*.expert.*", "layers.*.experts.*"), ("tok_embedding.*", "tok_embeddings.*")],
)
def test_the_nearest_pattern_is_suggested(pattern: str, meant: str) -> None:
    said = refused(recipe_of(mine=group(pattern), rest=group()))
    assert f'fix:  did you mean "{meant}"?' in said


def test_all_that_is_wrong_is_said_at_once_each_in_its_file(tmp_path: Path) -> None:
    (path := tmp_path / "mine.toml").write_text(
        'extends = "adamw"\nhelp = "Mine."\n\n[groups.norms]\nrule = "adamw"\npattern = ["*norms.weight"]\n'
    )
    origin = Origin("run.toml", {"optimizer.weight_decay_exclude": Place("run.toml", 7)})
    said = refused(load("optimizer", str(path)), Optimizer(weight_decay_exclude=("*.bias",)), origin)
    assert f"{path}: 1 problem\n  line 6  groups.norms.pattern" in said
    assert 'run.toml: 1 problem\n  line 7  optimizer.weight_decay_exclude = "*.bias"' in said


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ('[groups.hidden]\nrule = "muon"\n[groups.hiden]\nmomentum = 0.9', ["line 4", "did you mean [groups.hidden]?"]),
        ('[groups.a]\nrule = "normuon"\nbeta1 = 0.9', ["momentum, polynomials, nesterov, beta2\n"]),
        ('[groups.a]\nrule = "dion2"\nnesterov = true', ["lr_factor, weight_decay, momentum, polynomials, share\n"]),
        ('[groups.a]\nrule = "dion2"\nshare = 0.0', ["a number, above 0 and at most 1", "share = 0.25 (the default)"]),
        ('[groups.a]\nrule = "lion"', ["fix:  --optimizer.file my_rule.py, which has the class lion"]),  # not "dion2"
        ('[groups.a]\nrule = "muon"\npolynomials = "polar_expres"', ["a list of lists of numbers", '"polar_express"?']),
        ('[groups.a]\nrule = "muon"\npolynomials = [[-1.5, 0.5, 0]]', ["(0, 3]; after step 1"]),  # uphill
        ('[groups.a]\nrule = "muon"\npolynomials = [[1.5, -0.5, nan]]', ["(0, 3]; after step 1"]),
        (  # with a sign forgotten
            '[groups.a]\nrule = "muon"\npolynomials = [[1.5, -0.5, 0], [3.4445, 4.7750, 2.0315]]',
            ["groups.a.polynomials = [[1.5, -0.5, 0.0], [3.4445,", "(0, 3]; after step 2 one is not"],
        ),
        ('[[groups]]\nrule = "adamw"', ["want: a table of tables", "fix:  write each as a table: [groups.NAME]"]),
    ],
)
def test_illegal_recipes(text: str, parts: list[str], tmp_path: Path) -> None:
    (path := tmp_path / "mine.toml").write_text(f'help = "mine"\n{text}')
    with pytest.raises(RecipeError) as caught:
        load("optimizer", str(path))
    assert "1 problem\n" in str(caught.value)
    for part in parts:
        assert part in str(caught.value)


def test_one_that_extends_another_changes_a_key_or_adds_a_group(tmp_path: Path) -> None:
    (path := tmp_path / "mine.toml").write_text('extends = "adamw"\n[groups.all]\nlr_factor = 0.5\n')
    assert load("optimizer", str(path)).groups == {"all": group(lr_factor=0.5)}
    path.write_text('extends = "adamw"\n[groups.head]\nrule = "adamw"\npattern = ["output.*"]\n')
    assert groups_of(load("optimizer", str(path)))["head"] == ["output.weight"]


def test_groups_that_a_recipe_adds_come_before_those_that_it_extends(tmp_path: Path) -> None:
    (path := tmp_path / "mine.toml").write_text(
        'extends = "muon"\n[groups.last]\nrule = "adamw"\npattern = ["layers.1.wqkv.*"]\n'
        '[groups.hidden]\nmomentum = 0.9\n[groups.any]\nrule = "adamw"\npattern = ["*wqkv*"]\nshape = "matrix"\n'
    )
    recipe = load("optimizer", str(path))
    assert [*recipe.groups] == ["last", "any", "routers", "hidden", "rest"]
    found = groups_of(recipe)
    assert found["last"] == ["layers.1.wqkv.weight"]
    assert found["any"] == ["layers.0.wqkv.weight"]
    assert found["hidden"] == ["layers.0.experts.w13.weight", "layers.1.experts.w13.weight"]
    (below := tmp_path / "below.toml").write_text(
        'extends = "mine.toml"\n[groups.all]\nrule = "adamw"\noptional = true'
    )
    assert [*load("optimizer", str(below)).groups] == ["all", "last", "any", "routers", "hidden", "rest"]
    below.write_text('extends = ["mine.toml", "adamw"]')
    assert [*load("optimizer", str(below)).groups] == ["all", "last", "any", "routers", "hidden", "rest"]


def test_what_shipped_groups_lack_is_to_be_changed_in_ones_own_file(tmp_path: Path) -> None:
    (path := tmp_path / "mine.toml").write_text('extends = "muon"\n[groups.all]\nrule = "adamw"\n')
    said = refused(load("optimizer", str(path)))
    assert "fix:  give groups of yours fewer parameters, or write [groups.rest] with optional = true" in said
    path.write_text('extends = "muon"\n[groups.hidden]\nshape = "any"\n')
    matrices = [name for name in SHAPES if "wqkv" in name or "w13" in name]
    with pytest.raises(RecipeError) as caught:
        update_settings(load("optimizer", str(path)), Optimizer(), SHAPES, None, matrices)
    assert f"{path}: 1 problem\n  line 3  groups.hidden.rule" in str(caught.value)
