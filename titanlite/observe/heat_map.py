"""Draw how evenly mixture-of-experts models use their experts: layers × experts over time, runs side by side.

The colour of an expert shows its tokens divided by the mean over its layer's experts, on a logarithmic scale: white is
the mean, red is more, blue is fewer. In each layer the experts are sorted by their total tokens, so that the picture
shows how uneven the use is, not which expert has which index. The time axis counts the tokens trained on.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

_OCTAVES = 2  # the colour scale extends from a quarter of the mean to four times the mean
_COLUMNS = 600  # pixels along a run's time axis; each shows the row that covers its tokens
_TICKS = 16  # greatest number of labelled layers

Load = NDArray[np.float64]


def draw_heat_map(runs: Mapping[str, Sequence[Mapping[str, Any]]], path: Path) -> None:
    """Draw runs side by side into the image file `path`. `runs`: by name, the rows of its experts.jsonl, at least one.

    Raises:
        OSError: the picture cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    n_layers = max(len(rows[-1]["experts"]) for rows in runs.values())
    size = 3 + 4.5 * len(runs), min(max(4.0, 0.7 * n_layers), 14.0)
    figure = Figure(figsize=size, dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(runs), squeeze=False)[0]
    images = [_draw_run(axes, name, rows) for axes, (name, rows) in zip(panels, runs.items(), strict=True)]
    ticks = range(-_OCTAVES, _OCTAVES + 1)
    bar = figure.colorbar(images[0], ax=list(panels), ticks=list(ticks), extend="both", aspect=40, extendfrac=0.02)
    bar.set_label("tokens over the mean")
    bar.ax.set_yticklabels([f"{2.0**tick:g}" for tick in ticks])
    figure.savefig(path)


def loads(rows: Sequence[Mapping[str, Any]]) -> dict[str, Load]:
    """Return, by layer, the tokens of each expert in each row divided by the layer's mean per expert: [rows, experts].

    NaN where a layer got no tokens. Experts are sorted by their tokens summed over all rows, in descending order.
    """
    found = dict[str, Load]()
    for name in rows[-1]["experts"]:
        tokens = np.array([row["experts"][name] for row in rows], dtype=np.float64)
        tokens = tokens[:, np.argsort(-tokens.sum(0), kind="stable")]
        mean = tokens.mean(1, keepdims=True)
        found[name] = np.divide(tokens, mean, out=np.full_like(tokens, np.nan), where=mean > 0)
    return found


def _draw_run(axes: Any, name: str, rows: Sequence[Mapping[str, Any]]) -> Any:
    """Draw one run into `axes`, one band per layer. Returns the last layer's image, from which a colour bar is made."""
    layers, ends = loads(rows), np.array([row["tokens"] for row in rows], dtype=np.float64)
    begin = max(0.0, 2 * ends[0] - ends[1]) if len(ends) > 1 else 0.0  # a branched run does not begin at 0 tokens
    middles = begin + (np.arange(_COLUMNS) + 0.5) / _COLUMNS * (ends[-1] - begin)
    unit, scale = ("tokens (millions)", 1e6) if ends[-1] >= 1e6 else ("tokens", 1.0)
    colours = {"aspect": "auto", "cmap": "RdBu_r", "vmin": -_OCTAVES, "vmax": _OCTAVES, "interpolation": "nearest"}
    image = None
    for n, load in enumerate(layers.values()):
        with np.errstate(divide="ignore"):
            shown = np.clip(np.log2(load[np.searchsorted(ends, middles)].T), -_OCTAVES, _OCTAVES)
        image = axes.imshow(shown, extent=(begin / scale, ends[-1] / scale, n + 1, n), **colours)
    for edge in range(1, len(layers)):
        axes.axhline(edge, color="black", linewidth=0.5)
    named = range(0, len(layers), -(-len(layers) // _TICKS))
    axes.set_yticks([n + 0.5 for n in named], [[*layers][n].removeprefix("layers.") for n in named])
    sizes = " or ".join(map(str, sorted({load.shape[1] for load in layers.values()})))
    axes.set_title(name, parse_math=False)
    axes.set(xlabel=unit, ylabel=f"layer, each of {sizes} experts", ylim=(len(layers), 0))
    return image
