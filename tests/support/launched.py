"""Whole runs of `train.py` on real processes, started as a person starts them: a config, flags, a run folder.

Ranks are forked and meet over TCP as under torchrun, so a run costs a second where fresh interpreters cost six each.
What depends on the launcher itself uses `torchrun`.
"""

import contextlib
import functools
import json
import multiprocessing
import os
import random
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import rich.console
import tomli_w
import torch._export.passes._node_metadata_hook
import torch._export.passes.replace_autocast_with_hop_pass
import torch._inductor.compiler_bisector
import torch._inductor.fx_passes.dedupe_symint_uses
import torch._logging
import torch._subclasses.schema_check_mode
import torch.distributed.checkpoint
import torch.distributed.elastic.rendezvous.api
import torch.distributed.run
import torch.export._trace
import torch.fx.experimental.validator
import torch.utils.serialization.config

import titanlite.exit_code
import titanlite.observe.console
import titanlite.observe.peak_flops
import titanlite.training.summary
import titanlite.training.train
import train
from tests.support.forks import LAUNCHER_VARIABLES, fork, forks_beside_threads, print_to
from tests.support.shared_plan import plan_for_all_ranks
from titanlite.checkpoint.store import digests
from titanlite.errors import TitanliteError
from titanlite.exit_code import exit_code
from titanlite.forecast.traced_run import traced_run
from titanlite.observe.metrics import read_metrics
from titanlite.preflight.checked_run import checked_run

REPOSITORY = Path(__file__).parents[2]
# For all forked ranks.
_IMPORTED_ONCE = (
    rich.console,
    torch._export.passes._node_metadata_hook,
    torch._export.passes.replace_autocast_with_hop_pass,
    torch._inductor.compiler_bisector,
    torch._inductor.fx_passes.dedupe_symint_uses,
    torch._subclasses.schema_check_mode,
    torch.distributed.checkpoint,
    torch.export._trace,
    torch.fx.experimental.validator,
    torch.utils.serialization.config,
    titanlite.training.train,
)

SMALL = {
    "model.flavor": "debug",
    "model.n_layers": 2,
    "model.dim": 128,
    "model.n_heads": 4,
    "model.n_kv_heads": 2,
    "model.ffn_dim": 256,
    "training.steps": 20,
    "training.seq_len": 64,
    "training.local_batch_size": 2,
    "training.global_batch_size": 4,
    "training.mixed_precision_param": "float32",
    "optimizer.lr": 2e-3,
    "lr_scheduler.warmup_steps": 5,
    "compile.enable": False,
    "checkpoint.interval": 100,
}


@dataclass
class Job:
    """The forked ranks of one run."""

    pids: list[int]
    logs: list[Path]

    def wait(self, timeout_s: float = 300) -> list[int]:
        """Exit code of every rank; a rank that outlives the limit is aborted, and its stack is in `output`."""
        codes: dict[int, int] = {}
        deadline = time.monotonic() + timeout_s
        while len(codes) < len(self.pids):
            for rank, pid in enumerate(self.pids):
                if rank in codes:
                    continue
                if time.monotonic() > deadline:
                    os.kill(pid, signal.SIGABRT)
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    codes[rank] = os.waitstatus_to_exitcode(status)
            time.sleep(0.005)
        return [codes[rank] for rank in range(len(self.pids))]

    def output(self) -> str:
        """What the ranks have printed by now, one after the other."""
        said = [log.read_text() if log.exists() else "" for log in self.logs]  # each rank opens its own
        return "".join(f"--- rank {rank}\n{text}" for rank, text in enumerate(said))


class Desk:
    """A folder with a corpus, where runs are started and looked at.

    Args:
        folder: an empty one.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self._configs = folder, dict[str, Path]()
        words = [line.rstrip() for line in Path(random.__file__).read_text().splitlines() if line.strip()]
        (folder / "train.txt").write_text("\n".join(words))
        # 64-token samples of it divide by no number of ranks: a prime number of them, and a piece.
        (folder / "held_out.txt").write_text("\n".join(reversed(words))[: 37 * 64 + 30])
        # What parses, checks and traces is loaded, and torch's tables of operations are filled, for all ranks.
        asked = checked_run(self.flags("first", "--job.stop_after=1"), world_size=1)
        traced_run(asked.config, asked.dims, asked.float8)

    def flags(self, name: str, *flags: str) -> list[str]:
        """The command line of a small run; `flags` win over what makes it small.

        That stands in the file: to parse it as flags would be a fifth of what a rank does in a run of a few steps.
        """
        here = {
            "job.name": name,
            "job.dump_folder": str(self.folder / "runs"),
            "data.source": str(self.folder / "train.txt"),
            "data.cache_dir": str(self.folder / "cache"),
            "validation.source": str(self.folder / "held_out.txt"),
        }
        sections: dict[str, dict[str, Any]] = {}
        for key, value in {**SMALL, **here}.items():
            section, _, name = key.partition(".")
            sections.setdefault(section, {})[name] = value
        text = tomli_w.dumps(sections)
        file = self._configs.setdefault(text, self.folder / f"small-{len(self._configs)}.toml")
        file.write_text(text)
        given = dict(flag.split("=", 1) for flag in flags)  # the last of equal ones
        return ["--config", str(file), *(f"{key}={value}" for key, value in given.items())]

    def start(self, name: str, world: int, *flags: str, plant: Callable[[], object] = lambda: None) -> Job:
        """Start a run.

        Args:
            name: of the run.
            world: ranks; one is started as plain `python train.py`, without a launcher's variables.
            flags: as `--section.key=value`; they win over those of `SMALL`.
            plant: called in each rank before it starts, to plant a fault.
        """
        return self._fork(world, self.flags(name, *flags), plant)

    def run(
        self, name: str, world: int, *flags: str, plant: Callable[[], object] = lambda: None, ends: int = 0
    ) -> "Ended":
        """Start a run, wait for its end, and expect this exit code of every rank."""
        job = self.start(name, world, *flags, plant=plant)
        codes = job.wait()
        assert codes == [ends] * world, f"{codes}\n{job.output()}"
        return Ended(self.folder / "runs" / name, job.output())

    def rerun(self, config: Path, *flags: str, world: int = 1) -> None:
        """Start a run from a config file instead."""
        job = self._fork(world, ["--config", str(config), *flags], lambda: None)
        assert job.wait() == [0] * world, job.output()

    def _fork(self, world: int, argv: list[str], plant: Callable[[], object]) -> Job:
        if world > 1 and any("tensor_parallel_degree" in word for word in argv):
            with contextlib.suppress(TitanliteError):  # which the ranks say themselves
                plan_for_all_ranks(checked_run(argv, world_size=world))
        logs, port = [self.folder / f"{time.monotonic_ns()}-rank{rank}.log" for rank in range(world)], free_port()
        ranks = [functools.partial(train_rank, rank, world, port, argv, plant) for rank in range(world)]
        return Job([fork(body, log) for body, log in zip(ranks, logs, strict=True)], logs)


@dataclass(frozen=True)
class Ended:
    """A run that has ended, and what it left."""

    folder: Path
    output: str

    @property
    def steps(self) -> list[dict[str, Any]]:
        """Rows of steps in metrics.jsonl."""
        return [row for row in self.rows if "loss" in row]

    @property
    def rows(self) -> list[dict[str, Any]]:
        """Rows of metrics.jsonl."""
        return rows(self.folder)

    @property
    def status(self) -> dict[str, Any]:
        """status.json."""
        return json.loads((self.folder / "status.json").read_text())

    @property
    def receipt(self) -> dict[str, dict[str, Any]]:
        """receipt.json, by feature."""
        return {entry["feature"]: entry for entry in json.loads((self.folder / "receipt.json").read_text())}

    def losses(self, key: str = "loss") -> list[float]:
        """One column of the steps."""
        return [row[key] for row in self.steps]

    def trained(self) -> list[tuple[int, float, float]]:
        """What training did, without what its speed was."""
        return [(row["step"], row["loss"], row["grad_norm"]) for row in self.steps]

    def content(self, step: int, rng: bool = False) -> dict[str, str]:
        """Hashes of the shards of a checkpoint's weights and moments, or of its random state: equal bit for bit."""
        found = digests(self.folder / "checkpoints" / f"step-{step:08d}")
        return {name: digest for name, digest in found.items() if name.startswith("rng/") == rng}

    def checkpoints(self) -> list[int]:
        """Steps of the complete checkpoints."""
        return sorted(int(path.name.removeprefix("step-")) for path in (self.folder / "checkpoints").glob("step-*"))


def rows(folder: Path) -> list[dict[str, Any]]:
    """Rows of the metrics.jsonl of a run that may be running; none if there is no file yet."""
    path = folder / "metrics.jsonl"
    return read_metrics(path) if path.exists() else []


def wait_for_step(folder: Path, step: int) -> None:
    """Wait until a run has logged a step, five minutes at most."""
    deadline = time.monotonic() + 300
    while not any(row["step"] >= step for row in rows(folder)):
        assert time.monotonic() < deadline, f"{folder} has not reached step {step}"
        time.sleep(0.005)


def free_port() -> int:
    """A port that nobody listens on, and that Linux gives to no connection before somebody does (not from 32768 on)."""
    while True:
        port = random.SystemRandom().randrange(16384, 32768)
        with contextlib.suppress(OSError), socket.socket() as s:
            s.bind(("", port))
            return port


class Launcher:
    """A torchrun in the background, forked from here where torch is imported; its workers are fresh interpreters."""

    def __init__(self, argv: list[str], log: Path, main: Callable[[list[str]], object] | None = None) -> None:
        args = (main or torch.distributed.run.main, argv, log)
        self._process = multiprocessing.get_context("fork").Process(target=_launch, args=args)
        with forks_beside_threads():
            self._process.start()

    def wait(self, timeout_s: float) -> int | None:
        """Its exit code; None if it goes on."""
        self._process.join(timeout_s)
        return self._process.exitcode

    @property
    def pid(self) -> int:
        """Its process id."""
        assert self._process.pid is not None
        return self._process.pid

    def terminate(self) -> None:
        """Send it SIGTERM."""
        self._process.terminate()

    def kill(self) -> None:
        """End it at once."""
        self._process.kill()


def torchrun(launcher: Sequence[str], script: str, argv: Sequence[str], log: Path) -> Launcher:
    """Start torchrun in the background.

    Args:
        launcher: its own flags.
        script: what it runs.
        argv: arguments of that.
        log: takes stdout and stderr.
    """
    return Launcher([*launcher, script, *argv], log)


def _launch(main: Callable[[list[str]], object], argv: list[str], log: Path) -> None:
    """`python -m torch.distributed.run`, or another that starts torchrun's agent and returns its exit code."""
    print_to(log)
    torch._logging._init_logs()  # its messages, too
    for name in LAUNCHER_VARIABLES:
        os.environ.pop(name, None)
    os.environ |= {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(REPOSITORY),
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # gloo's second start would meet the keys of the first
    }
    os.chdir(REPOSITORY)
    # The agent takes any port, for a worker to listen on seconds later; meanwhile a neighbour's connection may get it.
    torch.distributed.elastic.rendezvous.api.get_free_port = free_port
    sys.exit(main(argv))  # type: ignore[arg-type]


def train_rank(rank: int, world: int, port: int, argv: list[str], plant: Callable[[], object]) -> int:
    """`python train.py`, as torchrun starts it where there are several ranks."""
    for name in LAUNCHER_VARIABLES:
        os.environ.pop(name, None)
    if world > 1:
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
        os.environ.update({k: str(v) for k, v in place.items()}, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    sys.argv = ["train.py", *argv]
    titanlite.exit_code._RANK_0_SPEAKS_S = 0.0  # no launcher ends this rank meanwhile
    titanlite.observe.peak_flops._LARGEST = 256  # nobody looks at the MFU
    titanlite.observe.console.WIDTH = titanlite.training.summary.WIDTH = 1000  # tests look for whole lines
    os.fsync = lambda fd: None  # what a killed process has written is there, and no test switches the host off
    plant()
    return exit_code(train.main)
