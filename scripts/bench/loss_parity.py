"""Compare the losses of float8 recipes with those of bf16: python scripts/bench/loss_parity.py --gpus 4 [RECIPE …]

Runs of one GPU each, as many at once as there are GPUs: bf16 with several seeds, whose losses are the noise, and each
float8 recipe with the first of them. The loss of a run is its mean over the last hundred steps; the noise band is that
of the seeds, their mean and three standard deviations to both sides. A recipe outside of it is named, and the exit code
is 1. `titanlite compare` draws the curves into one picture.

`--flavors` adds bf16 runs of other recipes of the model, with the first seed; they are shown beside the band and not
judged, as their arithmetic is meant to be another. Of a mixture of experts the table has the tokens of the fullest
expert over the mean, over layers and these steps. A run that has finished in `--logs` is taken as it is: what was cut
short goes on, and runs that were copied here are judged without a GPU. A mixture, three ways of balance:

    python scripts/bench/loss_parity.py --gpus 4 rowwise --config scripts/bench/olmoe_eighth.toml \\
      --flavors eighth_bias eighth_unbalanced
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue

ROOT = Path(__file__).parents[2]
LAST = 100
SIGMAS = 3


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = sorted(path.stem for path in (ROOT / "recipes" / "float8").glob("*.toml"))
    parser.add_argument("recipes", nargs="*", metavar="RECIPE", default=names, help=f"of: {', '.join(names)}")
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--config", default="configs/llama3_150m.toml")
    parser.add_argument("--flags", default="", help="more flags of train.py, for all runs")
    parser.add_argument("--flavors", nargs="*", default=[], help="of the model, beside that of the config")
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--timeout-s", type=float, default=600)
    parser.add_argument("--logs", type=Path, default=Path(tempfile.mkdtemp()))
    parser.add_argument("--picture", type=Path, default=Path("loss_parity.png"))
    args = parser.parse_args()
    args.logs = args.logs.absolute()
    args.logs.mkdir(parents=True, exist_ok=True)
    seeds = {seed: ["--training.seed", str(seed)] for seed in args.seeds}
    first = seeds[args.seeds[0]]
    runs = {f"bf16-seed-{seed}": ["--float8.recipe", "none", *flags] for seed, flags in seeds.items()}
    runs |= {recipe: ["--float8.recipe", recipe, *first] for recipe in args.recipes}
    runs |= {flavor: ["--float8.recipe", "none", "--model.flavor", flavor, *first] for flavor in args.flavors}
    devices: Queue[int] = Queue()
    for device in range(args.gpus):
        devices.put(device)
    left = [name for name in runs if not _is_finished(args.logs / "runs" / name)]
    if left:  # the text is tokenized once, before runs at the same time would each do it
        _titanlite("prepare", "--config", args.config, *args.flags.split())

    def train(name: str) -> bool:
        device = devices.get()
        try:
            return _train(name, runs[name], device, args)
        finally:
            devices.put(device)

    with ThreadPoolExecutor(args.gpus) as pool:
        done = dict(zip(left, pool.map(train, left), strict=True))
    if len(args.seeds) < 2 or not all(done.values()):
        print("want: every run to the end, and two seeds or more")
        return 1
    return _report({name: _last_steps(args.logs / "runs" / name) for name in runs}, args)


def _is_finished(run: Path) -> bool:
    """Return whether a run has made its last step."""
    status = run / "status.json"
    return status.is_file() and json.loads(status.read_text())["state"] == "finished"


def _train(name: str, flags: list[str], device: int, args: argparse.Namespace) -> bool:
    """Make one run; return whether it came to its end."""
    command = [sys.executable, "train.py", "--config", args.config, *flags]
    command += ["--job.name", name, "--job.dump_folder", str(args.logs / "runs")]
    command += ["--checkpoint.enable=false", "--validation.enable=false", "--metrics.log_freq", "1"]
    log, began = args.logs / f"{name}.log", time.monotonic()
    with log.open("w") as file:
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": str(device), "OMP_NUM_THREADS": "4"}
        try:
            done = subprocess.run(
                [*command, *args.flags.split()],
                cwd=ROOT,
                stdout=file,
                stderr=file,
                timeout=args.timeout_s,
                env=environment,
            )
        except subprocess.TimeoutExpired:
            print(f"{name}: over {args.timeout_s:.0f} s", flush=True)
            return False
    if done.returncode:
        print("\n".join([f"{name}: failed", *log.read_text().splitlines()[-15:]]), flush=True)
        return False
    print(f"{name}: {time.monotonic() - began:.0f} s", flush=True)
    return True


def _last_steps(run: Path) -> dict[str, float]:
    """Return the means of a run's numbers over its last steps."""
    rows = [row for row in map(json.loads, (run / "metrics.jsonl").read_text().splitlines()) if "loss" in row][-LAST:]
    return {key: statistics.mean(row[key] for row in rows) for key in rows[0] if key != "step"}


def _report(runs: dict[str, dict[str, float]], args: argparse.Namespace) -> int:
    """Print the table, draw the curves and return the exit code."""
    losses = {name: means["loss"] for name, means in runs.items()}
    noise = [losses[f"bf16-seed-{seed}"] for seed in args.seeds]
    middle, width = statistics.mean(noise), SIGMAS * statistics.stdev(noise)
    print(f"\nbf16: {middle:.4f} ± {width:.4f}, {len(noise)} seeds\n")
    print("| run | loss | off | | fullest |\n|---|---|---|---|---|")
    for name, means in runs.items():
        off = losses[name] - middle
        fullest = [number for key, number in means.items() if key.startswith("experts_fullest.")]
        seen = f"{statistics.mean(fullest):.2f}" if fullest else ""
        print(f"| {name} | {losses[name]:.4f} | {off:+.4f} | {'inside' if abs(off) <= width else 'OUTSIDE'} | {seen} |")
    _titanlite("compare", *(str(args.logs / "runs" / name) for name in losses), "--out", str(args.picture.resolve()))
    outside = [name for name in args.recipes if abs(losses[name] - middle) > width]
    print(f"outside of the noise: {', '.join(outside)}" if outside else f"inside the noise: {', '.join(args.recipes)}")
    return bool(outside)


def _titanlite(*arguments: str) -> None:
    """Run a command; the 1 of `compare` says that runs differ, as some shall."""
    done = subprocess.run([sys.executable, "-m", "titanlite", *arguments], cwd=ROOT, stdout=subprocess.DEVNULL)
    if done.returncode > (arguments[0] == "compare"):
        done.check_returncode()


if __name__ == "__main__":
    sys.exit(main())
