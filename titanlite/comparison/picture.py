"""Draw the picture of a comparison: training loss over tokens, with the validations as points, and the verdict.

The x axis counts tokens, so that runs of different batch sizes can be compared. If all runs take the same number of
tokens per step, an axis at the top shows the steps. A long curve is drawn faintly under its running median, which,
unlike a mean, does not bend before a spike. A lower panel shows the difference of each run from the first at equal
tokens, over a grey band of differences that are no more than noise. `axis.py` chooses the limits of the y axes.
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

_LONG = 200  # a curve with this number of points or more is smoothed
_WINDOW = 50  # the running median covers a 50th of a curve, and is taken at 10 × 50 places
_FAINT = 4  # for up to this number of runs, unsmoothed curves are drawn, too
_ABREAST = 3  # columns of a legend below the panels
_NOISE = {"color": "#888888", "alpha": 0.25}
_BESIDE = 8  # for up to this number of runs, the legend is inside the upper panel


def draw_losses(records: Sequence[RunRecord], path: Path, verdicts: Sequence[Verdict] = ()) -> None:
    """Draw the losses of runs, and the verdicts on all but the first run, into a file; its suffix sets the format."""
    from matplotlib import rc_context

    with rc_context({"text.parse_math": False}):  # names may have a "$"
        figure = loss_figure(records, verdicts)
    figure.savefig(path)


def loss_figure(records: Sequence[RunRecord], verdicts: Sequence[Verdict] = ()) -> Any:
    """Return the picture of `draw_losses` as a figure of matplotlib."""
    from matplotlib.figure import Figure

    lines = {metric.name: metric.lines for metric in metrics_of(records)}
    validations, differences = lines.get("validation_loss", []), lines.get(DIFFERENCE, [])
    below = 0.18 * math.ceil(len(records) / _ABREAST) if len(records) > _BESIDE else 0.0  # inches for a legend
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
    if len(per_step) == 1:  # the same in all steps of all runs
        (rate,) = per_step
        panels[0].secondary_xaxis("top", functions=(lambda x: x / rate, lambda steps: steps * rate)).set_xlabel("step")
    _add_legend(figure, panels[0], records, bool(validations), bool(bands))
    said = [verdict.line if len(records) == 2 else f"{verdict.run}: {verdict.line}" for verdict in verdicts]
    figure.suptitle("\n".join([_folded(title_of(records), 80), *said]), x=0.02, ha="left", fontsize=11)
    return figure


def style_of(run: int, runs: int) -> dict[str, Any]:
    """Return matplotlib's style of run number `run` of `runs`. Of few runs, earlier ones are wider: none is hidden."""
    dashes = DASHES[run // len(COLOURS) % len(DASHES)]
    width = 1.6 + (0.9 * (runs - 1 - run) if runs <= _FAINT else 0.0)
    return {"color": COLOURS[run % len(COLOURS)], "linestyle": (0, dashes) if dashes else "-", "linewidth": width}


def running_median(x: Values, y: Values) -> tuple[Values, Values]:
    """Return some x of a line, and the running median of y around each. Lines of under `_LONG` points do not change.

    Only finite values count. Near the beginning, where a loss falls steeply, the window shrinks to remain centred. Near
    the end it does not, as a single noisy last step would look like a trend.
    """
    n, places = len(y), 10 * _WINDOW
    if n < _LONG:
        return x, y
    at = np.unique(np.round(np.arange(places + 1) * (n - 1) / places).astype(int))
    around = (y[i - width : i + width + 1] for i in at if (width := min(i, n // _WINDOW // 2)) >= 0)
    finite = (window[np.isfinite(window)] for window in around)
    return x[at], np.array([np.median(window) if len(window) else math.nan for window in finite])


def _draw_curves(axes: Any, losses: Sequence[Curve], validations: Sequence[Curve], runs: int, end: float) -> None:
    """Draw the training losses as lines, and the validation losses as circles."""
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
    """Draw the difference of each run from the first, a line at zero, which is always visible, and bands of noise."""
    shown = _draw_smoothed(axes, lines, runs, len(lines) == 1, {"alpha": 0.15, "linewidth": 0.6})
    axes.axhline(0, color="#555555", linewidth=0.8)
    low, high = fitted_limits(shown, 0, end, end)
    for tokens, limit in bands:  # fitted apart from the lines, whose many points would outweigh a band's
        axes.fill_between(tokens, -limit, limit, linewidth=0, **_NOISE)
        _, most = fitted_limits([(tokens, limit)], 0, end, end)
        low, high = min(low, -most), max(high, most)
    axes.set_ylim(min(low, -0.05 * (high - low)), max(high, 0.05 * (high - low)))


def _draw_smoothed(
    axes: Any, lines: Sequence[Curve], runs: int, has_faint: bool, faint: dict[str, float]
) -> list[tuple[Values, Values]]:
    """Draw each line's running median, over the line itself in style `faint` if `has_faint`; return the medians."""
    shown = []
    for line in lines:
        style = style_of(line.run, runs)
        if len(line.values) >= _LONG and has_faint:
            axes.plot(line.tokens, line.values, color=style["color"], **faint)
        shown.append(running_median(line.tokens, line.values))
        axes.plot(*shown[-1], **style)
    return shown


def _add_legend(figure: Any, axes: Any, records: Sequence[RunRecord], has_circles: bool, has_bands: bool) -> None:
    """Add a legend, with an entry for each run, even one that logged nothing, and for circles and bands if drawn."""
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
