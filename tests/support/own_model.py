"""A model file of one's own: a copy of Llama's with other lines."""

import inspect
from pathlib import Path

from titanlite.models import llama3

Change = tuple[str, str]


def mine(folder: Path, *changes: Change) -> list[str]:
    """Flags for a copy of Llama's file with other lines."""
    text = inspect.getsource(llama3).replace("Llama3", "Mine")
    for line, instead in changes:
        assert line in text
        text = text.replace(line, instead)
    (folder / "mine.py").write_text(text)
    (folder / "model").mkdir()
    recipe = Path(__file__).parents[2] / "recipes" / "model" / "llama3-debug.toml"
    (folder / "model" / "mine-small.toml").write_text(recipe.read_text())
    return [f"--model.file={folder}/mine.py", "--model.flavor=small", f"--job.recipe_dirs={folder}"]
