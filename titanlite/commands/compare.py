"""Compare runs: plot their loss curves, tabulate results, and show how their configs differ.

Reads only run folders (`metrics.jsonl`, `config.toml`, `status.json`), so it works on runs that are still going, were
copied from elsewhere or were made by another version.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from titanlite.commands.arguments import Command
from titanlite.comparison.picture import draw_losses
from titanlite.comparison.runs import RESULTS, RunRecord, config_differences, read_runs, results
from titanlite.observe.metrics import RunError
from titanlite.text_table import columns

_COMMAND = Command(
    "compare",
    __doc__ or "",
    {
        "RUN": "run folder, <dump_folder>/<name>; one or more",
        "--out FILE": "file for the plot; default: loss.png in the folder of a single run, else compare.png here",
    },
    takes="RUN [RUN ...]",
)


def run(argv: Sequence[str]) -> int:
    """Carry out the command.

    Raises:
        ConfigError: a flag is unknown or has no value.
        RunError: a path is not a run's folder, or no run has logged anything, all problems at once; a file of a run is
            damaged; or `out` names no kind of picture or cannot be written.
        SystemExit: with 0, after `--help`.
    """
    words, given = _COMMAND.read_words(argv)
    folders = [Path(word) for word in words]
    records = read_runs(folders)
    out = Path(given.get("--out", folders[0] / "loss.png" if len(folders) == 1 else "compare.png"))
    try:
        draw_losses([(record.name, record.steps, record.validations) for record in records], out)
    except OSError as error:
        saw, want = f"{out} ({error.strerror or error})", "a file that can be written"
        raise RunError.of("titanlite compare", "--out", saw, want, "--out with a path in a folder of yours") from None
    sys.stdout.write(_tables(records, out))
    return 0


def _tables(records: Sequence[RunRecord], out: Path) -> str:
    """Return the tables and the path of the picture."""
    text = columns(RESULTS, *map(results, records))
    if rows := config_differences(records):
        text += columns(("config", *(record.name for record in records)), *((key, *values) for key, values in rows))
    elif len(records) > 1:
        text += "the configs are the same\n"
    return f"{text}{out}\n"
