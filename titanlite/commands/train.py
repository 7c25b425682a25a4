"""Check a config once, then train it on the GPUs of this host, under torchrun's own launcher.

Trains as torchrun --standalone --nproc-per-node N train.py FILE does, but differs in two points. A mistake in the
config, the data or the run folder is reported once, before a process is started. A run that saves and stops on a signal
(SIGINT, SIGTERM, SIGHUP, SIGUSR1) ends with exit code 0. A single process is started without a launcher. On several
hosts use torchrun: scripts/launch has scripts for it.
"""

import logging
import os
import signal
import sys
from collections.abc import Sequence

from titanlite.checkpoint.publish import complete_steps
from titanlite.commands.arguments import Command, number_of
from titanlite.config.schema import Config
from titanlite.errors import ConfigError
from titanlite.observe.status import now, read_status
from titanlite.preflight.checked_run import VERBOSE, VERBOSE_HELP, checked_run
from titanlite.preflight.host_memory import shows_gpus
from titanlite.preflight.launcher import check_launcher
from titanlite.preflight.run_folder import RunFolder
from titanlite.preflight.start import check_start
from titanlite.streams import say_first, with_relative_paths

COMMAND = Command(
    "train",
    __doc__ or "",
    {
        "--gpus N": "GPUs to train on, of this host; default: all. Without GPUs: the number of processes; default: 1",
        VERBOSE: VERBOSE_HELP,
    },
)
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)
# Seconds from a signal until the launcher kills the processes. Its default of 30 is too short to finish a step and save
# a large checkpoint. torch before 2.12 always takes 30.
_STOP_S = "600"


def run(argv: list[str]) -> int:
    """Check the config, start the processes, and wait for their end."""
    given = COMMAND.read(argv)
    if by := next((name for name in ("RANK", "WORLD_SIZE") if name in os.environ), None):
        fix = f"torchrun ... train.py {given.file}, or unset {by}"
        want = "not set: this command is itself the launcher of a run on one host"
        raise ConfigError.of("environment", by, os.environ[by], want, fix)
    check_launcher()
    asked = number_of(given.own, "--gpus", int, "a number of GPUs, at least 1", "--gpus 8")
    checked = checked_run(given.flags, asked, is_start=True)
    n = _n_processes(asked)  # imports torch if there are GPUs: slower than the check above
    if asked is None:
        checked = checked_run(given.flags, n)
    check_start(checked.config, checked.inputs)
    program = ["-m", "titanlite.train", *given.flags, *([VERBOSE] if VERBOSE in given.own else [])]
    if n == 1:
        sys.stdout.flush()
        os.execv(sys.executable, [sys.executable, *program])
    return _launch(n, program, checked.config)


def _n_processes(asked: int | None) -> int:
    """Return the number of processes: `asked`, or one per visible GPU, or 1 without GPUs. Refuse more than the GPUs."""
    if not shows_gpus():
        return asked or 1
    import torch

    there = torch.cuda.device_count()
    if 0 < there < (asked or 0):
        want = f"at most {there}, which this process sees"
        fix = f"--gpus {there}, or torchrun with --nnodes on several hosts"
        raise ConfigError.of("command line", "--gpus", str(asked), want, fix)
    return asked or there or 1


def _launch(n: int, program: Sequence[str], config: Config) -> int:
    """Run `program` in `n` processes under torchrun's agent, in this process; return the exit code of the run."""
    say_first(f"starting {n} processes")
    import torch.distributed.run as torchrun
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    os.environ.setdefault("OMP_NUM_THREADS", "1")  # torchrun would set the same, with a warning
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", _STOP_S)
    _silence_agent()
    handled = [each.name for each in _SIGNALS if signal.getsignal(each) != signal.SIG_IGN]  # nohup ignores SIGHUP
    own = ["--standalone", "--nproc-per-node", str(n), "--signals-to-handle", ",".join(handled)]
    began = now()
    try:
        torchrun.run(torchrun.parse_args([*own, *program]))
    except SignalException as stop:
        return 0 if _has_stopped_well(RunFolder.of(config), config, began) else 128 + stop.sigval
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode == 2:  # a mistake of the user, which the rank has reported
            return 2
        how = f"exit code {failure.exitcode}" if failure.exitcode >= 0 else failure.signal_name()
        log = RunFolder.of(config).logs / f"rank{rank}.log"
        sys.stderr.write(with_relative_paths(f"rank {rank} ended first, with {how}; its log is {log}\n"))
        return failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
    return 0


def _silence_agent() -> None:
    """Keep the log of torchrun's agent off the terminal: each rank reports its own error."""
    for name in logging.root.manager.loggerDict:
        if name.startswith("torch.distributed.elastic"):  # each logger has its own level
            logging.getLogger(name).setLevel(logging.CRITICAL)


def _has_stopped_well(folder: RunFolder, config: Config, began: str) -> bool:
    """Return whether the run finished, or stopped on a first signal with its last step saved if saving is enabled.

    `began`: when this process started the run; the status of an earlier start does not count.
    """
    try:
        said = read_status(folder.status)
    except (OSError, ValueError):
        return False
    if said.get("started", "") < began or said["state"] not in ("stopped", "finished"):
        return False
    if said["state"] == "finished":
        return True
    at_once = str(said.get("by", "")).startswith("a second signal")
    saved = complete_steps(folder.checkpoints)[-1:] == [said.get("step")]
    return not at_once and (saved or not config.checkpoint.enable)
