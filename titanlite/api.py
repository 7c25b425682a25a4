"""Train, plan and generate from Python: what the commands do, with their errors as exceptions.

import titanlite

run = titanlite.run("configs/debug.toml", {"training.steps": 30, "validation.samples": ["import "]})
losses = [row["loss"] for row in run.metrics if "loss" in row]
print(run.load().generate("def main("))
"""

import os
import subprocess
import sys
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tomli_w

from titanlite.errors import ConfigError, RunFailedError
from titanlite.observe.metrics import read_metrics
from titanlite.observe.observer import Sample
from titanlite.observe.samples_file import read_samples
from titanlite.preflight.checked_run import checked_run
from titanlite.preflight.run_folder import RunFolder
from titanlite.preflight.start import check_start

if TYPE_CHECKING:
    from titanlite.generation.model import TextModel

Changes = Mapping[str, object]
"""Values of the config by key, as {"training.steps": 30}; they win over the file, as flags do."""
_LAST_LINES = 20  # of a run that failed, in its error


@dataclass(frozen=True)
class FinishedRun:
    """A run that has ended, by its folder."""

    folder: Path

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """Return the rows of metrics.jsonl, in order of their steps; None stands for a number that was not finite."""
        return read_metrics(RunFolder(self.folder).metrics)

    @property
    def samples(self) -> list[tuple[int, list[Sample]]]:
        """Return (step, samples) of each validation, if the config has `validation.samples`."""
        return read_samples(RunFolder(self.folder).samples)

    def load(self, **choice: Any) -> "TextModel":
        """Load the model of its newest checkpoint; arguments as of `titanlite.load`."""
        from titanlite.generation.model import load_text_model

        return load_text_model(self.folder, **choice)


def run(
    config: str | os.PathLike[str], changes: Changes | None = None, *, gpus: int | None = None, show: bool = True
) -> FinishedRun:
    """Train a run on this host to its end, in processes of its own, as `titanlite train` does.

    Args:
        config: path of a TOML file.
        changes: values by key.
        gpus: GPUs to train on; None: all. Without GPUs: the number of processes; None: one.
        show: print what the run prints.

    Raises:
        TitanliteError: a mistake in the config, the data or the run folder, as a command would tell it.
        RunFailedError: the run has started and failed.
    """
    if gpus is not None:
        _require_count("gpus", gpus, "a number of GPUs, at least 1")
    flags = _as_flags(config, changes)
    checked = checked_run(flags, gpus, is_start=True)
    check_start(checked.config, checked.inputs)
    command = [sys.executable, "-m", "titanlite", "train", *flags, *(["--gpus", str(gpus)] if gpus is not None else [])]
    last = deque[str](maxlen=_LAST_LINES)
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    with process:
        assert process.stdout is not None  # noqa: S101
        try:
            for line in process.stdout:
                last.append(line)
                if show:
                    sys.stdout.write(line)
        except BaseException:  # as an interrupt: the run saves and ends, too
            process.terminate()
            raise
    if process.returncode:
        raise RunFailedError(f"the run ended with exit code {process.returncode}:\n{''.join(last)}")
    return FinishedRun(RunFolder.of(checked.config).path)


def plan(
    config: str | os.PathLike[str], changes: Changes | None = None, *, world: int, device: str | None = None
) -> dict[str, Any]:
    """Return what `titanlite plan --json` writes: memory, time and collectives of a step.

    Args:
        config: path of a TOML file.
        changes: values by key.
        world: number of processes of the run.
        device: the GPU to predict for, "h100" or "h200"; None: the default of `titanlite plan`.

    Raises:
        TitanliteError: a mistake in the config, or a layout that is not possible.
    """
    from titanlite.commands.plan_tables import plan_as_dict
    from titanlite.commands.planned_run import plan_run
    from titanlite.forecast.device_specs import DEFAULT_DEVICE

    _require_count("world", world, "a number of processes, at least 1")
    planned = plan_run(checked_run(_as_flags(config, changes), world), str(config), world, device or DEFAULT_DEVICE)
    return plan_as_dict(planned, world)


def _require_count(name: str, given: object, want: str) -> None:
    """Refuse an argument that is no whole number from 1 to a million, as the commands refuse their flags."""
    if not isinstance(given, int) or isinstance(given, bool) or not 0 < given < 10**6:
        raise ConfigError.of("arguments", name, repr(given), want, f"{name}=8")


def _as_flags(config: str | os.PathLike[str], changes: Changes | None) -> list[str]:
    """Write the values as flags, in TOML syntax where they are no texts."""
    flags = ["--config", os.fspath(config)]
    for key, value in (changes or {}).items():
        try:
            text = value if isinstance(value, str) else tomli_w.dumps({"x": value}).removeprefix("x = ").strip()
        except TypeError as error:
            want, fix = "a value that TOML has: a text, a number, true, false or a list of them", "another value"
            raise ConfigError.of("changes", key, repr(value), want, fix) from error
        flags.append(f"--{key}={text}")
    return flags
