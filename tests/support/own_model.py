"""A model file of one's own: a copy of a shipped one with other lines."""

import inspect
from pathlib import Path
from types import ModuleType

from titanlite.models import llama3

Change = tuple[str, str]


def mine(folder: Path, *changes: Change, of: ModuleType = llama3) -> list[str]:
    """Flags for a copy of a model's file with other lines."""
    text = inspect.getsource(of)
    for class_name in ("Llama3", "GPT2"):
        text = text.replace(class_name, "Mine")
    for line, instead in changes:
        assert line in text
        text = text.replace(line, instead)
    (folder / "mine.py").write_text(text)
    (folder / "model").mkdir()
    recipe = Path(__file__).parents[2] / "recipes" / "model" / f"{of.__name__.rpartition('.')[2]}-debug.toml"
    (folder / "model" / "mine-small.toml").write_text(recipe.read_text())
    return [f"--model.file={folder}/mine.py", "--model.flavor=small", f"--job.recipe_dirs={folder}"]
