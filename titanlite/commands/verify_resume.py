"""Check that a stopped and resumed run matches an uninterrupted one bit for bit.

Trains 2·K steps on this host without interruption, then K steps, stops, and resumes for K more. Losses, gradient norms
and all tensors of the last checkpoint must be equal bit for bit. If they are, the files of these runs are deleted.
"""

import math
import os
import re
import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from titanlite.checkpoint.publish import step_folder
from titanlite.commands.arguments import Command, number_of
from titanlite.errors import CheckpointError, Problem, describe
from titanlite.observe.metrics import is_of_step, read_metrics
from titanlite.preflight.checked_run import checked_run
from titanlite.preflight.run_again import run_again
from titanlite.preflight.run_folder import RunFolder
from titanlite.preflight.start import check_start

_STEPS = "5"
_WHOLE = "uninterrupted"
COMMAND = Command(
    "verify-resume",
    __doc__ or "",
    {
        "--world N": "number of training processes on this host; default: 1",
        "--steps K": f"steps before the stop, and again after the resume; default: {_STEPS}",
    },
)
_UNSEEDED = re.compile(r"rng/rank\d+/(python|numpy) ")  # generators that each process seeds at random


def run(argv: Sequence[str]) -> int:
    """Train one run without interruption and one that stops and resumes, and compare the two."""
    given = COMMAND.read(argv)
    processes = given.world or 1
    checked = checked_run(given.flags, processes)
    config = checked.config
    most = config.training.steps // 2
    want = f"at least 1, and at most half of training.steps = {config.training.steps}"
    steps = number_of({"--steps": _STEPS, **given.own}, "--steps", int, want, "--steps 1", below=most + 1)
    assert steps is not None  # noqa: S101
    folder = Path(os.path.expanduser(config.job.dump_folder)) / f"{config.job.name}-verify-resume"
    if folder.exists():
        want, fix = "a folder that does not exist yet", "delete it: an earlier check left it"
        raise CheckpointError.of("titanlite verify-resume", str(folder), "", want, fix)
    check_start(replace(config, job=replace(config.job, dump_folder=str(folder), name=_WHOLE)), checked.inputs)
    for name, more, last in ((_WHOLE, "", 2 * steps), ("stopped", "", steps), ("stopped", ", then resumed", 2 * steps)):
        sys.stdout.write(f"{name}{more}: to step {last}\n")
        sys.stdout.flush()
        _start_run(given.flags, folder, name, last, processes)
    _require_equal(RunFolder(folder / _WHOLE), RunFolder(folder / "stopped"), 2 * steps)
    shutil.rmtree(folder)
    sys.stdout.write(f"equal bit for bit: losses, gradient norms and all tensors after step {2 * steps}\n")
    return 0


def _start_run(flags: Sequence[str], folder: Path, name: str, last: int, processes: int) -> None:
    """Train the run `name` in `folder` to step `last`, from its newest checkpoint if it has one."""
    own = {
        "job.dump_folder": folder,
        "job.name": name,
        "job.stop_after": last,
        "checkpoint.enable": "true",
        "checkpoint.resume": "auto",
        "checkpoint.interval": last,
        "checkpoint.keep_best": "",
        "checkpoint.mirror": "",
        "metrics.log_freq": 1,
        "metrics.wandb": "off",
        "profiling.enable": "false",
    }
    over = [f"--{key}={value}" for key, value in own.items()]
    try:
        code = run_again("titanlite.train", [*flags, *over], processes)
    except KeyboardInterrupt:  # the runs are kept after a failure, not after an interruption
        shutil.rmtree(folder, ignore_errors=True)
        raise
    if code:
        where, saw = f"{name}, to step {last}", f"exit code {code}"
        raise CheckpointError.of("titanlite verify-resume", where, saw, "0", "fix the error printed above")


def _require_equal(whole: RunFolder, stopped: RunFolder, last: int) -> None:
    from titanlite.checkpoint.store import digests, few_names

    of_whole, of_stopped = (
        {
            row["step"]: (row.get("loss", "of no target"), row.get("grad_norm", "of no target"))
            for row in read_metrics(run.metrics)
            if is_of_step(row)
        }
        for run in (whole, stopped)
    )
    fix = "training.deterministic = true; if it is set, the model has state or randomness that is not in its checkpoint"
    problems: list[Problem] = []
    lacking = (math.nan, math.nan)  # for a step that was not logged. In a logged step, None is a number not finite.
    for step in range(1, last + 1):
        (loss, norm), own = (rows.get(step, lacking) for rows in (of_whole, of_stopped))
        if (loss, norm) != own or own[0] is None or own is lacking:
            saw, want = f"loss {own[0]!r}, gradient norm {own[1]!r}", f"{loss!r} and {norm!r}, as without interruption"
            problems.append(Problem(f"step {step}", saw, want, fix))
            break
    tensors, own = (digests(step_folder(run.checkpoints, last)) for run in (whole, stopped))
    differ = [name for name in tensors | own if tensors.get(name) != own.get(name) and not _UNSEEDED.match(name)]
    if differ:
        problems.append(
            Problem(f"tensors after step {last}", few_names(differ), "the bits of the uninterrupted run", fix)
        )
    if problems:
        raise CheckpointError(describe(f"{whole.path.parent}: stopped and resumed", problems))
