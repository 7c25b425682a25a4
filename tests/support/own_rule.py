"""The update rule and the recipe that the documentation shows, as files."""

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "how_to" / "own_optimizer.md"
FILE = re.compile(r'^```\w+ title="([^"]+)"\n(.*?)^```$', re.MULTILINE | re.DOTALL)


def lion(folder: Path, *changes: tuple[str, str]) -> list[str]:
    """Flags for the page's rule, with other lines in its two files."""
    texts = {Path(title).name: text for title, text in FILE.findall(PAGE.read_text())}
    for line, instead in changes:
        (name,) = [name for name, text in texts.items() if line in text]
        texts[name] = texts[name].replace(line, instead)
    (folder / "optimizer").mkdir(exist_ok=True)
    (folder / "lion.py").write_text(texts["lion.py"])
    (folder / "optimizer" / "lion.toml").write_text(texts["lion.toml"])
    flags = {"optimizer.file": folder / "lion.py", "optimizer.recipe": "lion", "job.recipe_dirs": folder}
    return [f"--{key}={value}" for key, value in flags.items()]
