"""Draw the picture of a comparison: training loss over tokens, with the validations as points, and the verdict.

Tokens are the axis on which runs of different batch sizes can be compared; where all runs take the same number of
tokens per step, the steps are along the top. A long curve is drawn faintly with its running median on top, which,
unlike a mean, does not bend before a spike. Below them is how far each run is from the first at the same number of
tokens, on a grey band of what is no more than noise. `axis.py` chooses the limits of the axes.
"""

import math
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from titanlite.comparison.axis import fitted_limits
from titanlite.comparison.curves import COLOURS, DASHES, DIFFERENCE, Curve, Values, metrics_of, tokens_in_words
from titanlite.comparison.judge import Verdict
from titanlite.comparison.runs import RunRecord, title_of

_LONG = 200  # points from which on a curve is smoothed
_WINDOW = 50  # the running median is over the 50th part of a curve, and taken at ten times as many places
_FAINT = 4  # runs, up to which their unsmoothed curves are drawn, too
_ABREAST = 3  # columns of a legend below the picture
_NOISE = {"color": "#888888", "alpha": 0.25}
_BESIDE = 8  # runs, up to which the legend is within the picture


def draw_losses(records: Sequence[RunRecord], path: Path, verdicts: Sequence[Verdict] = ()) -> None:
    """Draw the runs, and the verdicts on those after the first, into a picture of the kind that its ending says."""
    from matplotlib import rc_context

    with rc_context({"text.parse_math": False}):  # of names
        figure = loss_figure(records, verdicts)
    figure.savefig(path)


def loss_figure(records: Sequence[RunRecord], verdicts: Sequence[Verdict] = ()) -> Any:
    """Return the picture as matplotlib's figure."""
    from matplotlib.figure import Figure

    lines = {metric.name: metric.lines for metric in metrics_of(records)}
    validations, differences = lines.get("validation_loss", []), lines.get(DIFFERENCE, [])
    below = 0.18 * math.ceil(len(records) / _ABREAST) if len(records) > _BESIDE else 0.0  # inches of the legend
    figure = Figure(figsize=(9, (7.5 if differences else 5.5) + below), dpi=150, layout="constrained")
    n_panels = 2 if differences else 1
    panels = figure.subplots(n_panels, sharex=True, squeeze=False, height_ratios=[3, 2][:n_panels])[:, 0]
    end = max(float(line.tokens[-1]) for line in lines["loss"])
    _draw_curves(panels[0], lines["loss"], validations, len(records), end)
    bands = [verdict.band for verdict in verdicts if verdict.band is not None]
    if differences:
        _draw_differences(panels[1], differences, bands, len(records), end)
        panels[1].set_ylabel(_folded(f"difference from {records[0].name}", 34))
    for panel in panels:
        panel.set_xlim(0, 1.01 * end)
        panel.xaxis.set_major_formatter(lambda tokens, _: tokens_in_words(tokens, ".4g"))
        panel.grid(color="#dddddd", linewidth=0.6)
        panel.set_axisbelow(True)
        panel.spines[["top", "right"]].set_visible(False)
    panels[-1].set_xlabel("tokens")
    per_step = {row["tokens"] / row["step"] for record in records for row in record.steps}
    if len(per_step) == 1:  # of all runs, throughout
        (rate,) = per_step
        panels[0].secondary_xaxis("top", functions=(lambda x: x / rate, lambda steps: steps * rate)).set_xlabel("step")
    _add_legend(figure, panels[0], records, bool(validations), bool(bands))
    said = [verdict.line if len(records) == 2 else f"{verdict.run}: {verdict.line}" for verdict in verdicts]
    figure.suptitle("\n".join([_folded(title_of(records), 80), *said]), x=0.02, ha="left", fontsize=11)
    return figure


def style_of(run: int, runs: int) -> dict[str, Any]:
    """Return how matplotlib draws the lines of a run; of few, each on a wider line of the one before: all are seen."""
    dashes = DASHES[run // len(COLOURS) % len(DASHES)]
    width = 1.6 + (0.9 * (runs - 1 - run) if runs <= _FAINT else 0.0)
    return {"color": COLOURS[run % len(COLOURS)], "linestyle": (0, dashes) if dashes else "-", "linewidth": width}


def running_median(x: Values, y: Values) -> tuple[Values, Values]:
    """Smooth a line of at least `_LONG` points: places along it, and the median of the finite values around each.

    The window shrinks at the beginning, where a loss falls steeply, so that it is centred. At the end it does not: one
    noisy last step would look like a turn.
    """
    n, places = len(y), 10 * _WINDOW
    if n < _LONG:
        return x, y
    at = np.unique(np.round(np.arange(places + 1) * (n - 1) / places).astype(int))
    around = (y[i - width : i + width + 1] for i in at if (width := min(i, n // _WINDOW // 2)) >= 0)
    finite = (window[np.isfinite(window)] for window in around)
    return x[at], np.array([np.median(window) if len(window) else math.nan for window in finite])


def _draw_curves(axes: Any, losses: Sequence[Curve], validations: Sequence[Curve], runs: int, end: float) -> None:
    """Draw the training losses, and the validations as circles."""
    shown = _draw_smoothed(axes, losses, runs, len(losses) <= _FAINT, {"alpha": 0.25, "linewidth": 0.8})
    size = 4 if len(losses) <= _BESIDE else 2.5
    for line in validations:
        edge = style_of(line.run, runs)["color"]
        shown.append((line.tokens, line.values))
        axes.plot(*shown[-1], "o", markersize=size, markerfacecolor="white", markeredgecolor=edge, zorder=3)
    axes.set_ylim(*fitted_limits(shown, 0, end, end))
    axes.set_ylabel("loss (nats per token)")


def _draw_differences(
    axes: Any, lines: Sequence[Curve], bands: Sequence[tuple[Values, Values]], runs: int, end: float
) -> None:
    """Draw how far each run is from the first, a line at zero, which is always on the axis, and bands of noise."""
    shown = _draw_smoothed(axes, lines, runs, len(lines) == 1, {"alpha": 0.15, "linewidth": 0.6})
    axes.axhline(0, color="#555555", linewidth=0.8)
    low, high = fitted_limits(shown, 0, end, end)
    for tokens, limit in bands:  # a few places, of which none may be lost among many
        axes.fill_between(tokens, -limit, limit, linewidth=0, **_NOISE)
        _, most = fitted_limits([(tokens, limit)], 0, end, end)
        low, high = min(low, -most), max(high, most)
    axes.set_ylim(min(low, -0.05 * (high - low)), max(high, 0.05 * (high - low)))


def _draw_smoothed(
    axes: Any, lines: Sequence[Curve], runs: int, has_faint: bool, faint: dict[str, float]
) -> list[tuple[Values, Values]]:
    """Draw the running median of each line, on the line itself if asked for; return the medians."""
    shown = []
    for line in lines:
        style = style_of(line.run, runs)
        if len(line.values) >= _LONG and has_faint:
            axes.plot(line.tokens, line.values, color=style["color"], **faint)
        shown.append(running_median(line.tokens, line.values))
        axes.plot(*shown[-1], **style)
    return shown


def _add_legend(figure: Any, axes: Any, records: Sequence[RunRecord], has_circles: bool, has_bands: bool) -> None:
    """Add a line for each run, also for one that logged nothing, and for what else is drawn."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: list[Any] = []
    for run, record in enumerate(records):
        name = record.name if record.steps else f"{record.name} (no logged step)"
        style = {**style_of(run, len(records)), "linewidth": 2}
        handles.append(Line2D([], [], label=name, **style))
    if has_circles:
        circle = {"marker": "o", "markersize": 4, "markerfacecolor": "white", "color": "#555555"}
        handles.append(Line2D([], [], linestyle="none", label="validation", **circle))
    if has_bands:
        handles.append(Patch(label="no more than noise", **_NOISE))
    if len(records) <= _BESIDE:
        axes.legend(handles=handles, frameon=False, loc="upper right")
    else:
        figure.legend(handles=handles, frameon=False, loc="outside lower left", ncols=_ABREAST, fontsize=8)


def _folded(text: str, width: int) -> str:
    return "\n".join(textwrap.wrap(text, width))
