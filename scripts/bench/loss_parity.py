"""Compare the losses of float8 recipes with those of bf16: python -m scripts.bench.loss_parity --gpus 4 [RECIPE …]

Runs of one GPU each, as many at once as there are GPUs: bf16 with several seeds, whose losses are the noise, and each
float8 recipe with the first of them. The loss of a run is its mean over the last hundred steps; the noise band is that
of the seeds, their mean and three standard deviations to both sides. A recipe outside of it is named, and the exit code
is 1. `titanlite compare` draws the curves into one picture.

`--flavors` adds bf16 runs of other recipes of the model, with the first seed; they are shown beside the band and not
judged, as their arithmetic is meant to be another. Of a mixture of experts the table has the tokens of the fullest
expert over the mean, over layers and these steps. A run that has finished in `--logs` is taken as it is: what was cut
short goes on, and runs that were copied here are judged without a GPU. A mixture, three ways of balance:

    python -m scripts.bench.loss_parity --gpus 4 rowwise --config scripts/bench/olmoe_eighth.toml \\
      --flavors eighth_bias eighth_unbalanced
"""

import argparse
import statistics
import sys
from pathlib import Path

from scripts.bench.runs import ROOT, last_steps, parser_of_runs, titanlite, train_all

SIGMAS = 3


def main() -> int:
    parser = parser_of_runs(__doc__)
    names = sorted(path.stem for path in (ROOT / "recipes" / "float8").glob("*.toml"))
    parser.add_argument("recipes", nargs="*", metavar="RECIPE", default=names, help=f"of: {', '.join(names)}")
    parser.add_argument("--flavors", nargs="*", default=[], help="of the model, beside that of the config")
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--picture", type=Path, default=Path("loss_parity.png"))
    args = parser.parse_args()
    seeds = {seed: ["--training.seed", str(seed)] for seed in args.seeds}
    first = seeds[args.seeds[0]]
    runs = {f"bf16-seed-{seed}": ["--float8.recipe", "none", *flags] for seed, flags in seeds.items()}
    runs |= {recipe: ["--float8.recipe", recipe, *first] for recipe in args.recipes}
    runs |= {flavor: ["--float8.recipe", "none", "--model.flavor", flavor, *first] for flavor in args.flavors}
    done = train_all(runs, args)
    if len(args.seeds) < 2 or not done:
        print("want: every run to the end, and two seeds or more")
        return 1
    return _report({name: last_steps(args.logs / "runs" / name) for name in runs}, args)


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
    titanlite("compare", *(str(args.logs / "runs" / name) for name in losses), "--out", str(args.picture.resolve()))
    outside = [name for name in args.recipes if abs(losses[name] - middle) > width]
    print(f"outside of the noise: {', '.join(outside)}" if outside else f"inside the noise: {', '.join(args.recipes)}")
    return bool(outside)


if __name__ == "__main__":
    sys.exit(main())
