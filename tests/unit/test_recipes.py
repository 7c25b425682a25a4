"""Recipes are found by name, and what is not legal is not loaded."""

from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest

from titanlite.config.schema import Config, Job, Model
from titanlite.config.toml_file import shipped_folder
from titanlite.errors import ConfigError, RecipeError
from titanlite.recipes import Kind, load, model_dims, names

KINDS: tuple[Kind, ...] = get_args(Kind)

FLOAT8 = """help = "mine"
scale_rounding = "exact"
[input]
dtype = "e4m3"
output = "tensor"
grad_weight = "tensor"
[weight]
dtype = "e4m3"
output = "tensor"
grad_input = "tensor"
[grad_output]
dtype = "e5m2"
grad_input = "tensor"
grad_weight = "tensor"
[accumulation]
output = "fast"
grad_input = "split"
grad_weight = "split"
"""
SAVE_LIST = 'help = "mine"\ndefault = "recompute"\n'


def write(folder: Path, kind: str, name: str, text: str) -> Path:
    path = folder / kind / f"{name}.toml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def message(kind: Kind, name: object, dirs: tuple[str, ...] = ()) -> str:
    with pytest.raises(RecipeError) as caught:
        load(kind, str(name), dirs)
    return str(caught.value)


def test_shipped_names() -> None:
    assert names("model") == [
        *(f"gemma3-{flavor}" for flavor in ("1B", "270M", "debug")),
        *(f"gpt2-{flavor}" for flavor in ("1.5B", "124M", "355M", "774M", "debug")),
        *(f"llama3-{flavor}" for flavor in ("1B", "3B", "405B", "70B", "8B", "debug")),
        *(f"mixtral-{flavor}" for flavor in ("8x7B", "debug")),
        *(f"olmoe-{flavor}" for flavor in ("1B-7B", "debug")),
        *(f"qwen3-{flavor}" for flavor in ("0.6B", "1.7B", "4B", "8B", "debug")),
        *(f"qwen3_moe-{flavor}" for flavor in ("235B-A22B", "30B-A3B", "debug", "torchtitan-debug")),
    ]
    assert names("float8") == ["blockwise", "rowwise", "rowwise_with_gw_hp", "tensorwise"]
    expected = ["attention", "balanced", "balanced_tight", "every_second_matmul", "full", "matmuls", "none"]
    assert names("activation_checkpoint") == expected
    assert names("optimizer") == ["adamw", "dion2", "muon", "normuon"]
    assert {p.name for p in shipped_folder("recipes").iterdir()} == set(KINDS)


@pytest.mark.parametrize("kind", KINDS)
def test_every_shipped_recipe_is_legal_and_has_a_sentence_of_help(kind: Kind) -> None:
    for name in names(kind):
        assert load(kind, name).help.endswith(".")


@pytest.mark.parametrize(
    ("kind", "name", "parts"),
    [
        (
            "float8",
            "rowwis",
            ['float8.recipe = "rowwis"', "none, blockwise, rowwise, rowwise_with_gw_hp", 'mean "rowwise"?'],
        ),
        ("float8", "all_axiswise", ['fix:  recipe = "rowwise"']),  # as torchao called it
        ("float8", "mine.toml", ["a .toml file that exists"]),
        ("float8", f"{'x' * 300}.toml", ["a .toml file that exists"]),
        ("activation_checkpoint", "fulll", ["activation_checkpoint.recipe", 'did you mean "full"?']),
        ("activation_checkpoint", "zzz", ["see `titanlite recipes activation_checkpoint`"]),
        ("model", "llama3-8b", ['model.flavor = "8b"', 'mean "8B"?']),
        ("model", "8B", ['model.flavor = "8B"', "want: one of llama3-8B, qwen3-8B, or model/8B.toml"]),
        ("model", "1B", ["want: one of gemma3-1B, llama3-1B, or model/1B.toml"]),
        ("model", "mine-small", ['"small"\n      want: model/mine-small.toml in a folder of job.recipe_dirs']),
        ("model", "llama3-7B", ["one of 1B, 3B, 405B, 70B, 8B, debug", "see `titanlite recipes model`"]),
        ("float8", "fp8", ["one of none, blockwise, rowwise", "see `titanlite recipes float8`"]),
        ("activation_checkpoint", "ful", ['did you mean "full"?']),
    ],
)
def test_an_unknown_name_lists_the_choices(kind: Kind, name: str, parts: list[str]) -> None:
    said = message(kind, name)
    for part in parts:
        assert part in said


def test_a_recipe_is_also_found_by_its_path(tmp_path: Path) -> None:
    path = write(tmp_path, "float8", "mine", FLOAT8)
    assert load("float8", str(path)).input.output == "tensor"


def test_the_users_own_recipes_have_names_too(tmp_path: Path) -> None:
    write(tmp_path, "float8", "mine", 'extends = "rowwise"\nhelp = "mine"\n[accumulation]\noutput = "split"\n')
    mine, shipped = load("float8", "mine", (str(tmp_path),)), load("float8", "rowwise")
    assert mine == replace(shipped, help="mine", accumulation=replace(shipped.accumulation, output="split"))
    assert names("float8", (str(tmp_path),)) == [*names("float8"), "mine"]
    assert names("model", (str(tmp_path),)) == names("model")


def test_an_unknown_name_lists_those_of_the_users_folders(tmp_path: Path) -> None:
    write(tmp_path, "float8", "mine", 'extends = "rowwise"\n')
    write(tmp_path, "model", "mine-small", 'extends = "llama3-8B"\n')
    assert "tensorwise, mine, or a .toml file" in message("float8", "zzz", (str(tmp_path),))
    said = message("model", "llama3-zzz", (str(tmp_path),))
    assert "model/llama3-zzz.toml in a folder of job.recipe_dirs, which have mine-small" in said


def test_a_list_of_tables_is_shown_as_one(tmp_path: Path) -> None:
    path = write(tmp_path, "float8", "mine", 'extends = "rowwise"\n[[rules]]\nop = "matmul"\n[[rules]]\nop = "cast"\n')
    assert "line 2  rules = […, …]\n" in message("float8", path)


def test_a_folder_of_recipes_without_a_kind_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, "float8", "mine", 'extends = "rowwise"\n')
    for folder, fix in ((path.parent, f"name the folder above it, {tmp_path}"), (tmp_path / "odd", "move each")):
        folder.mkdir(exist_ok=True)
        want = "a folder with a subfolder model or float8 or activation_checkpoint"
        with pytest.raises(RecipeError, match=want) as error:
            load("float8", "rowwise", (str(folder),))
        assert f'job.recipe_dirs = "{folder}"' in str(error.value)
        assert f"fix:  {fix}" in str(error.value)


def test_a_name_is_used_once_and_a_folder_exists(tmp_path: Path) -> None:
    write(tmp_path, "float8", "rowwise", FLOAT8)
    said = message("float8", "tensorwise", (str(tmp_path), str(tmp_path / "nowhere")))
    assert "2 problems" in said
    assert "a name of its own; " in said
    assert "fix:  rename rowwise.toml" in said
    assert "a folder that exists" in said
    assert "a folder that exists" in message("float8", "tensorwise", ("x" * 300,))


def test_a_folder_may_be_named_twice_and_be_the_shipped_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a checkout one's own recipes may stand beside the shipped ones; docs/models.md says so."""
    (tmp_path / "link").symlink_to(shipped_folder("recipes"))
    write(tmp_path / "mine", "float8", "mine", FLOAT8)
    monkeypatch.chdir(shipped_folder("recipes").parent)
    dirs = (shipped_folder("recipes").name, str(tmp_path / "link"), str(tmp_path / "mine"), str(tmp_path / "mine"))
    for kind in KINDS:
        assert names(kind, dirs) == names(kind) + ["mine"] * (kind == "float8")


def test_extends_by_path_is_relative_to_the_file(tmp_path: Path) -> None:
    write(tmp_path, "a", "base", FLOAT8)
    path = write(tmp_path, "b", "mine", 'extends = ["../a/base.toml"]\nscale_rounding = "pow2_floor"\n')
    assert load("float8", str(path)).scale_rounding == "pow2_floor"


def test_a_circle_of_extends_is_shown(tmp_path: Path) -> None:
    a = write(tmp_path, "float8", "a", 'extends = "b"')
    b = write(tmp_path, "float8", "b", 'extends = "a"')
    with pytest.raises(ConfigError, match=f"{a} → {b} → {a}"):
        load("float8", "a", (str(tmp_path),))


def test_an_unknown_base_lists_the_choices(tmp_path: Path) -> None:
    path = write(tmp_path, "model", "llama3-mine", 'help = "mine"\nextends = "llama3-8b"')
    said = message("model", path)
    assert f'{path}: 1 problem\n  line 2  extends = "llama3-8b"' in said
    assert 'did you mean "llama3-8B"?' in said


def test_all_problems_of_a_file_at_once_with_lines(tmp_path: Path) -> None:
    text = FLOAT8.replace('"exact"', '"exactly"').replace("[weight]\n", "[weight]\ndtyp = 1\n")
    path = write(tmp_path, "float8", "mine", text.replace('grad_weight = "split"\n', "") + "\n[inputt]\n")
    assert message("float8", path).splitlines()[::3] == [
        f"{path}: 4 problems",
        *['      fix:  did you mean "exact"?', "      fix:  did you mean weight.dtype?"],
        *["      fix:  add grad_weight = …", "      fix:  did you mean input?"],
    ]
    for part in (
        'line 2  scale_rounding = "exactly"',
        "line 8  weight.dtyp = 1",
        "line 16  accumulation.grad_weight\n",
    ):
        assert part in message("float8", path)


def test_two_granularities_may_meet_in_one_matmul(tmp_path: Path) -> None:
    text = FLOAT8.replace('output = "tensor"', 'output = "row"', 1)
    assert load("float8", str(write(tmp_path, "float8", "mine", text))).input.output == "row"


def test_a_float8_all_gather_of_one_scale_needs_no_powers_of_two(tmp_path: Path) -> None:
    text = 'extends = "tensorwise"\nscale_rounding = "pow2_floor"\n'
    assert load("float8", str(write(tmp_path, "float8", "mine", text)))


def test_blocks_are_whole(tmp_path: Path) -> None:
    said = message("float8", write(tmp_path, "float8", "mine", 'extends = "blockwise"\ndim_multiple = 16\n'))
    assert "line 2  dim_multiple = 16\n" in said
    assert "fix:  dim_multiple = 128" in said


def test_blocks_may_be_changed_within_the_rules(tmp_path: Path) -> None:
    text = 'extends = "blockwise"\nscale_rounding = "pow2_floor"\n[grad_output]\ndtype = "e5m2"\n'
    recipe = load("float8", str(write(tmp_path, "float8", "mine", text)))
    assert recipe == replace(load("float8", "blockwise"), scale_rounding="pow2_floor", grad_output=recipe.grad_output)
    assert recipe.grad_output.dtype == "e5m2"


def test_rules_that_leave_something_to_later_rules_are_legal(tmp_path: Path) -> None:
    rules = """
    [[rules]]
    op = "matmul"
    module = ["wqkv"]
    action = "save"
    [[rules]]
    op = "matmul"
    every = 2
    action = "save"
    [[rules]]
    op = "matmul"
    action = "recompute"
    [[rules]]
    op = "aten.max.default"
    action = "save"
    optional = true
    """
    path = write(tmp_path, "activation_checkpoint", "mine", SAVE_LIST + rules)
    assert [r.every for r in load("activation_checkpoint", str(path)).rules] == [1, 2, 1, 1]


@pytest.mark.parametrize(
    ("layers", "meant"),
    [
        ("3", 'layers = "3:4"'),
        ('"3"', 'layers = "3:4"'),
        ('"0-1"', 'layers = "0:2"'),
        ('"first"', 'layers = "0:2", which is the first two blocks'),
    ],
)
def test_blocks_that_are_no_slice_are_proposed_as_one(layers: str, meant: str, tmp_path: Path) -> None:
    rule = f'[[rules]]\nop = "matmul"\naction = "save"\nlayers = {layers}\n'
    path = write(tmp_path, "activation_checkpoint", "mine", SAVE_LIST + rule)
    assert f"fix:  {meant}\n" in message("activation_checkpoint", path) + "\n"


def test_a_save_list_extends_another(tmp_path: Path) -> None:
    rules = '[[rules]]\nop = "statistics"\naction = "save"\n'
    path = write(tmp_path, "activation_checkpoint", "mine", 'extends = "balanced"\nhelp = "mine"\n')
    assert load("activation_checkpoint", str(path)) == replace(load("activation_checkpoint", "balanced"), help="mine")
    path.write_text(path.read_text() + rules)  # a list is replaced whole: which rule is first decides
    assert [rule.op for rule in load("activation_checkpoint", str(path)).rules] == ["statistics"]


def test_a_model_of_the_config_is_its_flavor_and_the_overrides(tmp_path: Path) -> None:
    assert model_dims(Config()) == load("model", "llama3-8B")
    changed = model_dims(replace(Config(), model=Model(flavor="1B", n_layers=2, rope_theta=1e4)))
    assert changed == replace(load("model", "llama3-1B"), n_layers=2, rope_theta=1e4)
    write(tmp_path, "model", "llama3-mine", 'extends = "llama3-debug"\nn_layers = 6\n')
    mine = replace(Config(), model=Model(flavor="mine"), job=Job(recipe_dirs=(str(tmp_path),)))
    assert model_dims(mine) == replace(load("model", "llama3-debug"), n_layers=6)


def test_a_model_of_no_layers_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, "model", "llama3-mine", 'extends = "llama3-debug"\nn_layers = 0\nnorm_eps = -1.0\n')
    said = message("model", path)
    assert "line 2  n_layers = 0" in said
    assert "line 3  norm_eps = -1.0" in said


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("top_k = 200", "experts.top_k = 200\n      want: at most experts.n_experts = 128"),
        ("ffn_dim = 200", "experts.ffn_dim = 200\n      want: a multiple of 128\n      fix:  ffn_dim = 256"),
        ("scale = 0.0", "experts.scale = 0.0\n      want: a number, above 0"),
        ("balance_loss = -1.0", "experts.balance_loss = -1.0\n      want: a number, at least 0"),
        ("z_loss = inf", "experts.z_loss = inf\n"),
        ('score = "softmax_of_chosen"\nnormalised = false', "experts.normalised = false\n      want: true beside"),
        ('score = "top"', "experts.score"),
    ],
)
def test_experts_that_cannot_be(given: str, says: str, tmp_path: Path) -> None:
    path = write(tmp_path, "model", "mine", f'extends = "qwen3_moe-30B-A3B"\n[experts]\n{given}\n')
    assert says in message("model", path)
    assert "1 problem\n" in message("model", path)


def test_a_dense_model_has_a_feed_forward_and_a_mixture_none(tmp_path: Path) -> None:
    text = shipped_folder("recipes").joinpath("model/qwen3-debug.toml").read_text()
    path = write(tmp_path, "model", "qwen3-none", text.replace("ffn_dim = 512\n", ""))
    assert "ffn_dim\n      want: a whole number; it is missing" in message("model", path)
    write(tmp_path, "model", "qwen3-sparse", 'extends = "qwen3_moe-debug"\n')
    write(tmp_path, "model", "qwen3_moe-both", 'extends = "qwen3_moe-debug"\nffn_dim = 256\n')
    for name, flavor, key in (("qwen3", "sparse", "experts"), ("qwen3_moe", "both", "ffn_dim")):
        config = Config(model=Model(name=name, flavor=flavor), job=Job(recipe_dirs=(str(tmp_path),)))
        with pytest.raises(
            RecipeError, match=f"no such key in the recipe {name}-{flavor}: {name} does not use it"
        ) as e:
            model_dims(config)
        assert key in str(e.value)
