"""Measured runs, as benchmarks/results has them, for the tests that hold predictions against them."""

from typing import Any

import pytest

from benchmarks import tables

MEASURED_CONFIGS = tables.RESULTS.with_name("configs")
"""The configs that rows name. Those for users change with what the search finds; these stay."""


def measured_runs(held: str, gpu: str | None = None) -> list[Any]:
    """Return a parameter for each run whose `held` has this name, on this GPU or on any."""
    rows = [row for row in tables.rows("runs") if held in row.get("held", ()) and gpu in (None, row["gpu"])]
    assert rows
    return [pytest.param(row, id=f"{row['config']} on {row['world']} {row['flags']}") for row in rows]


def arguments(row: dict[str, Any]) -> list[str]:
    """Return what the run of a row was started with."""
    return ["--config", str(tables.RESULTS.parent / row["config"]), *row["flags"].split()]
