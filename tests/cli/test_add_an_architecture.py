"""An architecture is a model file, its sizes, and one row of a table."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MODEL = '''"""A copy of Llama 3, by another name."""

from titanlite.models.llama3 import Llama3


class Mine(Llama3):
    """As Llama 3."""
'''
ROW = """
from dataclasses import replace
ARCHITECTURES["mine"] = replace(ARCHITECTURES["llama3"], class_name="Mine")
"""


@pytest.mark.slow
def test_a_model_file_a_recipe_and_a_row(tmp_path: Path) -> None:
    for folder in ("titanlite", "recipes", "configs"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "titanlite/models/mine.py").write_text(MODEL)
    shutil.copy(ROOT / "recipes/model/llama3-debug.toml", tmp_path / "recipes/model/mine-debug.toml")
    with (tmp_path / "titanlite/config/architectures.py").open("a") as table:
        table.write(ROW)

    def titanlite(*words: str) -> str:
        command = [sys.executable, "-m", "titanlite", *words]
        environment = {**os.environ, "PYTHONPATH": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""}
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert "mine-debug" in titanlite("recipes", "model")
    assert '"mine"' in titanlite("schema")
    text = tmp_path / "text.txt"
    text.write_text("All models are wrong, some are useful. " * 500)
    of_run = ["configs/debug.toml", "--model.name", "mine", "--data.source", str(text), "--training.steps", "2"]
    of_run += ["--parallelism.tensor_parallel_degree", "2", "--metrics.wandb", "off", "--validation.enable", "false"]
    titanlite("train", *of_run, "--checkpoint.interval", "2", "--lr_scheduler.warmup_steps", "1", "--gpus", "2")
    titanlite("export", "outputs/debug", "--out", "exported")
    assert (tmp_path / "exported/model.safetensors").is_file()
