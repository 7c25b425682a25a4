"""Draw how evenly ways of balance use the experts of a mixture: python scripts/bench/balance.py NAME=RUN … --out FILE

Left: the fullest and the emptiest expert of a layer, as tokens over the mean: the line is the mean of layers, the band
their range. Right: how far the loss is from the first run's on the same samples. Both are medians over a 50th of the
steps. The runs are those of `loss_parity.py --flavors`, whose metrics.jsonl alone is read.
"""

import argparse
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from titanlite.comparison.curves import COLOURS
from titanlite.comparison.picture import running_median
from titanlite.observe.metrics import read_metrics

LEAST = 1 / 16  # of the axis, which has no 0
Numbers = NDArray[np.float64]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", metavar="NAME=RUN", type=lambda text: text.split("=", 1))
    parser.add_argument("--out", type=Path, default=Path("balance.png"))
    args = parser.parse_args()
    figure = Figure(figsize=(11, 4.2), dpi=120, layout="constrained")
    use, losses = figure.subplots(1, 2)
    first: Numbers | None = None
    for (name, run), colour in zip(args.runs, COLOURS, strict=False):
        rows = [row for row in read_metrics(Path(run) / "metrics.jsonl") if "loss" in row]
        tokens = np.array([row["tokens"] / 1e6 for row in rows])
        for what in ("fullest", "emptiest"):
            keys = [key for key in rows[0] if key.startswith(f"experts_{what}.")]
            layers = [running_median(tokens, np.array([row[key] for row in rows])) for key in keys]
            x, each = layers[0][0], np.maximum([y for _, y in layers], LEAST)
            use.plot(x, each.mean(0), color=colour, label=name if what == "fullest" else None)
            use.fill_between(x, each.min(0), each.max(0), color=colour, alpha=0.15, linewidth=0)
        loss = np.array([row["loss"] for row in rows])
        if first is None:
            first = loss
        losses.plot(*running_median(tokens, loss - first), color=colour, label=name)
    use.axhline(1, color="#555555", linewidth=0.8)
    use.set_yscale("log", base=2)
    use.set(title="fullest and emptiest expert", ylabel="tokens over the mean", xlabel="tokens (millions)")
    ticks = [2.0**n for n in range(-4, 5)]
    use.set_yticks(ticks, [f"{tick:g}" if tick > LEAST else "≤ 1/16" for tick in ticks])
    use.set_ylim(LEAST, None)
    losses.set(title="loss", ylabel=f"difference from {args.runs[0][0]} (nats)", xlabel="tokens (millions)")
    for axes in (use, losses):
        axes.grid(color="#dddddd", linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_xlim(0, None)
    use.legend(frameon=False)
    figure.savefig(args.out)


if __name__ == "__main__":
    main()
