"""Write the report of a comparison: one HTML file that needs no network, with charts, verdict, configs and receipts.

The template, styles and scripts are in `page/`, with uPlot (MIT), which draws the charts. All are put into the file,
whose Content-Security-Policy forbids any connection. The numbers of curves are base64 of floats, and a column of steps,
tokens or seconds that several lines share is stored once.
"""

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import titanlite
from titanlite.comparison.curves import (
    COLOURS,
    DASHES,
    DIFFERENCE,
    LONGEST,
    Chart,
    Curve,
    metrics_of,
    packed,
    rows_a_piece,
    thin,
)
from titanlite.comparison.judge import Verdict
from titanlite.comparison.runs import RunRecord, title_of
from titanlite.comparison.tables import (
    RESULTS,
    config_differences,
    config_table,
    receipt_differences,
    receipt_table,
    results,
    samples_by_prompt,
    speed_table,
)

_PAGE = Path(__file__).with_name("page")
_DARK = ("#4FA8E0", "#F0803C", "#2CC79B", "#E39BC6", "#F2B84B", "#8CCBF2", "#E8E8E8")  # COLOURS on a dark background
_LEAST_SPEED = 0.02  # the least range of a speed axis, as a share of the speed: smaller changes do not matter
_OPEN = 12  # a group of up to this number of charts is open at first


def write_report(records: Sequence[RunRecord], path: Path, verdicts: Sequence[Verdict] = ()) -> None:
    """Write the report on runs to an HTML file, with the verdicts on all runs but the first."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    metrics = metrics_of(records)
    environment = Environment(
        loader=FileSystemLoader(_PAGE), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    runs = [{"name": r.name, "note": _note(r), "receipt": receipt_table(r.receipt)} for r in records]
    curves = {
        **_curves(records, metrics, verdicts),
        "runs": [{"name": record.name} for record in records],
        "colours": {"light": COLOURS, "dark": _DARK},
        "dashes": DASHES,
    }
    scripts = [_asset(name) for name in ("uPlot.iife.min.js", "fit.js", "chart.js", "page.js")]
    text = environment.get_template("report.html").render(
        title=title_of(records),
        version=titanlite.__version__,
        uplot=re.findall(r"v([\d.]+)", scripts[0])[0],
        styles=Markup(_asset("uPlot.min.css") + _asset("report.css")),
        script=Markup("\n".join(scripts)),
        data=Markup(json.dumps(curves, separators=(",", ":")).replace("<", "\\u003c")),
        runs=runs,
        verdicts=verdicts,
        notes=_notes(records, metrics),
        axes=curves["axes"],
        colours=curves["colours"],
        dashes=DASHES,
        metrics=metrics,
        groups=_groups(metrics, verdicts),
        results=[RESULTS, *map(results, records)],
        speed=speed_table(records),
        samples=samples_by_prompt(records),
        config={"different": config_differences(records), "all": config_table(records)},
        receipts={"different": receipt_differences(records)},
    )
    path.write_text(text, encoding="utf-8")


def _note(record: RunRecord) -> str:
    """Return a run's state unless it is "finished", and whether the run has no logged step; "" for neither."""
    state = record.state if record.state not in ("", "finished") else ""
    return ", ".join(filter(None, (state, "" if record.steps else "no logged step")))


def _notes(records: Sequence[RunRecord], metrics: Sequence[Chart]) -> list[str]:
    """Return notes on lines that the charts show in pieces, or leave out, unlike the files of the runs."""

    def names(runs: Iterable[int]) -> str:
        return ", ".join(records[run].name for run in sorted(runs))

    notes = []
    by_size: dict[int, set[int]] = {}
    for line in (line for metric in metrics for line in metric.lines):
        by_size.setdefault(rows_a_piece(len(line.values)), set()).add(line.run)
    for size in sorted(by_size.keys() - {1}):
        notes.append(
            f"A line of more than {LONGEST:,} rows is drawn in pieces, here of {size} rows ({names(by_size[size])}): "
            "the line is their mean, the shade goes from the least value to the greatest."
        )
    apart = {line.run for metric in metrics if metric.name == DIFFERENCE for line in metric.lines}
    if lone := {run for run, record in enumerate(records) if run and record.steps} - apart:
        notes.append(f"At no number of tokens that {records[0].name} logged, so without a difference: {names(lone)}.")
    if timeless := {line.run for metric in metrics for line in metric.lines if line.seconds is None}:
        notes.append(f"Without time per step, so not on the axis of time: {names(timeless)}.")
    return notes


def _groups(metrics: Sequence[Chart], verdicts: Sequence[Verdict]) -> list[dict[str, Any]]:
    groups: dict[str, list[dict[str, Any]]] = {}
    for number, metric in enumerate(metrics):
        wide = {"loss": "first", DIFFERENCE: "second"}.get(metric.name, "")
        has_band = metric.name == DIFFERENCE and any(verdict.band for verdict in verdicts)
        chart = {"number": number, "name": metric.name, "label": metric.label, "class": wide, "has_band": has_band}
        groups.setdefault(metric.group, []).append(chart)
    return [{"name": name, "charts": charts, "is_open": len(charts) <= _OPEN} for name, charts in groups.items()]


def _curves(records: Sequence[RunRecord], metrics: Sequence[Chart], verdicts: Sequence[Verdict]) -> dict[str, Any]:
    """Return the data that the page draws: the axes, the metrics with their lines, and the columns of x values."""
    columns: dict[str, int] = {}  # packed column → its index

    def numbers(line: Curve) -> dict[str, int | None]:
        columns_of = {"steps": line.steps, "tokens": line.tokens, "seconds": line.seconds}
        return {
            name: None if values is None else columns.setdefault(packed(values, "f8"), len(columns))
            for name, values in columns_of.items()
        }

    def drawn(line: Curve) -> dict[str, Any]:
        size, mean, low, high = thin(line)
        packed_line = {"run": line.run, "places": numbers(mean), "size": size, "mean": packed(mean.values)}
        if size > 1 and not np.array_equal(low, high, equal_nan=True):
            packed_line |= {"low": packed(low), "high": packed(high)}
        return packed_line | {"lost": int((~np.isfinite(line.values)).sum())}

    shown = []
    for metric in metrics:
        least = _LEAST_SPEED if metric.group == "Speed" else 0
        row = {"name": metric.name, "label": metric.label, "isNoisy": metric.is_noisy, "leastShare": least}
        row["lines"] = [drawn(line) for line in metric.lines]
        if metric.name == DIFFERENCE:
            row["bands"] = _bands(metric, verdicts, records, numbers)
        shown.append(row)
    has_time = any(line.seconds is not None for metric in metrics for line in metric.lines)
    return {"axes": ["tokens", "steps", *(["seconds"] * has_time)], "metrics": shown, "columns": list(columns)}


def _bands(
    metric: Chart, verdicts: Sequence[Verdict], records: Sequence[RunRecord], numbers: Any
) -> list[dict[str, Any]]:
    """Return the noise band of each verdict, with steps and seconds interpolated from the run that was judged."""
    runs = {record.name: run for run, record in enumerate(records)}
    lines = {line.run: line for line in metric.lines}
    bands = []
    for verdict in verdicts:
        line = lines.get(runs[verdict.run])
        if verdict.band is None or line is None:
            continue
        tokens, limit = verdict.band
        steps, seconds = (
            None if where is None else np.interp(tokens, line.tokens, where) for where in (line.steps, line.seconds)
        )
        places = numbers(Curve(line.run, steps, tokens, seconds, limit))  # type: ignore[arg-type]
        bands.append({"run": line.run, "places": places, "low": packed(-limit), "high": packed(limit)})
    return bands


def _asset(name: str) -> str:
    return (_PAGE / name).read_text(encoding="utf-8")
