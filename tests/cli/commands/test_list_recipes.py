"""`titanlite recipes` lists what there is, and prints one recipe as it was understood."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import tomli

from tests.cli.commands.conftest import Call
from titanlite.commands import main
from titanlite.commands.recipes import _KINDS
from titanlite.config.architectures import ARCHITECTURES
from titanlite.config.build import from_table
from titanlite.config.hugging_face import config_json
from titanlite.config.own_groups import optimizer_recipe
from titanlite.config.problems import Origin, Problems
from titanlite.config.recipe_schema import OptimizerRecipe
from titanlite.config.schema import Config, Job, Model
from titanlite.recipes import load, model_dims, names


def test_all_kinds_and_names_with_their_help(call: Call) -> None:
    everything = call("recipes")
    for kind in _KINDS:
        listing = call("recipes", kind)
        assert listing in everything
        assert listing.startswith(f"{kind}\n")
        for name in names(kind):
            assert f"\n  {name} " in listing
            assert load(kind, name).help.split()[-1] in listing
        assert max(map(len, listing.splitlines())) <= 100


@pytest.mark.parametrize("kind", _KINDS)
def test_a_recipe_in_full_reads_back_as_itself(capsys: pytest.CaptureFixture[str], kind: str) -> None:
    for name in names(kind):
        assert main(["recipes", kind, name]) == 0
        recipe, problems = load(kind, name), Problems(Origin("output"))
        table = tomli.loads(capsys.readouterr().out)
        is_optimizer = isinstance(recipe, OptimizerRecipe)
        read = optimizer_recipe(table, {}, problems) if is_optimizer else from_table(type(recipe), table, problems)
        assert read == recipe


@pytest.mark.parametrize("name", names("model"))
def test_the_recipe_of_a_folder_is_what_was_exported(name: str, tmp_path: Path, call: Call) -> None:
    architecture, sizes = name.partition("-")[0], load("model", name)
    (tmp_path / "config.json").write_text(
        json.dumps(config_json(ARCHITECTURES[architecture], sizes, 64, "bfloat16", 0))
    )
    printed = call("recipes", "model", "--from", str(tmp_path))
    where = f"# save as model/{architecture}-NAME.toml in a folder of job.recipe_dirs; "
    assert printed.startswith(f'{where}then model.name = "{architecture}", model.flavor = "NAME"\n')
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / f"{architecture}-mine.toml").write_text(printed)
    config = Config(
        model=Model(name=architecture, flavor="mine"),
        job=Job(recipe_dirs=(str(tmp_path),)),
    )
    # A head's width is said, also where it is dim / n_heads.
    said = replace(sizes, head_dim=sizes.head_width) if architecture in ("qwen3", "gemma3", "qwen3_moe") else sizes
    if said.experts is not None:  # of which no config.json says z_loss, or that there is a bias
        said = replace(said, experts=replace(said.experts, z_loss=0.0, balance_bias=0.0))
    assert replace(model_dims(config), help="", refs=()) == replace(said, help="", refs=())


def test_ones_own_folders(tmp_path: Path, call: Call) -> None:
    for kind, base in (("float8", "rowwise"), ("activation_checkpoint", "full")):
        (tmp_path / kind).mkdir()
        (tmp_path / kind / "mine.toml").write_text(f'extends = "{base}"\nhelp = "Of my own."\n')
    for argv in ([], ["float8"], ["float8", "mine"]):
        assert "Of my own." in call("recipes", *argv, "--job.recipe_dirs", str(tmp_path))
    assert main(["recipes", "float8", "mine"]) == 2


def test_a_recipe_with_a_mistake_is_named_beside_the_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "optimizer").mkdir()
    for name, text in (("good", 'extends = "adamw"\nhelp = "Fine."\n'), ("bad", 'extends = "adamv"\n')):
        (tmp_path / "optimizer" / f"{name}.toml").write_text(text)
    assert main(["recipes", "optimizer", "--job.recipe_dirs", str(tmp_path)]) == 2
    out, error = capsys.readouterr()
    assert "Fine." in out
    assert "normuon" in out
    assert 'did you mean "adamw"?' in error
    assert str(tmp_path / "optimizer" / "bad.toml") in error


@pytest.mark.parametrize(("kind", "name"), [("float8", "none"), ("activation_checkpoint", "auto")])
def test_names_without_a_file_are_listed_and_explained(kind: str, name: str, call: Call) -> None:
    assert f"\n  {name} " in call("recipes", kind)
    assert call("recipes", kind, name).startswith(f"# {kind} recipe {name}: ")
