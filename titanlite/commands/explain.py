"""Explain where the time of a run's steps went on every rank, the largest loss, and the peak memory.

Reads the profile of a run that was trained with `--profiling.enable true`: the summaries of all ranks in
its `profile/`. The parts of a step sum to its wall time. A picture of one step on all ranks is drawn into `profile/`.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from titanlite.commands.arguments import Command
from titanlite.observe.metrics import RunError
from titanlite.preflight.output_file import require_picture, writable
from titanlite.text_table import folded, terminal_width

COMMAND = Command(
    "explain",
    __doc__ or "",
    {
        "RUN": "run folder, <dump_folder>/<name>",
        "--out FILE": "file for the picture; default: timeline.png in the profile/ of the run",
        "--step N": "the step to draw; default: the profiled one that took the median time",
    },
    takes="RUN",
)


def run(argv: Sequence[str]) -> int:
    """Print the tables of time and memory, and draw one step as a picture."""
    word, given = COMMAND.read_word(argv, "one run with a profile", "outputs/run")
    step = given.get("--step", "")
    if step and not step.isdecimal():
        raise RunError.of("titanlite explain", "--step", step, "the number of a step", "--step 11")
    from titanlite.explain.profiled import read_profiled
    from titanlite.explain.tables import run_text
    from titanlite.explain.timeline import draw_timeline

    folder = Path(word)
    picture = Path(given.get("--out", folder / "profile" / "timeline.png"))
    require_picture("titanlite explain", picture, "timeline.png")
    profiled = read_profiled(folder)
    text = run_text(profiled)
    with writable("titanlite explain", "--out", picture):
        draw_timeline(profiled, int(step) if step else profiled.median_step, picture)
    sys.stdout.write(folded(f"{text}{picture}\n", terminal_width()))
    return 0
