"""Make the tables of a comparison: results, speed and memory, and the differences of configs and receipts."""

import json
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from titanlite.comparison.runs import RunRecord
from titanlite.observe.metric_table import METRICS, Column
from titanlite.observe.samples_file import read_samples
from titanlite.preflight.run_folder import RunFolder
from titanlite.preflight.same_run import dotted
from titanlite.streams import escaped

_SPEED = {key: metric.column for key, metric in METRICS.items() if metric.column}
_RESULTS = {
    "loss": Column("final loss", lambda losses: losses[-1], "{:.4f}"),
    "validation_loss": Column("best validation", min, "{:.4f}"),
    **{key: _SPEED[key] for key in ("tokens_per_second_per_gpu", "mfu")},
    "memory_gib": Column("memory GiB", max, "{:.1f}"),
}
_MOST_SAMPLES = 24  # rows of a prompt
RESULTS = ("run", "steps", *(column.heading for column in _RESULTS.values()))


def results(record: RunRecord) -> list[str]:
    """Return a run's cells of the table with the headings `RESULTS`; "-" where the run has no such number."""
    steps = f"{record.last_step:,}" + (f" ({record.state})" if record.state not in ("", "finished") else "")
    rows = [row for row in record.rows if {"loss", "validation_loss"} & row.keys()]
    return [record.name, steps, *(column.text(_column_of(rows, key)) for key, column in _RESULTS.items())]


def speed_table(records: Sequence[RunRecord]) -> list[list[str]]:
    """Return the table of speed (medians over the steps) and memory (peaks): the headings, then one list per run."""
    rows = [["run", *(column.heading for column in _SPEED.values())]]
    rows += [[r.name, *(column.text(_column_of(r.steps, key)) for key, column in _SPEED.items())] for r in records]
    if len(records) > 1:
        speeds = [_column_of(record.steps, "tokens_per_second_per_gpu") for record in records]
        rates = [median(of) if of else None for of in speeds]
        first = rates[0]
        shares = [f"{rate / first:.1%}" if rate is not None and first else "-" for rate in rates]
        rows = [[*row[:2], share, *row[2:]] for row, share in zip(rows, ("of the first's", *shares), strict=True)]
    return rows


def _column_of(rows: Sequence[Mapping[str, Any]], key: str) -> list[float]:
    return [row[key] for row in rows if row.get(key) is not None]


def config_differences(records: Sequence[RunRecord]) -> list[tuple[str, list[str]]]:
    """Return the entries of `config_table` whose values differ, except `checkpoint.resume`."""
    rows = config_table(records)
    return [(key, values) for key, values in rows if len(set(values)) > 1 and key != "checkpoint.resume"]


def config_table(records: Sequence[RunRecord]) -> list[tuple[str, list[str]]]:
    """Return (dotted key, its value in each run as JSON or "-" if not set), in the order of the config files."""
    keys = dict.fromkeys(key for record in records for key in record.config)
    texts = [{key: json.dumps(value, default=str) for key, value in record.config.items()} for record in records]
    return [(key, [of.get(key, "-") for of in texts]) for key in keys]


def receipt_differences(records: Sequence[RunRecord]) -> list[tuple[str, list[str]]]:
    """Return (feature and item, its text in each run's receipt or "-") for the items in which receipts differ."""
    by_run = [None if record.receipt is None else _flat_receipt(record.receipt) for record in records]
    flat = [entries for entries in by_run if entries is not None]
    keys = dict.fromkeys(key for entries in flat for key in entries)
    found = [key for key in keys if len({entries.get(key) for entries in flat}) > 1]
    return [
        (key, ["no receipt" if said is None else _cut_text(said.get(key, "-")) for said in by_run]) for key in found
    ]


def receipt_table(receipt: Sequence[Mapping[str, Any]] | None) -> list[list[str]] | None:
    """Return one list per feature of a receipt: name, requested, applied, skipped. None if there is no receipt."""
    if receipt is None:
        return None
    rows = []
    for entry in receipt:
        applied = entry.get("applied")
        said = "\n".join(f"{k}: {_plain_json(v)}" for k, v in applied.items()) if isinstance(applied, dict) else None
        skipped = "\n".join(f"{case['what']}: {case['why']}" for case in entry.get("skipped", []))
        rows.append(
            [entry["feature"], _plain_json(entry.get("requested")), said or _plain_json(applied), skipped or "-"]
        )
    return rows


def _flat_receipt(receipt: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return the receipt as "feature: item" → text. Skipped cases have one item per reason, which lists them."""
    flat: dict[str, str] = {}
    for entry in receipt:
        said = {key: entry.get(key) for key in ("requested", "applied")}
        flat |= {f"{entry['feature']}: {key}": json.dumps(value) for key, value in dotted(said).items()}
        cases: dict[str, list[str]] = {}
        for case in entry.get("skipped", []):
            cases.setdefault(case["why"], []).append(case["what"])
        of_why = {why: f"{len(names)}: {', '.join(names)}" for why, names in cases.items()}
        flat |= {f"{entry['feature']}: skipped, {why}": names for why, names in of_why.items()}
    return flat


def _cut_text(text: str) -> str:
    return text if len(text) <= 300 else f"{text[:300]}…"


def _plain_json(value: object) -> str:
    """Format a value for a table as JSON, but a string without quotes, and None as "-"."""
    return "-" if value is None else value if isinstance(value, str) else json.dumps(value)


def samples_by_prompt(records: Sequence[RunRecord]) -> list[tuple[str, list[tuple[str, list[str]]]]]:
    """Return, by prompt, rows of a step and what each run added after it; of many steps some, and always the last."""
    texts: dict[str, dict[int, list[str]]] = {}
    for run, record in enumerate(records):
        for step, samples in read_samples(RunFolder(record.path).samples):
            for sample in samples:
                row = texts.setdefault(sample.prompt, {}).setdefault(step, [""] * len(records))
                row[run] = escaped(sample.text)
    found = []
    for prompt, by_step in texts.items():
        every = -(-len(by_step) // _MOST_SAMPLES)
        steps = sorted(by_step)[::-every][::-1]
        found.append((escaped(prompt), [(f"{step:,}", by_step[step]) for step in steps]))
    return found
