"""Compare the losses of float8 recipes and optimizers: python -m scripts.bench.loss_parity --gpus 4 [ARM …]

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

With `--rows FILE` arms are compared, each with seeds of its own. An arm is `[OPTIMIZER+]RECIPE[*SEEDS]`, as `bf16*3` or
`muon+rowwise*2`; the first is what others are held against. `--rates` has each arm try them with the first seed on a
quarter of the steps, a whole schedule in it, and go on beyond the best one until it is between two others; then come
all steps with the best. A row is appended to FILE when its run ends, and what has a row there is not run again. The
table has the loss of training, and held-out loss, of `validation.source` after the last step, with the smallest
difference that these seeds could show: the 95 % interval of a difference of two means, by the spread of all arms.

    python -m scripts.bench.loss_parity --gpus 8 --config scripts/bench/once_150m.toml --rows rows.jsonl \\
      bf16*3 rowwise*3 muon+bf16*2 muon+rowwise*2 tensorwise --rates 3e-4 6e-4 1.2e-3 2.4e-3
"""

import argparse
import json
import math
import re
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.bench.runs import ROOT, last_steps, parser_of_runs, titanlite, train_all
from titanlite.comparison.judge import student
from titanlite.config.read import read_config

SIGMAS = 3
OF_ARMS = "training.steps", "training.seed", "lr_scheduler.warmup_steps", "optimizer.lr", "float8.recipe"
Row = dict[str, Any]


@dataclass(frozen=True)
class Arm:
    """An optimizer and a float8 recipe, and with how many seeds they are trained."""

    name: str
    flags: tuple[str, ...]
    seeds: int

    @classmethod
    def read(cls, text: str) -> "Arm":
        found = re.fullmatch(r"((?:(\w+)\+)?(\w+))(?:\*(\d+))?", text)
        if not found:
            raise argparse.ArgumentTypeError(f"{text!r} is not [OPTIMIZER+]RECIPE[*SEEDS]")
        name, optimizer, recipe, seeds = found.groups()
        flags = ("--float8.recipe", "none" if recipe == "bf16" else recipe)
        return cls(name, flags + (("--optimizer.recipe", optimizer) if optimizer else ()), int(seeds or 1))


def main() -> int:
    parser = parser_of_runs(__doc__)
    names = sorted(path.stem for path in (ROOT / "recipes" / "float8").glob("*.toml"))
    parser.add_argument("recipes", nargs="*", metavar="RECIPE", default=names, help=f"of: {', '.join(names)}")
    parser.add_argument("--flavors", nargs="*", default=[], help="of the model, beside that of the config")
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--picture", type=Path, default=Path("loss_parity.png"))
    parser.add_argument("--rows", type=Path, help="file of finished runs: arms are compared")
    parser.add_argument("--rates", type=float, nargs="+", default=[], help="learning rates that each arm tries")
    parser.add_argument("--commit", help="of the rows; not given: as git says")
    args = parser.parse_args()
    if args.rows:
        if given := [key for key in OF_ARMS if key in args.flags]:
            parser.error(f"--flags has {', '.join(given)}, which --rows sets. Want: the file of --config says it")
        return Arms(args).main()
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


class Arms:
    """The runs of several arms, and their rows."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.arms = [Arm.read(text) for text in args.recipes]
        config, _ = read_config(ROOT / args.config)
        self.steps, self.warmup = config.training.steps, config.lr_scheduler.warmup_steps
        self.commit = (
            args.commit or subprocess.check_output(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, text=True).strip()
        )
        lines = args.rows.read_text().splitlines() if args.rows.exists() else []
        self.rows: dict[str, Row] = {row["run"]: row for row in map(json.loads, lines)}

    def main(self) -> int:
        """Sweep the rates, make the whole runs and print the table; return the exit code."""
        best = self.best_rates()
        if best is None:
            return 1
        wanted = [(arm, best[arm], seed, 1) for arm in self.arms for seed in self.args.seeds[: arm.seeds]]
        return self.report(wanted) if self.train(wanted) else 1

    def best_rates(self) -> dict[Arm, float | None] | None:
        """Return each arm's best rate on a quarter, between two others; None if a run failed."""
        if not self.args.rates:
            return dict.fromkeys(self.arms)
        rates, best = {arm: sorted(self.args.rates) for arm in self.arms}, dict[Arm, float | None]()
        factor = rates[self.arms[0]][1] / rates[self.arms[0]][0]
        while len(best) < len(rates):
            left = [arm for arm in self.arms if arm not in best]
            if not self.train([(arm, rate, self.args.seeds[0], 4) for arm in left for rate in rates[arm]]):
                return None
            for arm in left:
                names = {rate: self.name(arm, rate, self.args.seeds[0], 4) for rate in rates[arm]}
                losses = {rate: self.rows[name]["held_out_loss"] for rate, name in names.items()}
                lowest = min(losses, key=lambda rate, losses=losses: losses[rate])
                print(f"{arm.name}: {', '.join(f'{rate:g} {loss:.4f}' for rate, loss in losses.items())}", flush=True)
                if lowest == rates[arm][0]:
                    rates[arm].insert(0, lowest / factor)
                elif lowest == rates[arm][-1]:
                    rates[arm].append(lowest * factor)
                else:
                    best[arm] = lowest
        return best

    @staticmethod
    def name(arm: Arm, rate: float | None, seed: int, parts: int) -> str:
        swept = f"-{rate:g}" if rate else ""
        return f"{arm.name.replace('+', '-')}{swept}-seed-{seed}{'-quarter' if parts == 4 else ''}"

    def train(self, wanted: list[tuple[Arm, float | None, int, int]]) -> bool:
        """Make the runs that have no row; return whether all have one."""
        runs, made = dict[str, list[str]](), dict[str, Row]()
        for arm, rate, seed, parts in wanted:
            name, steps = self.name(arm, rate, seed, parts), self.steps // parts
            if name in self.rows:
                continue
            made[name] = {"arm": arm.name, "seed": seed, "lr": rate}
            runs[name] = [*arm.flags, "--training.seed", str(seed), "--training.steps", str(steps)]
            runs[name] += ["--lr_scheduler.warmup_steps", str(self.warmup // parts)]
            runs[name] += ["--validation.enable", "true", "--validation.freq", str(steps)]
            runs[name] += ["--optimizer.lr", str(rate)] if rate else []
        return train_all(runs, self.args, lambda name: self.append(name, made[name])) if runs else True

    def append(self, name: str, row: Row) -> None:
        """Write the row of a run that has ended."""
        folder, args = self.args.logs / "runs" / name, self.args
        lines = list(map(json.loads, (folder / "metrics.jsonl").read_text().splitlines()))
        held_out = [line["validation_loss"] for line in lines if "validation_loss" in line][-1]
        steps = [line for line in lines if "loss" in line]
        (environment,) = [e for e in json.loads((folder / "receipt.json").read_text()) if e["feature"] == "environment"]
        head = {"run": name, "gpu": environment["applied"]["device"], "commit": self.commit}
        head |= {"date": time.strftime("%Y-%m-%d"), "command": f"scripts/bench/loss_parity.py {' '.join(sys.argv[1:])}"}
        numbers = {
            "steps": steps[-1]["step"],
            "tokens_per_step": steps[-1]["tokens"] // steps[-1]["step"],
            "epochs": round(steps[-1]["epoch"], 3),
            "loss": last_steps(folder)["loss"],
            "held_out_loss": held_out,
            "ms_per_step": round(1000 * statistics.median(line["seconds"] for line in steps), 1),
            "seconds": round(sum(line["seconds"] for line in steps), 1),
            "reserved_gib": round(steps[-1]["memory_gib"], 2),
        }
        self.rows[name] = {**head, "config": args.config, **row, **numbers}
        with args.rows.open("a") as file:
            file.write(json.dumps(self.rows[name]) + "\n")

    def report(self, wanted: list[tuple[Arm, float | None, int, int]]) -> int:
        """Print the table of arms, and `compare`'s verdicts on the runs whose folders are here."""
        rows = {arm: [self.rows[self.name(*each)] for each in wanted if each[0] == arm] for arm in self.arms}
        print(
            "\n| arm | lr | seeds | loss | off | least shown | held-out loss | off | least shown |\n" + "|---" * 9 + "|"
        )
        for arm, of_arm in rows.items():
            cells = [arm.name, of_arm[0]["lr"] or "", len(of_arm)]
            for key in ("loss", "held_out_loss"):
                values = {each: [row[key] for row in rows[each]] for each in self.arms}
                mean, first = statistics.mean(values[arm]), statistics.mean(values[self.arms[0]])
                cells += [f"{mean:.4f}", f"{mean - first:+.4f}", least_shown(values, arm, self.arms[0])]
            print(f"| {' | '.join(map(str, cells))} |")
        folders = [self.args.logs / "runs" / self.name(*each) for each in wanted]
        here = [str(folder) for folder in folders if (folder / "metrics.jsonl").is_file()]
        seeds = [str(folder) for folder in folders[1 : self.arms[0].seeds] if str(folder) in here]
        if str(folders[0]) in here:
            given = ["--seeds", ",".join(seeds)] if len(seeds) > 1 else []  # as compare wants two
            titanlite("compare", *here, *given, "--out", str(self.args.picture.resolve()), shown=True)
        return 0


def least_shown(values: dict[Arm, list[float]], arm: Arm, first: Arm) -> str:
    """Return the smallest difference of an arm's mean from the first's that the seeds could show, in nats."""
    degrees = sum(len(each) - 1 for each in values.values())
    if arm == first or not degrees:
        return ""
    spread = math.sqrt(
        sum(statistics.variance(each) * (len(each) - 1) for each in values.values() if len(each) > 1) / degrees
    )
    return f"{student(degrees) * spread * math.sqrt(1 / len(values[arm]) + 1 / len(values[first])):.4f}"


if __name__ == "__main__":
    sys.exit(main())
