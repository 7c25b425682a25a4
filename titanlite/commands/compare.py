"""Compare runs: plot their loss curves, tabulate results, and show how their configs differ.

Reads only run folders (`metrics.jsonl`, `config.toml`, `status.json`), so it works on runs that are still going, were
copied from elsewhere or were made by another version.
"""

import json
import os
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli

from titanlite.commands.arguments import Command
from titanlite.commands.loss_picture import draw_losses
from titanlite.errors import Problem, describe
from titanlite.json_file import read_json
from titanlite.observe.metrics import RunError, read_metrics
from titanlite.preflight.same_run import dotted
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


@dataclass(frozen=True)
class RunRecord:
    """The content of one run folder."""

    name: str
    steps: list[dict[str, Any]]  # rows of logged steps
    validations: list[dict[str, Any]]
    config: dict[str, Any]  # dotted key → value
    state: str  # of status.json; "" if there is none


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


def read_runs(folders: Sequence[Path]) -> list[RunRecord]:
    """Read run folders.

    Returns:
        A record per folder, in the same order, with names that differ.

    Raises:
        RunError: something is not a run's folder, or nothing was logged in any of them.
    """
    problems: list[Problem] = []
    want, fix = "a run's folder, with config.toml and metrics.jsonl", "give the path <dump_folder>/<name> of a run"
    if not folders:
        problems.append(Problem("RUN", "", want, "titanlite compare outputs/run"))
    for folder in folders:
        missing = [name for name in ("config.toml", "metrics.jsonl") if not os.path.isfile(folder / name)]
        if not os.path.isdir(folder):
            problems.append(Problem(str(folder), "", f"{want}; there is no such folder", fix))
        elif missing:
            inside = sorted(path.parent.name for path in folder.glob("*/metrics.jsonl"))
            hint = f"did you mean {folder / inside[0]}?" if inside else fix
            state = _state(folder / "status.json")
            if state and not inside and "metrics.jsonl" in missing:  # it was prepared, and no more
                hint = f'leave it out: nothing was logged there, and its status.json says "{state}"'
            problems.append(Problem(str(folder), "", f"{want}; {' and '.join(missing)} missing", hint))
    if problems:
        raise RunError(describe("titanlite compare", problems))
    records = [_read(folder, name) for folder, name in zip(folders, _names(folders), strict=True)]
    if not any(record.steps for record in records):
        saw = ", ".join(str(folder) for folder in folders)
        raise RunError.of(
            "titanlite compare", "RUN", saw, "a logged step in at least one run", "wait for the first step"
        )
    return records


def difference(records: Sequence[RunRecord]) -> list[tuple[str, list[str]]]:
    """Find the config keys whose values are not the same in all runs; how a run was resumed does not change it.

    Returns:
        (dotted key, its value in each run as TOML-like text, "-" where it is not set), in the order of the files.
    """
    keys = dict.fromkeys(key for record in records for key in record.config if key != "checkpoint.resume")
    rows = [(key, [json.dumps(r.config[key]) if key in r.config else "-" for r in records]) for key in keys]
    return [(key, values) for key, values in rows if len(set(values)) > 1]


def _read(folder: Path, name: str) -> RunRecord:
    rows = read_metrics(folder / "metrics.jsonl")
    try:
        config = tomli.loads((folder / "config.toml").read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # tomli's, or a byte that is no text
        raise RunError.of(
            f"{folder / 'config.toml'}: {error}",
            "config.toml",
            "",
            "TOML, as the run wrote it",
            "restore the file from a copy",
        ) from error
    steps, validations = ([row for row in rows if key in row] for key in ("loss", "validation_loss"))
    if bad := [row for row in (*steps, *validations) if not isinstance(row.get("tokens"), int)]:
        want = "as many tokens as there were until then, a whole number"
        raise RunError.of(
            str(folder / "metrics.jsonl"),
            f"tokens of step {bad[0]['step']}",
            str(bad[0].get("tokens")),
            want,
            "restore the file",
        )
    return RunRecord(
        name=name,
        steps=steps,
        validations=validations,
        config=dotted(config),
        state=_state(folder / "status.json"),
    )


def _state(status: Path) -> str:
    if not status.is_file():
        return ""
    try:
        content = read_json(status)
    except ValueError:
        content = None
    if not isinstance(content, dict):
        raise RunError.of(str(status), "status.json", "", "a JSON object, as the run wrote it", "delete the file")
    return content.get("state", "")


def _names(folders: Sequence[Path]) -> list[str]:
    """Return the folders' own names, with as many of their parents as it takes to tell them apart."""
    parts = [folder.resolve().parts for folder in folders]
    for depth in range(1, max(map(len, parts))):
        names = ["/".join(p[-depth:]) for p in parts]
        if len(set(names)) == len(set(parts)):
            return names
    return [str(folder) for folder in folders]


def _tables(records: Sequence[RunRecord], out: Path) -> str:
    """Return the tables and the path of the picture."""
    headings = ("run", "steps", "final loss", "best validation", "tok/s/GPU", "MFU", "memory GiB")
    text = columns(headings, *map(_results, records))
    if rows := difference(records):
        text += columns(("config", *(record.name for record in records)), *((key, *values) for key, values in rows))
    elif len(records) > 1:
        text += "the configs are the same\n"
    return f"{text}{out}\n"


def _results(record: RunRecord) -> list[str]:
    """Return a row of the table; "-" where there is no such number."""

    def values(key: str, rows: list[dict[str, Any]] = record.steps) -> list[float]:
        return [row[key] for row in rows if row.get(key) is not None]

    def text(numbers: list[float], pick: Any, form: str) -> str:
        return form.format(pick(numbers)) if numbers else "-"

    step = record.steps[-1]["step"] if record.steps else 0
    return [
        record.name,
        f"{step:,}" + (f" ({record.state})" if record.state not in ("", "finished") else ""),
        text(values("loss"), lambda numbers: numbers[-1], "{:.4f}"),
        text(values("validation_loss", record.validations), min, "{:.4f}"),
        text(values("tokens_per_second_per_gpu"), statistics.median, "{:,.0f}"),
        text(values("mfu"), statistics.median, "{:.1%}"),
        text(values("memory_gib"), max, "{:.1f}"),
    ]
