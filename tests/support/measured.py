"""Measured runs, as benchmarks/results has them, for the tests that hold predictions against them."""

import json
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


def measured_runs(held: str, gpu: str | None = None) -> list[Any]:
    """Return a parameter for each run of runs.jsonl whose `held` has this name, on this GPU or on any."""
    lines = (ROOT / "benchmarks" / "results" / "runs.jsonl").read_text().splitlines()
    rows = [row for line in lines if held in (row := json.loads(line)).get("held", ()) and gpu in (None, row["gpu"])]
    assert rows
    return [pytest.param(row, id=f"{row['config']} on {row['world']} {row['flags']}") for row in rows]


def arguments(row: dict[str, Any]) -> list[str]:
    """Return what the run of a row was started with."""
    return ["--config", str(ROOT / row["config"]), *row["flags"].split()]
