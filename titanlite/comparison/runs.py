"""Read the folders of runs (`metrics.jsonl`, `config.toml`, `status.json`, `receipt.json`), to compare them.

A run may also be one of Weights & Biases, whose reader is `wandb_runs.py`.

Nothing else of a run is looked at, so runs that are still going, were copied from elsewhere or were made by another
version can be read. What does not hold a run's files is an error that names every such folder at once.
"""

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli

from titanlite.comparison.wandb_runs import is_run_path, read_wandb_folder, read_wandb_path, wandb_file
from titanlite.durable import require_reachable
from titanlite.errors import Problem, describe, nearest
from titanlite.json_file import read_json
from titanlite.observe.metrics import RunError, is_of_step, read_metrics
from titanlite.preflight.run_folder import AT_WORK_S, RunFolder
from titanlite.preflight.same_run import dotted
from titanlite.streams import one_line

_LEAST = {"training.steps": 0, "job.stop_after": 0, "metrics.log_freq": 1}  # of the keys that say what is logged


@dataclass(frozen=True)
class RunRecord:
    """The content of one run folder."""

    name: str
    rows: list[dict[str, Any]]  # of metrics.jsonl, each with its step and tokens
    config: dict[str, Any]  # dotted key → value
    state: str  # of status.json; "" if there is none
    receipt: list[dict[str, Any]] | None  # of receipt.json, an entry a feature; None if there is none
    is_running: bool = False  # now, by its status.json, which a job at work renews

    @property
    def steps(self) -> list[dict[str, Any]]:
        """Return the rows of logged steps that have a loss."""
        return [row for row in self.rows if "loss" in row]

    @property
    def last_step(self) -> int:
        """Return the last logged step, 0 if there is none."""
        return max((row["step"] for row in self.rows if is_of_step(row)), default=0)

    @property
    def steps_asked(self) -> int:
        """Return the last step that its config has it log; 0 if the config has no number of steps."""
        steps, stop_after, log_freq = (self.config.get(key, least) for key, least in _LEAST.items())
        last = min(steps, stop_after or steps)
        return last if last == steps else last - last % log_freq

    @property
    def validations(self) -> list[dict[str, Any]]:
        """Return the rows of validations."""
        return [row for row in self.rows if "validation_loss" in row]


def read_runs(folders: Sequence[Path]) -> list[RunRecord]:
    """Read runs.

    Args:
        folders: run folders; folders of wandb's offline runs, or their `.wandb` files; paths of runs on wandb's server,
            entity/project/run_id.

    Returns:
        A record per folder, in the same order, with names that differ.

    Raises:
        RunError: something is not a run's folder, or nothing was logged in any of them.
    """
    problems: list[Problem] = []
    want, fix = "a run's folder, with config.toml and metrics.jsonl", "give the path <dump_folder>/<name> of a run"
    if not folders:
        problems.append(Problem("RUN", "", want, "titanlite compare outputs/run"))
    of_wandb = [wandb_file(folder) is not None or is_run_path(folder) for folder in folders]
    for folder in (folder for folder, is_wandb in zip(folders, of_wandb, strict=True) if not is_wandb):
        require_reachable(folder / "config.toml")
        missing = [name for name in ("config.toml", "metrics.jsonl") if not os.path.isfile(folder / name)]
        if not os.path.isdir(folder):
            problems.append(Problem(str(folder), "", *_no_folder(folder, want, fix)))
        elif missing:
            inside = sorted(path.parent.name for path in folder.glob("*/metrics.jsonl"))
            hint = f"did you mean {folder / inside[0]}?" if inside else fix
            state = _state(folder / "status.json")
            if state and not inside and "metrics.jsonl" in missing:  # it was prepared, and no more
                hint = f'leave it out: nothing was logged there, and its status.json says "{state}"'
            problems.append(Problem(str(folder), "", f"{want}; {' and '.join(missing)} missing", hint))
    if problems:
        raise RunError(describe("titanlite compare", problems))
    records = [
        (_read_wandb if is_wandb else _read)(folder, name)
        for folder, name, is_wandb in zip(folders, _names(folders), of_wandb, strict=True)
    ]
    if not any(record.steps for record in records):
        saw = ", ".join(str(folder) for folder in folders)
        raise RunError.of(
            "titanlite compare", "RUN", saw, "a logged step in at least one run", "wait for the first step"
        )
    return records


def _no_folder(path: Path, want: str, fix: str) -> tuple[str, str]:
    """Say of a path that is no folder what is wanted, and what was probably meant: a file's own run, or a near name."""
    if os.path.lexists(path):
        run = next((folder for folder in path.parents if os.path.isfile(folder / "metrics.jsonl")), None)
        return f"{want}; this is a file", fix if run is None else f"did you mean {run}?"
    try:
        runs = [entry.name for entry in os.scandir(path.parent) if os.path.isfile(f"{entry.path}/metrics.jsonl")]
    except OSError:
        runs = []
    near = nearest(path.name, runs)
    return f"{want}; there is no such folder", fix if near is None else f"did you mean {path.parent / near}?"


def recorded_config(folder: Path) -> dict[str, Any]:
    """Read the config that a run has written into its folder, by dotted keys.

    Raises:
        RunError: it is not TOML.
    """
    path = folder / "config.toml"
    try:
        return dotted(tomli.loads(path.read_text(encoding="utf-8")))
    except (ValueError, RecursionError) as error:  # tomli's, or a byte that is no text
        want, fix = "TOML, as the run wrote it", "restore the file from a copy"
        raise RunError.of(f"{path}: {error}", "config.toml", "", want, fix) from error


def recorded_receipt(folder: Path) -> list[dict[str, Any]] | None:
    """Read the receipt of a run, an entry a feature; None if it has none.

    Raises:
        RunError: it is no receipt.
    """
    path = folder / "receipt.json"
    if not path.is_file():
        return None
    try:
        entries = read_json(path)
    except ValueError:
        entries = None
    return _entries(entries, path)


def title_of(records: Sequence[RunRecord]) -> str:
    """Return what a comparison of the runs is called."""
    names = [record.name for record in records]
    if len(names) == 1:
        return f"Run {names[0]}"
    others = ", ".join(names[1:]) if len(names) < 5 else f"{len(names) - 1} runs"
    return f"{others} compared with {names[0]}"


def _read(folder: Path, name: str) -> RunRecord:
    rows = read_metrics(folder / "metrics.jsonl")
    if bad := [row for row in rows if not isinstance(row.get("tokens"), int)]:
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
        rows=rows,
        config=_checked_config(recorded_config(folder), folder / "config.toml"),
        state=_state(folder / "status.json"),
        receipt=recorded_receipt(folder),
        is_running=RunFolder(folder).seems_in_use() is not None,
    )


def _read_wandb(path: Path, name: str) -> RunRecord:
    run = read_wandb_path(path) if is_run_path(path) else read_wandb_folder(path)
    receipt, file = None if run.receipt is None else _entries(run.receipt, path), wandb_file(path)
    is_written = file is None or time.time() - file.stat().st_mtime <= AT_WORK_S  # the server itself knows who is gone
    config = _checked_config(dotted(run.config), path)
    return RunRecord(name, run.rows, config, run.state, receipt, run.state == "running" and is_written)


def _checked_config(config: dict[str, Any], path: Path) -> dict[str, Any]:
    """Check the keys of a config that are computed with; one that is absent is no problem."""
    problems = [
        Problem(key, repr(value), f"a whole number, at least {least}", "restore it from a copy")
        for key, least in _LEAST.items()
        if type(value := config.get(key, least)) is not int or not least <= value < 2**63
    ]
    if problems:
        raise RunError(describe(str(path), problems))
    return config


def _entries(entries: Any, path: Path) -> list[dict[str, Any]]:
    """Check the content of a receipt."""
    if isinstance(entries, list) and all(map(_is_entry, entries)):
        return entries
    want = "a JSON list of features, as the run wrote it"
    raise RunError.of(str(path), "receipt.json", "", want, "restore the file, or delete it to go on without it")


def _is_entry(entry: Any) -> bool:
    if not (isinstance(entry, dict) and isinstance(entry.get("feature"), str)):
        return False
    cases = entry.get("skipped")
    return isinstance(cases, list) and all(map(_is_case, cases))


def _is_case(case: Any) -> bool:
    return isinstance(case, dict) and all(isinstance(case.get(key), str) for key in ("what", "why"))


def _state(status: Path) -> str:
    if not status.is_file():
        return ""
    try:
        content = read_json(status)
    except ValueError:
        content = None
    if not (isinstance(content, dict) and isinstance(state := content.get("state", ""), str)):
        raise RunError.of(str(status), "status.json", "", "a JSON object, as the run wrote it", "delete the file")
    return state


def _names(folders: Sequence[Path]) -> list[str]:
    """Return the folders' own names, with as many of their parents as it takes to tell them apart."""
    parts = [tuple(map(one_line, folder.resolve().parts)) for folder in folders]
    for depth in range(1, max(map(len, parts))):
        names = ["/".join(p[-depth:]) for p in parts]
        if len(set(names)) == len(set(parts)):
            return names
    return [one_line(str(folder)) for folder in folders]
