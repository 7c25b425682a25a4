"""Draw the picture of a comparison: training loss over tokens, with the validations as points, and the verdict.

Tokens are the axis on which runs of different batch sizes can be compared; where all runs take the same number of
tokens per step, the steps stand along the top. A long curve is drawn faintly with its running median on top, which,
unlike a mean, does not bend before a spike. Curves of runs that agree lie on one another: below them is how far each is
from the first run at the same number of tokens, on a grey band of what is no more than noise. What the axes show is
`axis.py`'s to say.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from titanlite.comparison.axis import fitted_limits
from titanlite.comparison.curves import COLOURS, DASHES, DIFFERENCE, Curve, Values, metrics_of
from titanlite.comparison.runs import RunRecord, title_of
from titanlite.comparison.verdict import Verdict
from titanlite.preflight.output_file import require_picture

_LONG = 200  # points from which on a curve is smoothed
_WINDOW = 50  # the running median is over the 50th part of a curve, and taken at ten times as many places
_FAINT = 4  # runs, up to which their unsmoothed curves are drawn, too
_ABREAST = 3  # columns of a legend below it
_NOISE = {"color": "#888888", "alpha": 0.25}
_BESIDE = 8  # runs, up to which the legend lies within the picture


def draw_losses(records: Sequence[RunRecord], path: Path, verdicts: Sequence[Verdict] = ()) -> None:
    """Draw the runs into one picture.

    Args:
        records: the runs; losses are compared with the first one's.
        path: the picture, whose ending says its kind; its folder is created, a file is replaced.
        verdicts: of the runs after the first, as far as there are any.

    Raises:
        RunError: there is no kind of picture with that ending.
        OSError: the picture cannot be written.
    """
    require_picture("titanlite compare", path, "losses.png")
    from matplotlib import rc_context

    with rc_context({"text.parse_math": False}):  # of names
        figure = loss_figure(records, verdicts)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def loss_figure(records: Sequence[RunRecord], verdicts: Sequence[Verdict] = ()) -> Any:
    """Return the picture as matplotlib's figure."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    lines = {metric.name: metric.lines for metric in metrics_of(records)}
    differences = lines.get(DIFFERENCE, [])
    below = 0.18 * math.ceil(len(records) / _ABREAST) if len(records) > _BESIDE else 0.0  # inches of the legend
    figure = Figure(figsize=(9, (7.5 if differences else 5.5) + below), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    n_panels = 2 if differences else 1
    panels = figure.subplots(n_panels, sharex=True, squeeze=False, height_ratios=[3, 2][:n_panels])[:, 0]
    end = max(float(line.places.tokens[-1]) for line in lines["loss"])
    unit, scale = _token_unit(end)
    _draw_curves(panels[0], lines["loss"], lines.get("validation_loss", []), len(records), end, scale)
    if differences:
        bands = _draw_noise(panels[1], verdicts, scale)
        _draw_differences(panels[1], differences, bands, len(records), end, scale)
        panels[1].set_ylabel(_folded(f"difference from {records[0].name}", 34))
    for panel in panels:
        panel.set_xlim(0, 1.01 * end / scale)
        panel.grid(color="#dddddd", linewidth=0.6)
        panel.set_axisbelow(True)
        panel.spines[["right"]].set_visible(False)
    panels[-1].set_xlabel(f"tokens{unit}")
    _add_steps(panels[0], records, scale)
    others = {"validation": bool(lines.get("validation_loss")), "no more than noise": any(v.band for v in verdicts)}
    _add_legend(figure, panels[0], records, [name for name, is_drawn in others.items() if is_drawn])
    said = [verdict.line if len(records) == 2 else f"{verdict.run}: {verdict.line}" for verdict in verdicts]
    figure.suptitle("\n".join([_folded(title_of(records), 80), *said]), x=0.02, ha="left", fontsize=11)
    return figure


def style_of(run: int, runs: int) -> dict[str, Any]:
    """Return how matplotlib draws the lines of one of some runs.

    Of a few runs, each is drawn on a wider line of the one before it: those that agree are seen, too.
    """
    dashes = DASHES[run // len(COLOURS) % len(DASHES)]
    width = 1.6 + (0.9 * (runs - 1 - run) if runs <= _FAINT else 0.0)
    return {"color": COLOURS[run % len(COLOURS)], "linestyle": (0, dashes) if dashes else "-", "linewidth": width}


def running_median(x: Values, y: Values) -> tuple[Values, Values]:
    """Smooth a line of at least `_LONG` points.

    The window shrinks at the beginning, where a loss falls steeply, so that it stays centred. At the end it does not:
    one noisy last step would look like a turn.

    Returns:
        Places along the line, its ends included, and the median of the finite values around each; NaN if none. A
        shorter line is returned as it is.
    """
    n, places = len(y), 10 * _WINDOW
    if n < _LONG:
        return x, y
    at = np.unique(np.round(np.arange(places + 1) * (n - 1) / places).astype(int))
    half = n // _WINDOW // 2
    medians = np.full(len(at), math.nan)
    inner = (at >= half) & (at < n - half)
    medians[inner] = _median(sliding_window_view(y, 2 * half + 1)[at[inner] - half])
    for i in np.flatnonzero(~inner):
        width = min(at[i], half)
        medians[i] = _median(y[None, at[i] - width : at[i] + width + 1])[0]
    return x[at], medians


def _median(windows: Values) -> Values:
    """Return the median of each row's finite values; NaN if it has none."""
    known = np.isfinite(windows).any(axis=1)
    medians = np.full(len(windows), math.nan)
    medians[known] = np.nanmedian(windows[known], axis=1)
    return medians


def _draw_curves(
    axes: Any, losses: Sequence[Curve], validations: Sequence[Curve], runs: int, end: float, scale: float
) -> None:
    """Draw the training losses, and the validations as circles."""
    shown: list[tuple[Values, Values]] = []
    for line in losses:
        style, x = style_of(line.run, runs), line.places.tokens
        if len(x) >= _LONG and len(losses) <= _FAINT:
            axes.plot(x / scale, line.values, color=style["color"], alpha=0.25, linewidth=0.8)
        shown.append(running_median(x, line.values))
        axes.plot(shown[-1][0] / scale, shown[-1][1], **style)
    size = 4 if len(losses) <= _BESIDE else 2.5
    for line in validations:
        colour, x = style_of(line.run, runs)["color"], line.places.tokens
        shown.append((x, line.values))
        axes.plot(
            x / scale, line.values, "o", markersize=size, markerfacecolor="white", markeredgecolor=colour, zorder=3
        )
    axes.set_ylim(*fitted_limits(shown, 0, end, end))
    axes.set_ylabel("loss (nats per token)")


def _draw_differences(
    axes: Any, lines: Sequence[Curve], bands: list[tuple[Values, Values]], runs: int, end: float, scale: float
) -> None:
    """Draw how far each run is from the first, and a line at zero, which is on the axis always."""
    shown = [running_median(line.places.tokens, line.values) for line in lines]
    for line, (x, y) in zip(lines, shown, strict=True):
        if len(line.values) >= _LONG and len(lines) == 1:
            colour = style_of(line.run, runs)["color"]
            axes.plot(line.places.tokens / scale, line.values, color=colour, alpha=0.15, linewidth=0.6)
        axes.plot(x / scale, y, **style_of(line.run, runs))
    axes.axhline(0, color="#555555", linewidth=0.8)
    low, high = fitted_limits(shown, 0, end, end)
    for edge in bands:  # a few places, of which none may be lost among many
        least, most = fitted_limits([edge], 0, end, end)
        low, high = min(low, least), max(high, most)
    axes.set_ylim(min(low, -0.05 * (high - low)), max(high, 0.05 * (high - low)))
    axes.spines[["top"]].set_visible(False)


def _draw_noise(axes: Any, verdicts: Sequence[Verdict], scale: float) -> list[tuple[Values, Values]]:
    """Draw the bands of what is no more than noise, and return their edges."""
    edges: list[tuple[Values, Values]] = []
    for band in (verdict.band for verdict in verdicts if verdict.band is not None):
        x, low, high = (np.array(column, dtype=np.float64) for column in (band.tokens, band.low, band.high))
        axes.fill_between(x / scale, low, high, linewidth=0, **_NOISE)
        edges += [(x, low), (x, high)]
    return edges


def _add_legend(figure: Any, axes: Any, records: Sequence[RunRecord], others: Sequence[str]) -> None:
    """Add one line a run, those that logged nothing included, and what else is drawn: circles, a band."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: list[Any] = []
    for run, record in enumerate(records):
        name = record.name if record.steps else f"{record.name} (no logged step)"
        handles.append(Line2D([], [], label=name, **style_of(run, len(records))))
        handles[-1].set_linewidth(2)
    for other in others:
        if other == "validation":
            circle = {"marker": "o", "markersize": 4, "markerfacecolor": "white", "color": "#555555"}
            handles.append(Line2D([], [], linestyle="none", label=other, **circle))
        else:
            handles.append(Patch(label=other, **_NOISE))
    if len(records) <= _BESIDE:
        axes.legend(handles=handles, frameon=False, loc="upper right")
    else:
        figure.legend(handles=handles, frameon=False, loc="outside lower left", ncols=_ABREAST, fontsize=8)


def _add_steps(axes: Any, records: Sequence[RunRecord], scale: float) -> None:
    """Write the steps along the top, if all runs take as many tokens a step."""
    per_step = _tokens_per_step(records)
    if per_step is None:
        axes.spines[["top"]].set_visible(False)
        return
    factor = scale / per_step

    def steps_of(tokens: Any) -> Any:
        return tokens * factor

    def tokens_of(steps: Any) -> Any:
        return steps / factor

    axes.secondary_xaxis("top", functions=(steps_of, tokens_of)).set_xlabel("step")


def _tokens_per_step(records: Sequence[RunRecord]) -> float | None:
    """Return the tokens per step if all runs agree; None if they do not, or if one changed in mid-run."""
    seen = {row["tokens"] / row["step"] for record in records for row in record.steps}
    return seen.pop() if len(seen) == 1 else None


def _folded(text: str, width: int) -> str:
    """Break a text into lines, a long name within it too."""
    import textwrap

    return "\n".join(textwrap.wrap(text, width))


def _token_unit(largest: float) -> tuple[str, float]:
    """Return the unit in which a count is readable, for the axis label, and its size."""
    for name, size in ((" (trillions)", 1e12), (" (billions)", 1e9), (" (millions)", 1e6), (" (thousands)", 1e3)):
        if largest >= size:
            return name, size
    return "", 1.0
