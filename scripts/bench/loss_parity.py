"""Compare the losses of float8 recipes with those of bf16: python scripts/bench/loss_parity.py --gpus 4 [RECIPE …]

Runs of one GPU each, as many at once as there are GPUs: bf16 with several seeds, whose losses are the noise, and each
float8 recipe with the first of them. The loss of a run is its mean over the last hundred steps; the noise band is that
of the seeds, their mean and three standard deviations to both sides. A recipe outside of it is named, and the exit code
is 1. `titanlite compare` draws the curves into one picture.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
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
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--timeout-s", type=float, default=600)
    parser.add_argument("--logs", type=Path, default=Path(tempfile.mkdtemp()))
    parser.add_argument("--picture", type=Path, default=Path("loss_parity.png"))
    args = parser.parse_args()
    args.logs.mkdir(parents=True, exist_ok=True)
    runs = {f"bf16-seed-{seed}": ("none", seed) for seed in args.seeds}
    runs |= {recipe: (recipe, args.seeds[0]) for recipe in args.recipes}
    devices: Queue[int] = Queue()
    for device in range(args.gpus):
        devices.put(device)
    # The text is tokenized once, before runs at the same time would each do it.
    _titanlite("prepare", "--config", args.config)

    def train(name: str) -> float | None:
        device = devices.get()
        try:
            return _train(name, *runs[name], device, args)
        finally:
            devices.put(device)

    with ThreadPoolExecutor(args.gpus) as pool:
        losses = dict(zip(runs, pool.map(train, runs), strict=True))
    return _report(losses, args)


def _train(name: str, recipe: str, seed: int, device: int, args: argparse.Namespace) -> float | None:
    """Return the mean loss over the last steps of one run, or None if it failed."""
    command = [sys.executable, "train.py", "--config", args.config, "--float8.recipe", recipe]
    command += ["--training.seed", str(seed), "--job.name", name, "--job.dump_folder", str(args.logs / "runs")]
    command += ["--checkpoint.enable=false", "--validation.enable=false", "--metrics.log_freq", "1"]
    log = args.logs / f"{name}.log"
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
            print(f"{name}: over {args.timeout_s:.0f} s")
            return None
    if done.returncode:
        print("\n".join([f"{name}: failed", *log.read_text().splitlines()[-15:]]))
        return None
    lines = (args.logs / "runs" / name / "metrics.jsonl").read_text().splitlines()
    steps = [row["loss"] for row in map(json.loads, lines) if "loss" in row]
    print(f"{name}: {len(steps)} steps", flush=True)
    return statistics.mean(steps[-LAST:])


def _report(losses: dict[str, float | None], args: argparse.Namespace) -> int:
    """Print the table, draw the curves and return the exit code."""
    noise = [loss for name, loss in losses.items() if name.startswith("bf16") and loss is not None]
    if len(noise) < 2 or None in losses.values():
        print("want: every run to the end, and two seeds or more")
        return 1
    middle, width = statistics.mean(noise), SIGMAS * statistics.stdev(noise)
    print(f"\nbf16: {middle:.4f} ± {width:.4f}, {len(noise)} seeds\n\n| run | loss | off | |\n|---|---|---|---|")
    for name, loss in losses.items():
        off = (loss or 0) - middle
        print(f"| {name} | {loss:.4f} | {off:+.4f} | {'inside' if abs(off) <= width else 'OUTSIDE'} |")
    _titanlite("compare", *(str(args.logs / "runs" / name) for name in losses), "--out", str(args.picture.resolve()))
    outside = [name for name in args.recipes if abs((losses[name] or 0) - middle) > width]
    if outside:
        print(f"outside of the noise: {', '.join(outside)}")
    return bool(outside)


def _titanlite(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "titanlite", *arguments], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)


if __name__ == "__main__":
    sys.exit(main())
