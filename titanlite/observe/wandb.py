"""Weights & Biases: the same rows as metrics.jsonl, on a page. It can never end or delay a run.

Every call is fenced: the first failure becomes one warning, and from then on nothing more is sent. If the server
cannot be reached at the start, the run is recorded offline instead, and `wandb sync` sends it later.

A run that is restarted keeps its id (`wandb/run_id` in the run's folder). Its rows carry `step` and `tokens` as
fields and the x axis is `tokens`: wandb's own step counter would drop every row that is not above the last one, which
after a resume are the ones trained again.

wandb is told as little as needed: the config (which has no key for a secret), the rows, and the machine's load. Not the
command line, the environment, the git remote (which may hold a token), the source or the installed packages.
"""

import secrets
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from titanlite.config.schema import Config
from titanlite.observe.metrics import Row, json_row
from titanlite.redact import redact

if TYPE_CHECKING:
    import wandb

_INIT_TIMEOUT_S = 30.0  # the other ranks wait for this one
_FINISH_TIMEOUT_S = 60.0  # what is not sent by then stays on disk


class WandbRun:
    """This run in Weights & Biases. Rank 0 owns it; made only when `metrics.wandb` is not "off"."""

    def __init__(self, config: Config, folder: Path, warn: Callable[[str], object]) -> None:
        """Start, or go on with, the run.

        Args:
            config: the whole config; `metrics.wandb` is "offline" or "online".
            folder: the run's folder; wandb writes to `wandb/` in it.
            warn: called with one text at the first failure.
        """
        self._warn = warn
        self._run: wandb.Run | None = None
        mode = config.metrics.wandb
        try:
            self._run = _start(config, folder, mode)
        except Exception as error:
            if mode == "offline":
                self._give_up("start", error)
                return
            warn(f"wandb: online failed ({_brief(error)}); recording offline, send it later with `wandb sync`")
            try:
                self._run = _start(config, folder, "offline")
            except Exception as second:
                self._give_up("start offline", second)

    def log(self, row: Row) -> None:
        """Send one row. Returns at once; wandb sends in a process of its own."""
        if self._run is None:
            return
        try:
            self._run.log({key: value for key, value in json_row(row).items() if value is not None})
        except Exception as error:
            self._give_up("log", error)

    def finish(self, exit_code: int = 0) -> None:
        """Send what is left and end; waits a minute at most.

        Args:
            exit_code: of this process; any other than 0 marks the run as failed.
        """
        if self._run is None:
            return
        try:
            self._run.finish(exit_code=exit_code)
        except Exception as error:
            self._give_up("finish", error)
        self._run = None

    def _give_up(self, what: str, error: Exception) -> None:
        """Say so once, and send nothing more."""
        self._run = None
        self._warn(f"wandb: cannot {what} ({_brief(error)}); training goes on, metrics.jsonl has every row")


def _start(config: Config, folder: Path, mode: str) -> "wandb.Run":
    """Start wandb in one mode, saying nothing and sending only what we log."""
    import wandb

    # A failed attempt leaves its id "in use" in wandb's service process, and a silent setting holds only from here.
    wandb.teardown()
    wandb.setup(wandb.Settings(silent=True))
    (folder / "wandb").mkdir(parents=True, exist_ok=True)  # or wandb writes to a temporary folder
    run = wandb.init(
        project=config.metrics.wandb_project,
        group=config.metrics.wandb_group or None,
        name=config.job.name,
        id=_run_id(folder / "wandb" / "run_id"),
        resume="allow" if mode == "online" else None,
        mode="online" if mode == "online" else "offline",
        dir=str(folder),
        config=asdict(config),
        settings=wandb.Settings(
            silent=True,
            console="off",
            disable_git=True,
            disable_code=True,
            save_code=False,
            disable_job_creation=True,
            x_save_requirements=False,
            x_disable_meta=True,
            program="",
            init_timeout=_INIT_TIMEOUT_S,
            login_timeout=1.0,  # ask nobody for a key while the other ranks wait
            finish_timeout=_FINISH_TIMEOUT_S,
        ),
    )
    run.define_metric("step")
    run.define_metric("tokens")
    run.define_metric("*", step_metric="tokens")
    return run


def _run_id(path: Path) -> str:
    """The id of this run, made up at its first start."""
    if not path.exists():
        path.write_text(secrets.token_hex(4) + "\n")
    return path.read_text().strip()


def _brief(error: Exception) -> str:
    """One line of an exception."""
    text = str(error).strip() or type(error).__name__
    return redact(text.splitlines()[0])[:200]
