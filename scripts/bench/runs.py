"""Runs of one GPU each, as many at once as there are GPUs: for scripts that compare their losses."""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue
from threading import Lock

ROOT = Path(__file__).parents[2]
LAST = 100


def parser_of_runs(description: str | None) -> argparse.ArgumentParser:
    """Make a parser of what all such runs have."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--config", default="configs/llama3_150m.toml")
    parser.add_argument("--flags", default="", help="more flags of train.py, for all runs")
    parser.add_argument("--timeout-s", type=float, default=600)
    parser.add_argument("--logs", type=lambda given: Path(given).absolute(), default=Path(tempfile.mkdtemp()))
    return parser


def train_all(
    runs: Mapping[str, Sequence[str]], args: argparse.Namespace, ended: Callable[[str], None] = lambda name: None
) -> bool:
    """Make runs that have not finished, under `logs/runs`; return whether all came to their end.

    Args:
        runs: flags of each, by name.
        args: from `parser_of_runs`.
        ended: is called with the name of each run that has finished, at once, by one thread at a time.
    """
    config, flags, gpus, timeout_s, logs = args.config, args.flags, args.gpus, args.timeout_s, args.logs
    logs.mkdir(parents=True, exist_ok=True)
    devices: Queue[int] = Queue()
    for device in range(gpus):
        devices.put(device)
    left = [name for name in runs if not _is_finished(logs / "runs" / name)]
    for name in runs:
        if name not in left:
            ended(name)
    lock = Lock()
    if left:  # the text is tokenized once, before runs at the same time would each do it
        titanlite("prepare", "--config", config, *flags.split())

    def train(name: str) -> bool:
        device = devices.get()
        try:
            given = ["--config", config, *runs[name], *flags.split()]
            is_done = _train(name, given, device, timeout_s, logs)
        finally:
            devices.put(device)
        if is_done:
            with lock:
                ended(name)
        return is_done

    with ThreadPoolExecutor(gpus) as pool:
        return all(list(pool.map(train, left)))


def _is_finished(run: Path) -> bool:
    """Return whether a run has made its last step."""
    status = run / "status.json"
    return status.is_file() and json.loads(status.read_text())["state"] == "finished"


def _train(name: str, flags: list[str], device: int, timeout_s: float, logs: Path) -> bool:
    """Make one run; return whether it came to its end."""
    command = [sys.executable, "train.py", "--job.name", name, "--job.dump_folder", str(logs / "runs")]
    command += ["--checkpoint.enable=false", "--validation.enable=false", "--metrics.log_freq", "1", *flags]
    log, began = logs / f"{name}.log", time.monotonic()
    with log.open("w") as file:
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": str(device), "OMP_NUM_THREADS": "4"}
        try:
            done = subprocess.run(command, cwd=ROOT, stdout=file, stderr=file, timeout=timeout_s, env=environment)
        except subprocess.TimeoutExpired:
            print(f"{name}: over {timeout_s:.0f} s", flush=True)
            return False
    if done.returncode:
        print("\n".join([f"{name}: failed", *log.read_text().splitlines()[-15:]]), flush=True)
        return False
    print(f"{name}: {time.monotonic() - began:.0f} s", flush=True)
    return True


def last_steps(run: Path) -> dict[str, float]:
    """Return the means of a run's numbers over its last steps."""
    rows = [row for row in map(json.loads, (run / "metrics.jsonl").read_text().splitlines()) if "loss" in row][-LAST:]
    return {key: statistics.mean(row[key] for row in rows) for key in rows[0] if key != "step"}


def titanlite(*arguments: str, shown: bool = False) -> None:
    """Run a command, its output `shown` or not; the 1 of `compare` says that runs differ, as some shall."""
    stdout = None if shown else subprocess.DEVNULL
    done = subprocess.run([sys.executable, "-m", "titanlite", *arguments], cwd=ROOT, stdout=stdout)
    if done.returncode > (arguments[0] == "compare"):
        done.check_returncode()
