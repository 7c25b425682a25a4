"""Compare runs: plot their loss curves, tabulate results, and show how their configs differ.

Reads only run folders (`metrics.jsonl`, `config.toml`, `status.json`, `receipt.json`), so it works on runs that are
still going, were copied from elsewhere or were made by another version.
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from titanlite.commands.arguments import Command
from titanlite.comparison.picture import draw_losses
from titanlite.comparison.report import write_report
from titanlite.comparison.runs import RunRecord, read_runs
from titanlite.comparison.tables import RESULTS, config_differences, results
from titanlite.observe.metrics import RunError
from titanlite.text_table import columns

_COMMAND = Command(
    "compare",
    __doc__ or "",
    {
        "RUN": "run folder, <dump_folder>/<name>; one or more",
        "--out FILE": "file for the plot; default: loss.png in the folder of a single run, else compare.png here",
        "--report FILE.html": "file for a report with charts of all metrics, which a browser shows without a network",
    },
    takes="RUN [RUN ...]",
)


def run(argv: Sequence[str]) -> int:
    """Carry out the command.

    Raises:
        ConfigError: a flag is unknown or has no value.
        RunError: a path is not a run's folder, or no run has logged anything, all problems at once; a file of a run is
            damaged; or a file cannot be written, or its ending names no kind of picture or page.
        SystemExit: with 0, after `--help`.
    """
    words, given = _COMMAND.read_words(argv)
    folders = [Path(word) for word in words]
    records = read_runs(folders)
    out = Path(given.get("--out", folders[0] / "loss.png" if len(folders) == 1 else "compare.png"))
    report = Path(given["--report"]) if "--report" in given else None
    if report is not None and report.suffix.lower() not in (".html", ".htm"):
        saw, want = str(report), "a file whose ending is html"
        raise RunError.of("titanlite compare", "--report", saw, want, "--report compare.html")
    with _writable("--out", out):
        draw_losses(records, out)
    if report is not None:
        with _writable("--report", report):
            write_report(records, report)
    sys.stdout.write(_tables(records) + "".join(f"{path}\n" for path in (out, report) if path is not None))
    return 0


@contextmanager
def _writable(flag: str, path: Path) -> Iterator[None]:
    """Tell a failure to write a file as one of the flag that names it."""
    try:
        yield
    except OSError as error:
        saw, want = f"{path} ({error.strerror or error})", "a file that can be written"
        fix = f"{flag} with a path in a folder of yours"
        raise RunError.of("titanlite compare", flag, saw, want, fix) from None


def _tables(records: Sequence[RunRecord]) -> str:
    """Return the tables of results and of what differs in the configs."""
    text = columns(RESULTS, *map(results, records))
    if rows := config_differences(records):
        text += columns(("config", *(record.name for record in records)), *((key, *values) for key, values in rows))
    elif len(records) > 1:
        text += "the configs are the same\n"
    return text
