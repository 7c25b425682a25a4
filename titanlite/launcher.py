"""What starts the processes of a run, and whether it has said all that they need; no torch here."""

import os

from titanlite.errors import ConfigError, Problem, describe

# Each tells how many processes it started, and nothing that torch understands.
_OTHER_LAUNCHERS = {"srun": "SLURM_STEP_NUM_TASKS", "mpirun": "OMPI_COMM_WORLD_SIZE", "mpiexec": "PMI_SIZE"}
_SAID = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def check_launcher() -> None:
    """Refuse a launcher whose restarts cannot work, or a part of one; call before anything else.

    Raises:
        ConfigError: torchrun would restart workers on a store in which gloo finds the addresses of dead ones; there is
            a rank or a number of ranks, as a shell may have kept it, without the rest of what a launcher says; or srun
            or mpirun started several processes, each of which would take itself for the whole run.
    """
    given = [name for name in ("RANK", "WORLD_SIZE") if name in os.environ]
    missing = [name for name in _SAID if name not in os.environ]
    several = [(by, name, n) for by, name in _OTHER_LAUNCHERS.items() if (n := os.environ.get(name, "1")) != "1"]
    if several and not given:
        by, name, n = several[0]  # srun may say it in the words of mpiexec, too
        want = f"1 on each host, which is torchrun; or {', '.join((*_SAID, 'LOCAL_RANK'))} set for each process"
        how = "srun --ntasks-per-node 1 torchrun ... train.py, as in scripts/launch/slurm.sbatch"
        fix = f"{how}; for one process, unset {name}"
        raise ConfigError(describe(by, [Problem("processes", n, want, fix)]))
    if given and missing:
        want = f"set, as a launcher does, beside {' and '.join(given)}"
        fix = f"start with torchrun, or unset {' '.join(given)} for a run of one process"
        raise ConfigError(describe("environment", [Problem(name, "not set", want, fix) for name in missing]))
    restarts = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")
    if restarts != "0" and os.environ.get("TORCH_DISABLE_SHARE_RDZV_TCP_STORE") != "1":
        want = "0, or a store of its own for each restart: in a shared one gloo finds the addresses of dead workers"
        fix = "export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 on every host, before torchrun"
        raise ConfigError(describe("torchrun", [Problem("--max-restarts", restarts, want, fix)]))
