"""A multiple-choice task of the interpreter's own library: how does this line go on?"""

import argparse
import json
import random
from pathlib import Path


def write_questions(path: Path, n: int = 200, seed: int = 0) -> Path:
    """Write a task: contexts of one word to several lines, and four continuations of which one is the file's own."""
    text = Path(argparse.__file__).read_text()
    lines = sorted({line.strip() for line in text.splitlines() if 4 < len(line.split()) < 12})
    draw, rows = random.Random(seed), []
    for number, line in enumerate(draw.sample(lines, n)):  # each once: lm-eval mixes up one text that is cut twice
        words = line.split()
        cut = draw.randrange(1, len(words))
        before = "\n".join(draw.sample(lines, number % 4))
        others = [" ".join(draw.choice(lines).split()[: draw.randrange(1, 6)]) for _ in range(3)]
        gold = draw.randrange(4)
        choices = [*others[:gold], " ".join(words[cut:]), *others[gold:]]
        rows.append({"query": f"{before}\n{' '.join(words[:cut])}".strip(), "choices": choices, "gold": gold})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
