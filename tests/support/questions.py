"""A multiple-choice task of the interpreter's own library: how does this line go on?"""

import json
import random
import textwrap
from pathlib import Path


def write_questions(path: Path, n: int = 200, seed: int = 0) -> Path:
    """Write a task: contexts of one word to several lines, and four continuations of which one is the file's own."""
    lines = [line.strip() for line in Path(textwrap.__file__).read_text().splitlines() if len(line.split()) > 4]
    draw, rows = random.Random(seed), []
    for number in range(n):
        words = draw.choice(lines).split()
        cut = draw.randrange(1, len(words))
        before = "\n".join(draw.sample(lines, number % 4))
        others = [" ".join(draw.choice(lines).split()[: draw.randrange(1, 6)]) for _ in range(3)]
        gold = draw.randrange(4)
        choices = [*others[:gold], " ".join(words[cut:]), *others[gold:]]
        rows.append({"query": f"{before}\n{' '.join(words[:cut])}".strip(), "choices": choices, "gold": gold})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
