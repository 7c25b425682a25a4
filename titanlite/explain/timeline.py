"""Draw one step of all ranks: for each rank a bar of its time by category, and a lower bar of all its collectives."""

from pathlib import Path
from typing import Any

import numpy as np

from titanlite.explain.divide import CATEGORIES, EXPOSED, Segments, exclusive
from titanlite.explain.profiled import ProfiledSteps
from titanlite.observe.metrics import RunError

# A colour for each category, in order: the device's work, exposed communication, waits, the host, work between steps.
_COLOURS = dict(
    zip(
        CATEGORIES,
        (
            *("#5aa0dc", "#1f5fa8", "#8c6bb1", "#2b8a6e", "#9ecae1"),
            *("#d95f0e", "#f2a15a", "#a63603", "#b8860b", "#e6b800", "#8c510a"),
            *("#c0182b", "#e377c2", "#6a2c91", "#d0d0d0"),
            *("#888888", "#6b8e23", "#555555", "#a9a9a9"),
        ),
        strict=True,
    )
)
_PIXELS = 2000  # pixels across the picture; segments less than a pixel apart are drawn as one


def draw_timeline(run: ProfiledSteps, step: int, path: Path) -> None:
    """Draw a profiled step into `path`, whose ending gives the file format; refuse a step that was not profiled."""
    if step not in run.steps:
        want = f"a profiled step, {run.steps[0]} to {run.steps[-1]}"
        raise RunError.of("titanlite explain", "--step", str(step), want, f"--step {run.steps[0]}")
    figure = timeline_figure(run, run.steps.index(step))
    figure.savefig(path)


def timeline_figure(run: ProfiledSteps, index: int) -> Any:
    """Return the picture of the step at `index` of the profiled steps, as a matplotlib figure."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    figure = Figure(figsize=(13, 1.9 + 0.55 * len(run.profiles)), dpi=150, layout="constrained")
    axes = figure.subplots()
    origin = min(profile.origin_us + profile.steps[index].start_us for profile in run.profiles)
    seen: set[str] = set()
    for row, profile in enumerate(run.profiles):
        edges = np.array([profile.steps[index].start_us, profile.steps[index].end_us])
        segments = exclusive(profile, run.waits, edges)
        offset = profile.origin_us - origin
        resolution = (edges[1] - edges[0]) / _PIXELS
        bars = [(name, segments.owner == number, (row - 0.4, 0.5)) for number, name in enumerate(segments.order)]
        bars += [(name, segments.covered[name], (row + 0.14, 0.22)) for name in EXPOSED if name in segments.covered]
        for name, chosen, place in bars:
            if found := _runs(segments, chosen, resolution):
                seen.add(name)
                shown = [((start + offset) / 1e3, length / 1e3) for start, length in found]  # ms
                axes.broken_barh(shown, place, facecolors=_COLOURS[name], linewidth=0)
    axes.set_yticks(range(len(run.profiles)), [f"rank {profile.rank}" for profile in run.profiles])
    axes.invert_yaxis()
    axes.set_xlabel("ms since the step began on the first rank; the lower bar of a rank: its collectives")
    axes.margins(x=0.005)
    axes.spines[["top", "right"]].set_visible(False)
    handles = [Patch(color=_COLOURS[name], label=name) for name in CATEGORIES if name in seen]
    figure.legend(handles=handles, loc="outside lower left", ncols=5, frameon=False, fontsize=9)
    title = f"{run.name}: step {run.steps[index]}"
    figure.suptitle(title, x=0.02, ha="left", fontsize=11, parse_math=False)
    return figure


def _runs(segments: Segments, chosen: Any, resolution: float) -> list[tuple[float, float]]:
    """Return (start, length) of the chosen segments, joined if less than a pixel apart (`resolution`: µs per pixel)."""
    joined: list[tuple[float, float]] = []
    for start, length in zip(segments.start[chosen], segments.length[chosen], strict=True):
        if joined and start - sum(joined[-1]) < min(resolution, length):
            joined[-1] = (joined[-1][0], start + length - joined[-1][0])
        else:
            joined.append((float(start), float(length)))
    return joined
