"""What pip installs: the package with its configs and recipes, found wherever it lies, and what it runs without."""

import os
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

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


@pytest.fixture(scope="module")
def plain(site: Path) -> Path:
    """A folder whose `sitecustomize` hides what pip would not install with the wheel: all that only extras bring."""
    wanted, found = (
        [*(metadata.Distribution.at(next(site.glob("titanlite-*.dist-info"))).requires or ())],
        {"titanlite"},
    )
    for requirement in map(Requirement, wanted):
        name = canonicalize_name(requirement.name)
        if name not in found and (requirement.marker is None or requirement.marker.evaluate({"extra": ""})):
            found.add(name)
            wanted += metadata.requires(name) or ()
    modules = metadata.packages_distributions().items()
    hidden = {module for module, names in modules if not found & {*map(canonicalize_name, names)}}
    (folder := site.parent / "plain").mkdir()
    (folder / "sitecustomize.py").write_text(f"""
import sys
from importlib.machinery import PathFinder

class Installed(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in {hidden} else super().find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = Installed
""")
    return folder


def titanlite(site: Path, plain: Path, *args: str, code: int = 0) -> str:
    """Run the installed command, far from the checkout and without extras, and return what it prints."""
    environment = os.environ | {"PYTHONPATH": f"{plain}{os.pathsep}{site}"}
    command = [sys.executable, "-P", site / "bin" / "titanlite", *args]
    ended = subprocess.run(command, cwd=site.parent, env=environment, capture_output=True, text=True)
    assert ended.returncode == code, ended.stderr
    return ended.stderr if code else ended.stdout


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


def test_installed_command_lists_its_own_recipes(site: Path, plain: Path) -> None:
    listed = titanlite(site, plain, "recipes", "float8")
    for recipe in (REPOSITORY / "recipes" / "float8").glob("*.toml"):
        assert f"  {recipe.stem} " in listed


def test_installed_command_validates_its_own_configs(site: Path, plain: Path) -> None:
    config = site / "titanlite" / "_shipped" / "configs" / "debug.toml"
    said = titanlite(site, plain, "validate", str(config), "--world", "4", "--float8.recipe", "rowwise")
    assert f"{config}: no problems" in said
    assert "1,705,216 parameters" in said


def test_installed_package_plans_trains_and_generates_without_extras(site: Path, plain: Path) -> None:
    (site.parent / "text.txt").write_text("Of all that is, this is the least. " * 200)
    config = str(site / "titanlite" / "_shipped" / "configs" / "debug.toml")
    flags = "--data.source=text.txt --data.cache_dir=cache --training.seq_len=32 --training.steps=2 "
    flags += "--lr_scheduler.warmup_steps=1 --compile.enable=false --validation.enable=false "
    flags += "--model.n_layers=1 --model.dim=64 --model.ffn_dim=128"
    assert "reduce_scatter" in titanlite(site, plain, "plan", config, "--world", "2", *flags.split())
    assert "step 2/2" in titanlite(site, plain, "train", config, "--gpus", "1", *flags.split())
    assert titanlite(site, plain, "generate", "outputs/debug", "--prompt", "Of all").startswith("Of all")
    assert "pip install 'titanlite[plot]'" in titanlite(site, plain, "compare", "outputs/debug", code=2)
