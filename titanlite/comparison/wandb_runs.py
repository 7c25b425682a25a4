"""Download a run from Weights & Biases' server, by its path on the server, into files like those of its folder.

wandb has each row of metrics.jsonl once, and further files of the run (`observe/wandb_process.py`). So the rows can be
restored: names with sections become the keys of the file again, and numbers that were not finite, which wandb lacks,
become None. Offline runs are not read here: their rows are in their folders.
"""

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from datetime import UTC, datetime
from io import StringIO
from pathlib import Path
from typing import Any

from titanlite.errors import TitanliteError
from titanlite.extras import missing_packages
from titanlite.observe.metric_table import flat_key
from titanlite.observe.metrics import RunError
from titanlite.redact import redact

# entity/project/id, alone, after "wandb:", or in the URL of the run's page, where `Path` has merged two slashes.
_PATH = re.compile(r"(?:wandb:|https?:/[^/]+/)?([\w.-]+)/([\w.-]+)/(?:runs/)?([a-z0-9]{8})")
_STATES = {"crashed": "failed", "killed": "failed"}
_TIMEOUT_S = 30  # per request to the server


def is_run_path(path: Path) -> bool:
    """Return whether a path names a run on wandb's server, entity/project/run_id, and does not exist locally."""
    return _PATH.fullmatch(str(path)) is not None and not os.path.lexists(path)


def wandb_run_path(path: Path, config: Mapping[str, Any]) -> str | None:
    """Return the path of a run on wandb's server; None if wandb does not have the run.

    Args:
        path: entity/project/run_id; or the run's folder, for which the result has no entity: the user's key implies it.
        config: config of the run, by dotted keys, which names the project.
    """
    if is_run_path(path) and (match := _PATH.fullmatch(str(path))):
        return "/".join(match.groups())
    own = path / "wandb/run_id"
    run_id = own.read_text(errors="replace").strip() if os.path.isfile(own) else ""
    return f"{config.get('metrics.wandb_project', 'titanlite')}/{run_id}" if run_id else None


def fetch_run(path: Path, folder: Path) -> None:
    """Download the run `path`, entity/project/run_id, from wandb's server into `folder`, as the files of a run folder.

    Raises:
        RunError: the run does not exist, was not trained by titanlite, or cannot be downloaded.
    """
    fix = "check the path, and `wandb login` or WANDB_API_KEY; or give the run's folder"
    want = "a run on wandb's server, entity/project/run_id; there is no such folder here"
    with wandb_server("wandb", str(path), want, fix) as api:
        run = api.run(wandb_run_path(path, {}))
        rows = rows_of_lines(run.scan_history(use_cache=False))
        for file in run.files(names=["config.toml", "receipt.json"]):
            file.download(root=str(folder), replace=True)
        is_ours = all(type(row.get(key)) is int for row in rows for key in ("step", "tokens"))
        if not is_ours or not (folder / "config.toml").is_file():
            saw = "no config.toml" if is_ours else "a row without step and tokens"
            want, fix = "a run of titanlite's: rows with step and tokens", "give a run that titanlite has trained"
            raise RunError.of(f"wandb, {path}", "run", saw, want, fix)
        state = _STATES.get(run.state, run.state)
        if state == "finished" and rows:
            is_whole = rows[-1]["step"] == (run.config.get("training") or {}).get("steps")
            state = "finished" if is_whole else "stopped"
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    seen = {"step": rows[-1]["step"] if rows else 0, "updated": datetime.now(UTC).isoformat()}
    (folder / "status.json").write_text(json.dumps({"state": state, "host": "wandb", "pid": 0, **seen}))


def require_wandb(where: str, key: str) -> None:
    """Raise a RunError about `key` if wandb is not installed."""
    if missing := missing_packages("wandb"):
        raise RunError.of(where, key, "", *missing)


@contextmanager
def wandb_server(where: str, key: str, want: str, fix: str) -> Iterator[Any]:
    """Yield wandb's API without its prints. Errors in the body become a RunError, made of the four arguments."""
    require_wandb(where, key)
    import wandb

    try:
        with redirect_stdout(StringIO()), redirect_stderr(StringIO()):  # wandb prints hints on logging in
            yield wandb.Api(timeout=_TIMEOUT_S)
    except TitanliteError:
        raise
    except Exception as error:  # errors of wandb or the network, or due to a server of another version
        saw = redact(str(error).strip() or type(error).__name__).splitlines()[0][:200]
        raise RunError.of(where, key, saw, want, fix) from error


def rows_of_lines(lines: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Restore the rows of metrics.jsonl from wandb's lines. Empty lines give no row."""
    rows = []
    for line in lines:
        row = {flat_key(name): value for name, value in line.items() if name[0] != "_" and value is not None}
        if row:
            rows.append(row | dict.fromkeys(line.get("_null") or ()))
    return rows
