"""Turn the rows of runs into curves: per metric one line per run, over steps, tokens and time, packed for the report.

A line of many thousand points is wider than any screen. So it is cut into pieces of 2, 4, 8, … rows, and the mean, the
least and the greatest value of each piece are kept. Unlike a choice of points, the means leave a smoothed curve in
place, and the extremes keep each spike. As lengths are powers of two, pieces end at the same steps in all runs.

Time is training time, the sum of the steps' `seconds`, without validations and checkpoints.
"""

import base64
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from titanlite.comparison.runs import RunRecord
from titanlite.observe.metric_table import METRICS

Values = NDArray[np.float64]
LONGEST = 4_000  # a line of up to this number of values is not cut
DIFFERENCE = "loss difference"

# Okabe and Ito's palette, which colour-blind readers can distinguish, without yellow, which is hard to see on white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
DASHES = ((), (8, 4), (2, 3))  # of lines 1 to 7, 8 to 14, 15 to 21; then they repeat


@dataclass(frozen=True)
class Curve:
    """One run's values of one metric, with their steps, tokens and times. Arrays are [n]."""

    run: int  # index of the run in the comparison
    steps: Values
    tokens: Values  # trained on up to each step
    seconds: Values | None  # of training up to each step; None if the run's rows lack the time per step
    values: Values  # NaN where a value was not finite


@dataclass(frozen=True)
class Chart:
    """One metric, with a line for each run that logged it."""

    name: str  # key in metrics.jsonl
    group: str  # the group of charts that it belongs to
    label: str  # description, with the unit
    is_noisy: bool  # whether smoothing helps
    lines: list[Curve]  # at most one per run


def metrics_of(records: Sequence[RunRecord]) -> list[Chart]:
    """Return a chart for each metric that a run logged, declared ones first, and one of loss differences from run 0."""
    grouped = [key for key, metric in METRICS.items() if metric.group]
    in_order = [name for key in grouped for name in ((key, DIFFERENCE) if key == "loss" else (key,))]
    lines: dict[str, list[Curve]] = {name: [] for name in in_order}
    for run, record in enumerate(records):
        by_metric: dict[str, list[dict[str, Any]]] = {}
        for row in record.rows:
            for key, value in row.items():
                if key not in ("step", "tokens") and (value is None or isinstance(value, int | float)):
                    by_metric.setdefault(key, []).append(row)
        groups = [key for key in by_metric if key.startswith("grad_norm.")]
        if "grad_norm" in by_metric and len(groups) == 1:  # the only group has all parameters: the same line
            del by_metric[groups[0]]
        clock = _clock(record)
        for key, rows in by_metric.items():
            lines.setdefault(key, []).append(_curve(run, rows, key, clock))
    first = [line for line in lines["loss"] if line.run == 0]
    apart = [differences_from(line, first[0]) for line in lines["loss"] if first and line.run > 0]
    lines[DIFFERENCE] = [line for line in apart if len(line.tokens)]
    return [_chart(name, found, records[0].name) for name, found in lines.items() if found]


def paired_differences(record: RunRecord, first: RunRecord, metric: str) -> tuple[Values, Values]:
    """Return the token counts [n], ascending, at which both runs logged a finite value of `metric`, and the differences
    of these values, `record` minus `first`, [n].
    """
    found = differences_from(*(_curve(0, run.steps, metric, None) for run in (record, first)))
    known = np.isfinite(found.values)
    return found.tokens[known], found.values[known]


def rows_a_piece(rows: int) -> int:
    """Return the number of rows per piece for a line of `rows` rows: a power of two, or 1 if the line is not cut."""
    return 1 if rows <= LONGEST else 2 ** math.ceil(math.log2(3 * rows / LONGEST))  # three values are kept per piece


def thin(line: Curve) -> tuple[int, Curve, Values, Values]:
    """Cut a line into pieces. Returns the rows per piece (1: not cut), the curve of the pieces' means, and each piece's
    least and greatest value, NaN if it has no finite value.
    """
    size = rows_a_piece(len(line.values))
    if size == 1:
        return 1, line, line.values, line.values

    def cut(values: Values) -> Values:  # [n / size, size], the last row padded with NaN
        filled = np.full(math.ceil(len(values) / size) * size, math.nan)
        filled[: len(values)] = values
        return filled.reshape(-1, size)

    steps, tokens, seconds, mean = (
        None if values is None else _mean_of_rows(cut(values))
        for values in (line.steps, line.tokens, line.seconds, line.values)
    )
    pieces = cut(line.values)
    known = np.isfinite(pieces)
    some = known.any(axis=1)
    least = np.where(some, np.where(known, pieces, math.inf).min(axis=1), math.nan)
    greatest = np.where(some, np.where(known, pieces, -math.inf).max(axis=1), math.nan)
    return size, Curve(line.run, steps, tokens, seconds, mean), least, greatest  # type: ignore[arg-type]


def packed(values: Values, kind: str = "f4") -> str:
    """Encode numbers as base64 of little-endian floats. `kind`: their numpy type, "f4" or "f8"."""
    return base64.b64encode(values.astype(f"<{kind}").tobytes()).decode()


def differences_from(line: Curve, first: Curve) -> Curve:
    """Return the curve `line` minus `first` at the token counts that both have. It may be empty."""
    tokens, ours, its = np.intersect1d(line.tokens, first.tokens, return_indices=True)
    seconds = None if line.seconds is None else line.seconds[ours]
    return Curve(line.run, line.steps[ours], tokens, seconds, line.values[ours] - first.values[its])


def tokens_in_words(tokens: float, form: str = ".1f") -> str:
    """Format a number of tokens with a unit (T, B, M or k), as "2.0 B". `form`: format of the number."""
    for size, name in ((1e12, " T"), (1e9, " B"), (1e6, " M"), (1e3, " k")):
        if tokens >= size:
            return f"{tokens / size:{form}}{name}"
    return f"{tokens:.0f}"


def _chart(name: str, lines: list[Curve], first: str) -> Chart:
    start, _, of = name.partition(".")
    metric = METRICS.get("loss" if name == DIFFERENCE else start)
    if metric is None or not metric.group:
        group, slash, rest = name.partition("/")
        return Chart(name, group if slash else "Other", rest if slash else name, True, lines)
    about = f"difference in training loss from {first}" if name == DIFFERENCE else metric.about
    label = ": ".join(filter(None, (of, about)))
    return Chart(name, metric.group, f"{label} ({metric.unit})" if metric.unit else label, metric.is_noisy, lines)


def _clock(record: RunRecord) -> tuple[Values, Values] | None:
    """Return 0 and the logged steps, with the seconds of training up to each; None if a step lacks its time."""
    rows = record.steps
    if not rows or any(not isinstance(row.get("seconds"), int | float) for row in rows):
        return None
    steps = np.array([0, *(row["step"] for row in rows)], dtype=np.float64)
    seconds = np.array([row["seconds"] for row in rows], dtype=np.float64)
    return steps, np.concatenate([[0.0], np.cumsum(np.diff(steps) * seconds)])


def _curve(run: int, rows: Sequence[dict[str, Any]], key: str, clock: tuple[Values, Values] | None) -> Curve:
    found = ((row["step"], row["tokens"], math.nan if (value := row.get(key)) is None else value) for row in rows)
    steps, tokens, values = np.array(list(found), dtype=np.float64).reshape(-1, 3).T
    return Curve(run, steps, tokens, None if clock is None else np.interp(steps, *clock), values)


def _mean_of_rows(pieces: Values) -> Values:
    """Return the mean of the finite values in each row of `pieces`; NaN for a row without any."""
    known = np.isfinite(pieces)
    with np.errstate(invalid="ignore"):
        return np.where(known, pieces, 0.0).sum(axis=1) / known.sum(axis=1)
