"""Try whether a run that is stopped goes on bit for bit.

Three short runs of the config on this host: one of 2·K steps in one go, and one that is stopped after K and started
again. Losses, gradient norms, and all tensors of the last checkpoint must be equal bit for bit. What they left is
deleted if they are.
"""

import math
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from titanlite.checkpoint.publish import step_folder
from titanlite.commands.arguments import Command
from titanlite.commands.validate import checked_run
from titanlite.config.schema import Config
from titanlite.errors import CheckpointError, ConfigError, Problem, describe
from titanlite.observe.metrics import read_metrics
from titanlite.run_folder import RunFolder

_STEPS = "5"
_COMMAND = Command(
    "verify-resume",
    __doc__ or "",
    {
        "--world N": "processes of this host that train; 1 if it is not given",
        "--steps K": f"steps until the run is stopped, and again after it; {_STEPS} if it is not given",
    },
)
_UNSEEDED = re.compile(r"rng/rank\d+/(python|numpy) ")  # begins at random in every process


def run(argv: Sequence[str]) -> int:
    """Carry out the command.

    Args:
        argv: arguments behind `verify-resume`.

    Returns:
        The exit code, 0: they are equal.

    Raises:
        TitanliteError: the config is wrong, one of the runs failed, or they are not equal.
    """
    given = _COMMAND.read(argv)
    processes = given.world or 1
    config = checked_run(given.flags, processes).config
    steps = _steps(given.own.get("--steps", _STEPS), config)
    folder = Path(config.job.dump_folder).expanduser() / f"{config.job.name}-verify-resume"
    if folder.exists():
        problem = Problem(str(folder), "", "a folder that is not there yet", "delete it: an earlier trial left it")
        raise CheckpointError(describe("titanlite verify-resume", [problem]))
    for name, last in (("in one go", 2 * steps), ("stopped", steps), ("stopped", 2 * steps)):
        sys.stdout.write(f"{name}: to step {last}\n")
        sys.stdout.flush()
        _train(given.flags, folder, name, last, processes)
    _require_equal(RunFolder(folder / "in one go"), RunFolder(folder / "stopped"), 2 * steps)
    shutil.rmtree(folder)
    sys.stdout.write(f"equal bit for bit: losses, gradient norms and all tensors after step {2 * steps}\n")
    return 0


def _steps(given: str, config: Config) -> int:
    if given.isdecimal() and 0 < 2 * int(given) <= config.training.steps:
        return int(given)
    want = f"a number of steps, at least 1, twice of which training.steps = {config.training.steps} is enough for"
    raise ConfigError(describe("command line", [Problem("--steps", given, want, "--steps 1")]))


def _train(flags: Sequence[str], folder: Path, name: str, last: int, processes: int) -> None:
    """Start a run, or go on with it, as a person does."""
    own = {
        "job.dump_folder": folder,
        "job.name": name,
        "job.stop_after": last,
        "checkpoint.enable": "true",
        "checkpoint.resume": "auto",
        "checkpoint.interval": last,
        "metrics.log_freq": 1,
        "metrics.wandb": "off",
        "profiling.enable": "false",
    }
    launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(processes), "-m"]
    over = [f"--{key}={value}" for key, value in own.items()]
    command = [sys.executable, "-m", *(launcher if processes > 1 else ()), "titanlite.train", *flags, *over]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    if done.returncode:
        sys.stderr.write(done.stdout)
        problem = Problem(f"{name}, to step {last}", f"exit code {done.returncode}", "0", "mend what is said above")
        raise CheckpointError(describe("titanlite verify-resume", [problem]))


def _require_equal(whole: RunFolder, stopped: RunFolder, last: int) -> None:
    from titanlite.checkpoint.store import digests, few_names

    of_whole, of_stopped = (
        {row["step"]: (row["loss"], row["grad_norm"]) for row in read_metrics(run.metrics) if "loss" in row}
        for run in (whole, stopped)
    )
    fix = "training.deterministic = true, unless it is; then what the model keeps or draws is not all in its checkpoint"
    problems: list[Problem] = []
    for step, (loss, norm) in of_whole.items():
        if of_stopped.get(step) != (loss, norm):
            own = of_stopped.get(step, (math.nan, math.nan))
            saw, want = f"loss {own[0]!r}, gradient norm {own[1]!r}", f"{loss!r} and {norm!r}, as in one go"
            problems.append(Problem(f"step {step}", saw, want, fix))
            break
    tensors, own = (digests(step_folder(run.checkpoints, last)) for run in (whole, stopped))
    differ = [name for name in tensors | own if tensors.get(name) != own.get(name) and not _UNSEEDED.match(name)]
    if differ:
        problems.append(Problem(f"tensors after step {last}", few_names(differ), "the bits of the run in one go", fix))
    if problems:
        raise CheckpointError(describe(f"{whole.path.parent}: stopped and started again", problems))
