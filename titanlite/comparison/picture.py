"""The picture of `titanlite compare`: training loss over tokens, with the validations as points.

Tokens are the axis on which runs of different batch sizes can be compared; where all runs take the same number of
tokens per step, the steps stand along the top. A long curve is drawn faintly with its running median on top, which,
unlike a mean, does not bend before a spike. Curves of runs that agree lie on one another: below them is how far each is
from the first run at the same number of tokens.
"""

import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from titanlite.observe.metrics import RunError

# Okabe and Ito's colours, which the colour-blind can tell apart; yellow is left out, it is lost on white.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_LONG = 200  # points from which on a curve is smoothed
_WINDOW = 50  # the running median is over the 50th part of a curve, and taken at ten times as many places

Rows = Sequence[dict[str, Any]]


def draw_losses(runs: Sequence[tuple[str, Rows, Rows]], path: Path) -> None:
    """Draw the runs into one picture.

    Args:
        runs: name, rows of steps and rows of validations of each run, as `read_metrics` gives them.
        path: the picture, whose ending says its kind; its folder is created, a file is replaced.

    Raises:
        RunError: there is no kind of picture with that ending.
        OSError: the picture cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    kinds = FigureCanvasAgg.get_supported_filetypes()
    if path.suffix[1:].lower() not in kinds:
        want = f"a file whose ending is one of {', '.join(sorted(kinds))}"
        raise RunError.of("titanlite compare", "--out", str(path), want, "--out losses.png")
    differences = [less_the_first(steps, runs[0][1]) for _, steps, _ in runs]
    has_differences = any(points for points in differences[1:])
    figure = Figure(figsize=(9, 7.5 if has_differences else 5.5), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes, *below = figure.subplots(
        1 + has_differences, sharex=True, squeeze=False, height_ratios=[3, 1][: 1 + has_differences]
    )[:, 0]
    largest = max((row["tokens"] for _, steps, _ in runs for row in steps), default=1)
    unit, scale = _unit(largest)
    for i, (name, steps, validations) in enumerate(runs):
        colour, line = _COLOURS[i % len(_COLOURS)], ("-", "--", ":")[i // len(_COLOURS) % 3]
        x = [row["tokens"] / scale for row in steps]
        y = [math.nan if row["loss"] is None else row["loss"] for row in steps]
        if len(y) >= _LONG:
            axes.plot(x, y, color=colour, alpha=0.25, linewidth=0.8)
            x, y = _running_median(x, y)
        axes.plot(x, y, color=colour, linewidth=1.6, label=name, linestyle=line)
        if below and differences[i]:
            x, y = [tokens / scale for tokens, _ in differences[i]], [loss for _, loss in differences[i]]
            x, y = _running_median(x, y) if len(y) >= _LONG else (x, y)
            below[0].plot(x, y, color=colour, linewidth=1.6, linestyle=line)
        points = [
            (row["tokens"] / scale, row["validation_loss"]) for row in validations if row["validation_loss"] is not None
        ]
        if points:
            axes.plot(
                *zip(*points, strict=True),
                linestyle="none",
                marker="o",
                markersize=5,
                markerfacecolor="white",
                markeredgecolor=colour,
                label=f"{name}, validation",
                zorder=3,
            )
    axes.set_ylabel("loss (nats per token)")
    for panel in (axes, *below):
        panel.grid(color="#dddddd", linewidth=0.6)
        panel.set_axisbelow(True)
        panel.spines[["right"]].set_visible(False)
        panel.margins(x=0.01)
    for panel in below:
        panel.spines[["top"]].set_visible(False)
        panel.set_ylabel(f"difference from\n{runs[0][0]}")
    (axes, *below)[-1].set_xlabel(f"tokens{unit}")
    axes.legend(frameon=False)
    per_step = _tokens_per_step(runs)
    if per_step is None:
        axes.spines[["top"]].set_visible(False)
    else:
        factor = scale / per_step

        def steps_of(tokens: Any) -> Any:
            return tokens * factor

        def tokens_of(steps: Any) -> Any:
            return steps / factor

        axes.secondary_xaxis("top", functions=(steps_of, tokens_of)).set_xlabel("step")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def less_the_first(steps: Rows, first: Rows) -> list[tuple[int, float]]:
    """Return tokens, and a run's loss less that of the first at as many, where both have one."""
    losses = {row["tokens"]: row["loss"] for row in first}
    both = [(row["tokens"], row["loss"], losses.get(row["tokens"])) for row in steps]
    return [(tokens, mine - its) for tokens, mine, its in both if mine is not None and its is not None]


def _tokens_per_step(runs: Sequence[tuple[str, Rows, Rows]]) -> float | None:
    """Return the tokens per step if all runs agree; None if they do not, or if one changed in mid-run."""
    seen = {row["tokens"] / row["step"] for _, steps, _ in runs for row in steps}
    return seen.pop() if len(seen) == 1 else None


def _unit(largest: float) -> tuple[str, float]:
    """Return the unit in which a count is readable, for the axis label, and its size."""
    for name, size in ((" (trillions)", 1e12), (" (billions)", 1e9), (" (millions)", 1e6), (" (thousands)", 1e3)):
        if largest >= size:
            return name, size
    return "", 1.0


def _running_median(x: Sequence[float], y: Sequence[float]) -> tuple[list[float], list[float]]:
    """Return places along a curve, its ends included, and the median of the finite values around each; NaN if none.

    The window shrinks at the ends, so that it stays centred.
    """
    n, places = len(y), 10 * _WINDOW
    at = sorted({round(i * (n - 1) / places) for i in range(places + 1)})
    medians: list[float] = []
    for i in at:
        half = min(n // _WINDOW // 2, i, n - 1 - i)
        near = [v for v in y[i - half : i + half + 1] if not math.isnan(v)]
        medians.append(statistics.median(near) if near else math.nan)
    return [x[i] for i in at], medians
