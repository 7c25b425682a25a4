"""Print the milliseconds from the start of each command to its first output on a terminal.

python scripts/bench/first_output.py          trains debug.toml for two steps first, for the commands that take a run
"""

import os
import pty
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
CONFIG, ROUNDS, LIMIT_S = "configs/debug.toml", 5, 60
COMMANDS = (
    "titanlite --help",
    "titanlite recipes model",
    "titanlite schema",
    f"titanlite validate {CONFIG}",
    f"titanlite plan {CONFIG} --world 2",
    "titanlite new {new} --model debug --gpu cpu --tokens 1M",
    f"titanlite prepare {CONFIG} --data.cache_dir {{cache}}",
    f"titanlite data {CONFIG}",
    "titanlite compare {run} {run}",
    "titanlite explain {run}",
    "titanlite generate {run} --prompt import",
    "titanlite evaluate {run}",
    "titanlite export {run} --out {out}",
    f"titanlite verify-resume {CONFIG} --steps 1",
    f"titanlite train {CONFIG} --job.name timed --job.dump_folder {{folder}}",
    f"train.py --config {CONFIG} --job.name timed --job.dump_folder {{folder}}",
)


def first_output(argv: list[str]) -> float:
    """Return the seconds until a program writes to its terminal; the program is killed then."""
    reader, writer = pty.openpty()
    begin = time.perf_counter()
    program = subprocess.Popen(argv, cwd=ROOT, stdin=writer, stdout=writer, stderr=writer, start_new_session=True)
    try:
        os.read(reader, 1)
        return time.perf_counter() - begin
    finally:
        os.killpg(program.pid, signal.SIGKILL)
        program.wait(LIMIT_S)
        os.close(reader)
        os.close(writer)


def main() -> None:
    """Measure each command, and print a row."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        made = [sys.executable, "train.py", "--config", CONFIG, "--training.steps", "2", "--lr_scheduler.warmup_steps"]
        made += ["1", "--metrics.wandb", "off", "--job.dump_folder", name, "--job.name", "run"]
        subprocess.run(made, cwd=ROOT, check=True, capture_output=True)
        for command in COMMANDS:
            seconds = []
            for n in range(ROUNDS):
                new = {key: f"{folder}/{key}{n}" for key in ("cache", "out")}
                words = command.format(**new, run=f"{folder}/run", new=f"{folder}/new{n}.toml", folder=folder).split()
                program = [words[0]] if words[0].endswith(".py") else ["-m", words[0]]
                seconds.append(first_output([sys.executable, *program, *words[1:]]))
            print(f"{1e3 * statistics.median(seconds):6.0f} ms  {command}", flush=True)


if __name__ == "__main__":
    main()
