"""What pip installs: the package with its configs and recipes, found wherever it lies."""

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    flags = ["--no-deps", "--no-build-isolation", "--disable-pip-version-check", "--quiet"]
    subprocess.run([sys.executable, "-m", "pip", "wheel", *flags, "-w", folder, REPOSITORY], check=True)
    (built,) = folder.glob("titanlite-*.whl")
    return built


@pytest.fixture(scope="module")
def site(wheel: Path) -> Path:
    """A folder with the wheel installed, as in site-packages; what it depends on is where it is."""
    folder = wheel.parent / "site"
    flags = ["--no-deps", "--no-index", "--disable-pip-version-check", "--quiet"]
    subprocess.run([sys.executable, "-m", "pip", "install", *flags, "--target", folder, wheel], check=True)
    return folder


def titanlite(site: Path, *args: str) -> str:
    """Run the installed command far from the checkout, and return what it prints."""
    environment = os.environ | {"PYTHONPATH": str(site)}
    command = [sys.executable, "-P", site / "bin" / "titanlite", *args]
    ended = subprocess.run(command, cwd=site.parent, env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_wheel_carries_configs_and_recipes(wheel: Path) -> None:
    inside = set(zipfile.ZipFile(wheel).namelist())
    shipped = [
        p.relative_to(REPOSITORY) for kind in ("configs", "recipes") for p in (REPOSITORY / kind).rglob("*.toml")
    ]
    modules = [p.relative_to(REPOSITORY) for p in (REPOSITORY / "titanlite").rglob("*.py")]
    page = [p.relative_to(REPOSITORY) for p in (REPOSITORY / "titanlite/comparison/page").iterdir()]
    assert any(path.name == "uPlot.LICENSE" for path in page)
    assert len(shipped) > 10
    assert {f"titanlite/_shipped/{path}" for path in shipped} <= inside
    assert {str(path) for path in modules + page} <= inside
    assert not [name for name in inside if name.startswith(("tests/", "scripts/", "configs/", "recipes/"))]


def test_installed_command_lists_its_own_recipes(site: Path) -> None:
    listed = titanlite(site, "recipes", "float8")
    for recipe in (REPOSITORY / "recipes" / "float8").glob("*.toml"):
        assert f"  {recipe.stem} " in listed


def test_installed_command_validates_its_own_configs(site: Path) -> None:
    config = site / "titanlite" / "_shipped" / "configs" / "debug.toml"
    said = titanlite(site, "validate", str(config), "--world", "4", "--float8.recipe", "rowwise")
    assert f"{config}: no problems" in said
    assert "1,705,216 parameters" in said


@pytest.mark.slow  # all of its modules, configs and recipes are there, as the tests above hold
def test_installed_package_trains(site: Path, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("Of all that is, this is the least. " * 200)
    config = site / "titanlite" / "_shipped" / "configs" / "debug.toml"
    flags = "--data.source=text.txt --data.cache_dir=cache --training.seq_len=32 --training.steps=2 "
    flags += "--lr_scheduler.warmup_steps=1 --compile.enable=false --validation.enable=false --checkpoint.enable=false "
    flags += "--model.n_layers=1 --model.dim=64 --model.ffn_dim=128"
    ended = subprocess.run(
        [sys.executable, "-m", "titanlite.train", "--config", config, *flags.split()],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert json.loads((tmp_path / "outputs" / "debug" / "status.json").read_text())["state"] == "finished"
