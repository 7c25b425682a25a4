"""Check that a launcher has set all variables that a run's processes need, and watch whether it is still alive.

The ranks of a launcher that is killed are not ended. They would train on, and hold their GPUs.
"""

import os
from itertools import pairwise
from pathlib import Path

from titanlite.errors import ConfigError, Problem, describe

# Each of these sets the number of its processes, but no variable that torch reads.
_OTHER_LAUNCHERS = {"srun": "SLURM_STEP_NUM_TASKS", "mpirun": "OMPI_COMM_WORLD_SIZE", "mpiexec": "PMI_SIZE"}
_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def check_launcher() -> None:
    """Refuse an environment in which ranks would not find each other. Call before anything else.

    Raises:
        ConfigError: torchrun would restart workers on a store that has the addresses of dead workers; RANK or
            WORLD_SIZE is set, perhaps by a shell, without the other variables; or srun or mpirun started several
            processes, each of which would train alone as if it were the complete run.
    """
    given = [name for name in ("RANK", "WORLD_SIZE") if name in os.environ]
    missing = [name for name in _VARIABLES if name not in os.environ]
    several = [(by, name, n) for by, name in _OTHER_LAUNCHERS.items() if (n := os.environ.get(name, "1")) != "1"]
    if several and not given:
        by, name, n = several[0]  # srun may set mpiexec's variable, too
        want = f"1 on each host, which is torchrun; or {', '.join((*_VARIABLES, 'LOCAL_RANK'))} set for each process"
        how = "srun --ntasks-per-node 1 torchrun ... train.py, as in scripts/launch/slurm.sbatch"
        fix = f"{how}; for one process, unset {name}"
        raise ConfigError.of(by, "processes", n, want, fix)
    if given and missing:
        want = f"set, as a launcher does, beside {' and '.join(given)}"
        fix = f"start with torchrun, or unset {' '.join(given)} for a run of one process"
        raise ConfigError(describe("environment", [Problem(name, "not set", want, fix) for name in missing]))
    restarts = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")
    if restarts != "0" and os.environ.get("TORCH_DISABLE_SHARE_RDZV_TCP_STORE") != "1":
        want = "0, or a store of its own for each restart: in a shared one gloo finds the addresses of dead workers"
        fix = "export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 on every host, before torchrun"
        raise ConfigError.of("torchrun", "--max-restarts", restarts, want, fix)


class Launcher:
    """Watches the process that gave this one its rank, and the processes between the two, such as a shell.

    The launcher is the nearest ancestor that was started without this rank's variables, or the parent on systems
    without /proc. There is no launcher if this process has no rank, or if all ancestors in its container have the
    variables.
    """

    def __init__(self) -> None:
        self._line = _up_to_launcher() if "RANK" in os.environ else []

    def is_gone(self) -> bool:
        """Return whether the launcher, or a process between it and this one, has ended (its child has a new parent)."""
        try:
            return any(_parent(child) != parent for child, parent in pairwise(self._line))
        except OSError:  # e.g. no descriptor is left to read /proc: nothing is known of the launcher
            return False


def _up_to_launcher() -> list[int]:
    """Return the process ids from this process up to its launcher; empty if no launcher is found."""
    words = {f"{name}={os.environ[name]}".encode() for name in (*_VARIABLES, "LOCAL_RANK") if name in os.environ}
    line = [os.getpid(), os.getppid()]
    while line[-1] > 1:  # 0 is a process of another container, 1 the first of this one or of the system
        try:
            was_told = words <= set(Path(f"/proc/{line[-1]}/environ").read_bytes().split(b"\0"))
            above = _parent(line[-1])
        except OSError:  # a process of another user, such as Slurm's, or not Linux
            return line
        if not was_told:
            return line
        line.append(above)
    return []


def _parent(process: int) -> int:
    """Return the id of the parent of `process`, this process or an ancestor of it; 0 if `process` has ended."""
    if process == os.getpid():
        return os.getppid()
    try:
        return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return 0
