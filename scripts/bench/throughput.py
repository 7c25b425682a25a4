"""End-to-end speed of training runs, interleaved: python scripts/bench/throughput.py --gpus 8 [LAYOUT …]

Each layout is one command line of train.py. All layouts are run once, then all again, so that a drift of the machine
meets each of them alike. A run's figure is the median over its steps after the first five; at the end a row for each
layout has the median over its runs and their spread, for benchmarks/results/runs.jsonl.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path

ROOT = Path(__file__).parents[2]
SETTLE = 5  # steps before speed is steady: compilation, the allocator, clocks

_8B = "--config benchmarks/configs/llama3_8b.toml --activation_checkpoint.recipe"
_1B = "--config benchmarks/configs/llama3_1b.toml --activation_checkpoint.recipe"
_70B = "--config benchmarks/configs/llama3_70b.toml --activation_checkpoint.recipe"
_WIDE = "--model.n_layers 16 --training.local_batch_size 2"
_TP, _ASYNC = "--parallelism.tensor_parallel_degree", "--parallelism.async_tensor_parallel"
LAYOUTS = {
    "fsdp bf16": f"{_8B} balanced_tight",
    "fsdp bf16 balanced": f"{_8B} balanced",
    "fsdp bf16 none": f"{_8B} none",
    "fsdp bf16 matmuls": f"{_8B} matmuls",
    "fsdp tensorwise": f"{_8B} none --float8.recipe tensorwise",
    "fsdp rowwise": f"{_8B} none --float8.recipe rowwise",
    "fsdp tensorwise balanced": f"{_8B} balanced --float8.recipe tensorwise",
    "fsdp rowwise balanced": f"{_8B} balanced --float8.recipe rowwise",
    "fsdp rowwise, the peer's list": f"{_8B} every_second_matmul --float8.recipe rowwise",
    "fsdp tensorwise, the peer's list": f"{_8B} every_second_matmul --float8.recipe tensorwise",
    "fsdp rowwise, 16 micro-steps of 8 GPUs": f"{_8B} none --float8.recipe rowwise --training.global_batch_size 256",
    "fsdp blockwise": f"{_8B} none --float8.recipe blockwise",
    "tp4 bf16": f"{_8B} none {_TP} 4",
    "tp4 bf16 async": f"{_8B} none {_TP} 4 {_ASYNC}",
    "tp4 bf16 async batch 8": f"{_8B} none {_TP} 4 {_ASYNC} --training.local_batch_size 8",
    "tp4 tensorwise async": f"{_8B} none {_TP} 4 {_ASYNC} --float8.recipe tensorwise",
    "tp4 rowwise async": f"{_8B} none {_TP} 4 {_ASYNC} --float8.recipe rowwise",
    "tp2 bf16": f"{_8B} none {_TP} 2",
    "tp8 bf16": f"{_8B} none {_TP} 8",
    "tp8 bf16 async": f"{_8B} none {_TP} 8 {_ASYNC}",
    "tp8 rowwise async": f"{_8B} none {_TP} 8 {_ASYNC} --float8.recipe rowwise",
    "70b wide tp8 bf16": f"{_70B} none {_WIDE} {_TP} 8",
    "70b wide tp8 bf16 async": f"{_70B} none {_WIDE} {_TP} 8 {_ASYNC}",
    "1b bf16": f"{_1B} none --training.seq_len 8192 --training.local_batch_size 2",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("layouts", nargs="*", metavar="LAYOUT", help=f"of: {', '.join(LAYOUTS)}; or NAME=FLAGS")
    parser.add_argument("--gpus", type=int, required=True)
    parser.add_argument("--alone", action="store_true", help="one rank of so many GPUs, on one: one_rank.py")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--timeout-s", type=float, default=400, help="of a run; 16 micro-steps take 350 s")
    parser.add_argument("--logs", type=Path, default=Path(tempfile.mkdtemp()))
    args = parser.parse_args()
    args.logs.mkdir(parents=True, exist_ok=True)
    layouts = dict(_named(name) for name in args.layouts or LAYOUTS)
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in layouts}
    for repeat in range(args.repeats):
        for name, flags in layouts.items():
            started = time.monotonic()
            row = run(f"{name} {repeat}".replace(" ", "-"), flags, args)
            print(f"{name} {repeat}: {row or 'failed'} in {time.monotonic() - started:.0f} s", flush=True)
            if row:
                runs[name].append(row)
    for name, measured in runs.items():
        if measured:
            print(json.dumps(as_row(layouts[name], measured, args)))


def as_row(flags: str, measured: list[dict[str, float]], args: argparse.Namespace) -> dict[str, object]:
    """Return a row of benchmarks/results/runs.jsonl.

    Args:
        flags: of train.py, `--config` first.
        measured: what `run` returned, for each run.
        args: `gpus`, `alone`, `repeats`, `steps` and `logs`.
    """
    before, _, rest = flags.partition("--config ")
    config, _, after = rest.partition(" ")
    environment, *_ = json.loads(next((args.logs / "runs").glob("*/receipt.json")).read_text())
    commit = subprocess.check_output(["git", "rev-parse", "--short=7", "HEAD"], cwd=ROOT, text=True).strip()
    middle = {key: statistics.median(row[key] for row in measured) for key in measured[0]}
    speeds = sorted(round(row["tokens_per_second_per_gpu"]) for row in measured)
    row = {"config": config.removeprefix("benchmarks/"), "world": args.gpus, "alone": args.alone}
    row |= {"flags": f"{before}{after}"}
    row |= {"gpu": environment["applied"]["device"], "commit": commit, "date": date.today().isoformat()}
    row |= {"command": f"scripts/bench/throughput.py --gpus {args.gpus} --repeats {args.repeats} --steps {args.steps}"}
    return row | {
        "steps": f"{SETTLE + 1}-{args.steps}",
        "repeats": len(measured),
        "tokens_per_second": round(middle["tokens_per_second_per_gpu"]),
        "tokens_per_second_spread": [speeds[0], speeds[-1]],
        "mfu_percent": round(middle["mfu"] * 100, 1),
        "ms_per_step": round(middle["seconds"] * 1e3),
        "reserved_gib": round(middle["memory_gib"], 1),
    }


def _named(text: str) -> tuple[str, str]:
    name, equals, flags = text.partition("=")
    return (name, flags) if equals else (text, LAYOUTS[text])


def run(name: str, flags: str, args: argparse.Namespace) -> dict[str, float] | None:
    """Take a few steps in a folder of its own, `<args.logs>/runs/<name>`.

    Args:
        name: of the run.
        flags: of train.py.
        args: `gpus`, `alone`, `steps`, `timeout_s` and `logs`.

    Returns:
        Medians of the metrics; None if the run failed, with the end of its log printed.
    """
    folder = args.logs / "runs"
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(args.gpus), "train.py"]
    program = ["scripts/bench/one_rank.py", str(args.gpus)] if args.alone else torchrun
    command = [sys.executable, *program, *flags.split(), "--job.name", name, "--job.dump_folder", str(folder)]
    command += ["--training.steps", str(args.steps), "--lr_scheduler.warmup_steps", "2", "--checkpoint.enable=false"]
    command += ["--validation.enable=false"]
    log = args.logs / f"{name}.log"
    environment = {**os.environ, "OMP_NUM_THREADS": "4"}
    with log.open("w") as file:
        launcher = subprocess.Popen(command, cwd=ROOT, stdout=file, stderr=file, env=environment)
        try:
            launcher.wait(args.timeout_s)
        except subprocess.TimeoutExpired:
            print(f"{name}: over {args.timeout_s} s")
        finally:
            launcher.terminate()  # it ends its ranks; killed, it would leave them to the GPUs that the next run wants
            launcher.wait()
    metrics = folder / name / "metrics.jsonl"
    lines = metrics.read_text().splitlines() if metrics.exists() else []
    rows = [row for row in map(json.loads, lines) if "loss" in row]
    if len(rows) < args.steps:
        print("\n".join(log.read_text().splitlines()[-15:]))
        return None
    keys = ("tokens_per_second_per_gpu", "mfu", "seconds", "memory_gib", "memory_allocated_gib")
    return {key: statistics.median(row[key] for row in rows[SETTLE:]) for key in keys}


if __name__ == "__main__":
    main()
