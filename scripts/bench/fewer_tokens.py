"""See how many tokens an optimizer saves: python -m scripts.bench.fewer_tokens --gpus 4

Runs of one GPU each. AdamW takes all the steps of the config, the other recipe a part of them, with the whole schedule
in that part. Each has its own best of a few learning rates, by the first seed, and then the other seeds with that one.
The loss of a run is its mean over the last hundred steps. Exit code 1: the mean of the other's seeds is above AdamW's.
A run that has finished in `--logs` is taken as it is. `titanlite compare` draws the curves into one picture.
"""

import statistics
import sys
from pathlib import Path

from scripts.bench.runs import last_steps, parser_of_runs, titanlite, train_all


def main() -> int:
    """Make the runs, print the table and draw the curves."""
    parser = parser_of_runs(__doc__)
    parser.add_argument("recipe", nargs="?", default="muon")
    parser.add_argument("--steps", type=int, default=1500, help="of AdamW")
    parser.add_argument("--part", type=float, default=0.75, help="of the steps, for the recipe")
    parser.add_argument("--rates", type=float, nargs="+", default=[3e-4, 6e-4, 1.2e-3, 2.4e-3])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--picture", type=Path, default=Path("fewer_tokens.png"))
    args = parser.parse_args()
    steps = {"adamw": args.steps, args.recipe: round(args.part * args.steps)}

    def name(recipe: str, rate: float, seed: int) -> str:
        return f"{recipe}-{rate:g}-seed-{seed}"

    def train(wanted: list[tuple[str, float, int]]) -> bool:
        runs = {
            name(recipe, rate, seed): [
                *("--optimizer.recipe", recipe, "--optimizer.lr", str(rate), "--training.seed", str(seed)),
                *("--training.steps", str(steps[recipe])),
            ]
            for recipe, rate, seed in wanted
        }
        return train_all(runs, args)

    def loss(recipe: str, rate: float, seed: int) -> float:
        return last_steps(args.logs / "runs" / name(recipe, rate, seed))["loss"]

    first, *others = args.seeds
    if not train([(recipe, rate, first) for recipe in steps for rate in args.rates]):
        return 1
    best = {recipe: min(args.rates, key=lambda rate, recipe=recipe: loss(recipe, rate, first)) for recipe in steps}
    if not train([(recipe, rate, seed) for recipe, rate in best.items() for seed in others]):
        return 1
    print(f"\n| optimizer | steps | {' | '.join(f'{rate:g}' for rate in args.rates)} | best, all seeds |")
    print("|---" * (len(args.rates) + 3) + "|")
    means = {}
    for recipe, rate in best.items():
        of_seeds = [loss(recipe, rate, seed) for seed in args.seeds]
        means[recipe] = statistics.mean(of_seeds)
        spread = f" ± {statistics.stdev(of_seeds):.4f}" if others else ""
        losses = " | ".join(f"{loss(recipe, each, first):.4f}" for each in args.rates)
        print(f"| {recipe} | {steps[recipe]} | {losses} | {means[recipe]:.4f}{spread} |")
    runs = [args.logs / "runs" / name(recipe, rate, seed) for recipe, rate in best.items() for seed in args.seeds]
    titanlite("compare", *map(str, runs), "--out", str(args.picture.resolve()))
    return int(means[args.recipe] > means["adamw"])


if __name__ == "__main__":
    sys.exit(main())
