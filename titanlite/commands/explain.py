"""Explain where the time of a run's steps went, and its memory; of two runs, what changed and what did it.

Reads the profile of a run that was trained with `--profiling.enable true`: the summaries of all ranks in
its `profile/`. The parts of a step sum to its wall time. A picture of one step of all ranks is drawn beside them.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from titanlite.commands.arguments import Command
from titanlite.observe.metrics import RunError
from titanlite.preflight.output_file import require_picture, writable

COMMAND = Command(
    "explain",
    __doc__ or "",
    {
        "RUN": "run folder, <dump_folder>/<name>; two of them to see what changed from the first to the second",
        "--out FILE": "file for the picture; default: timeline.png in the profile/ of each run",
        "--step N": "the step to draw; default: the profiled one that took the median time",
    },
    takes="RUN [RUN]",
)


def run(argv: Sequence[str]) -> int:
    """Carry out the command.

    Raises:
        ConfigError: a flag is unknown or has no value.
        RunError: there are not one or two runs, one has no whole profile, or the picture cannot be written.
        SystemExit: with 0, after `--help`.
    """
    words, given = COMMAND.read_words(argv)
    if len(words) not in (1, 2):
        want = "one run with a profile, or two"
        raise RunError.of("titanlite explain", "RUN", " ".join(words), want, "titanlite explain outputs/run")
    step = given.get("--step", "")
    if step and not step.isdecimal():
        raise RunError.of("titanlite explain", "--step", step, "the number of a step", "--step 11")
    from titanlite.explain.profiled import read_profiled
    from titanlite.explain.run_paths import require_profiles
    from titanlite.explain.tables import median_step, run_text, two_runs_text
    from titanlite.explain.timeline import draw_timeline

    require_profiles([Path(word) for word in words])
    if "--out" in given:
        require_picture("titanlite explain", Path(given["--out"]), "timeline.png")
    runs = [read_profiled(Path(word)) for word in words]
    text = run_text(runs[0]) if len(runs) == 1 else two_runs_text(*runs)
    last = len(runs) - 1
    pictures = {i: Path(words[i]) / "profile" / "timeline.png" for i in range(len(runs))}
    if "--out" in given:  # of two runs, the second is the one in question
        pictures = {last: Path(given["--out"])}
    for i, path in pictures.items():
        with writable("titanlite explain", "--out", path):
            draw_timeline(runs[i], int(step) if step else median_step(runs[i]), path)
    sys.stdout.write(text + "".join(f"{path}\n" for path in pictures.values()))
    return 0
