"""Read the folders of runs (`metrics.jsonl`, `config.toml`, `status.json`, `receipt.json`), to compare them.

Only these files are read. So runs in progress, copies from other machines and runs of other versions can be compared. A
run on a server of Weights & Biases is first downloaded into such a folder (`wandb_runs.py`).
"""

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import tomli

from titanlite.comparison.run_paths import require_runs
from titanlite.comparison.wandb_runs import fetch_run, is_run_path
from titanlite.errors import Problem, describe
from titanlite.json_file import MALFORMED, as_type, read_json
from titanlite.observe.metrics import RunError, is_of_step, read_metrics
from titanlite.preflight.run_folder import RunFolder
from titanlite.preflight.same_run import dotted
from titanlite.streams import one_line

T = TypeVar("T")

_LEAST = {"training.steps": 0, "job.stop_after": 0, "metrics.log_freq": 1}  # least allowed values


@dataclass(frozen=True)
class RunRecord:
    """The content of one run folder."""

    name: str
    rows: list[dict[str, Any]]  # of metrics.jsonl, each with "step" and "tokens"
    config: dict[str, Any]  # dotted key → value
    state: str  # of status.json; "" if there is none
    receipt: list[dict[str, Any]] | None  # of receipt.json, one entry per feature; None if there is none
    is_running: bool = False  # whether a job trains the run now, by its status.json
    path: Path = Path()  # path of the folder, or on wandb's server, as the user gave it

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
        """Return the last step that the run logs by its config; 0 if the config has no number of steps."""
        steps, stop_after, log_freq = (self.config.get(key, least) for key, least in _LEAST.items())
        last = min(steps, stop_after or steps)
        return last if last == steps else last - last % log_freq


def read_runs(paths: Sequence[Path]) -> list[RunRecord]:
    """Read run folders, or runs on wandb's server (entity/project/run_id), and give each a distinct name. Refuse runs
    of which none has a logged step.
    """
    folders = [path for path in paths if not is_run_path(path)]
    require_runs("titanlite compare", folders, "metrics.jsonl", _without_rows)
    if not paths:
        want = "a run's folder, with config.toml and metrics.jsonl"
        raise RunError.of("titanlite compare", "RUN", "", want, "titanlite compare outputs/run")
    records = [_read(path, name) for path, name in zip(paths, _names(paths), strict=True)]
    if not any(record.steps for record in records):
        want, fix = "a logged step in at least one run", "wait for the first step"
        raise RunError.of("titanlite compare", "RUN", ", ".join(map(str, paths)), want, fix)
    return records


def _without_rows(folder: Path) -> str:
    """Return advice on a run that has a state but no metrics.jsonl: to leave it out. "" if it has no state."""
    state = _recorded_state(folder)
    return state and f'leave it out: nothing was logged there, and its status.json says "{state}"'


def recorded_config(folder: Path) -> dict[str, Any]:
    """Read the config.toml of a run's folder, by dotted keys. Refuse values out of range for the keys in `_LEAST`."""
    path, want = folder / "config.toml", "TOML, as the run wrote it"
    config = _own_file(path, want, lambda path: dotted(tomli.loads(path.read_text(encoding="utf-8"))))
    problems = [
        Problem(key, repr(value), f"a whole number, at least {least}", "restore it from a copy")
        for key, least in _LEAST.items()
        if type(value := config.get(key, least)) is not int or not least <= value < 2**63
    ]
    if problems:
        raise RunError(describe(str(path), problems))
    return config


def recorded_receipt(folder: Path) -> list[dict[str, Any]] | None:
    """Read the receipt of a run, one entry per feature; None if it has none."""

    def read(path: Path) -> list[dict[str, Any]]:
        entries = read_json(path)
        if not isinstance(entries, list):
            raise TypeError("no list")
        for entry in entries:
            as_type(Sequence[str], [entry["feature"], *(case[k] for case in entry["skipped"] for k in ("what", "why"))])
        return entries

    path = folder / "receipt.json"
    return _own_file(path, "a JSON list of features, as the run wrote it", read) if path.is_file() else None


def _recorded_state(folder: Path) -> str:
    """Read the state of status.json; "" if there is none."""
    path, want = folder / "status.json", "a JSON object, as the run wrote it"
    return _own_file(path, want, lambda path: as_type(str, read_json(path).get("state", ""))) if path.is_file() else ""


def _own_file(path: Path, want: str, read: Callable[[Path], T]) -> T:
    """Return `read(path)` of a file that a run wrote. Raise RunError, which names `want`, if its content is invalid."""
    try:
        return read(path)
    except (*MALFORMED, RecursionError) as error:  # tomli raises RecursionError
        is_needed = path.name == "config.toml"
        fix = "restore the file from a copy" if is_needed else "restore the file, or delete it to go on without it"
        raise RunError.of(str(path), path.name, str(error), want, fix) from error


def title_of(records: Sequence[RunRecord]) -> str:
    """Return the title of a comparison of the runs."""
    names = [record.name for record in records]
    if len(names) == 1:
        return f"Run {names[0]}"
    others = ", ".join(names[1:]) if len(names) < 5 else f"{len(names) - 1} runs"
    return f"{others} compared with {names[0]}"


def _read(path: Path, name: str) -> RunRecord:
    """Read a run from its folder or from wandb's server; `name` is its name in the comparison."""
    if is_run_path(path):
        with tempfile.TemporaryDirectory() as folder:
            fetch_run(path, Path(folder))
            return replace(_read(Path(folder), name), path=path)
    rows = read_metrics(path / "metrics.jsonl")
    if bad := next((row for row in rows if type(row.get("tokens")) is not int), None):
        saw, want = str(bad.get("tokens")), "as many tokens as there were until then, a whole number"
        where = str(path / "metrics.jsonl")
        raise RunError.of(where, f"tokens of step {bad['step']}", saw, want, "restore the file from a copy")
    is_running = RunFolder(path).seems_in_use() is not None
    config, receipt = recorded_config(path), recorded_receipt(path)
    return RunRecord(name, rows, config, _recorded_state(path), receipt, is_running, path)


def _names(folders: Sequence[Path]) -> list[str]:
    """Return the name of each folder, with as many of its parents as make all names distinct."""
    parts = [tuple(map(one_line, folder.resolve().parts)) for folder in folders]
    for depth in range(1, max(map(len, parts))):
        names = ["/".join(p[-depth:]) for p in parts]
        if len(set(names)) == len(set(parts)):
            return names
    return [one_line(str(folder)) for folder in folders]
