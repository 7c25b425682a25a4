"""The page of performance figures is what its rows say, and the rows can be repeated."""

import json
import re
from statistics import mean

import pytest

from benchmarks import tables
from scripts.bench.loss_parity import Arm, least_shown
from tests.support.measured import arguments
from titanlite.config.command_line import parse_what_is_right

ALL = {path.stem: tables.rows(path.stem) for path in sorted(tables.RESULTS.glob("*.jsonl"))}
RUNS = {(row["config"], row["flags"]): row for row in ALL["runs"]}


def test_the_tables_of_the_page_are_what_the_generator_prints() -> None:
    page = tables.PAGE.read_text()
    assert tables.filled(page) == page, "run python benchmarks/tables.py"


@pytest.mark.parametrize("name", [name for name in ALL if name != "peer"])
def test_rows_say_of_which_commit_device_and_day_they_are(name: str) -> None:
    assert ALL[name]
    for row in ALL[name]:
        assert re.fullmatch(r"[0-9a-f]{7}", row["commit"]), row
        assert re.fullmatch(r"2\d{3}-\d\d-\d\d", row["date"]), row
        assert row["gpu"], row


def test_no_run_is_recorded_twice() -> None:
    lines = [json.dumps({key: value for key, value in row.items() if key != "note"}) for row in ALL["runs"]]
    assert len(lines) == len(set(lines))


def test_every_run_can_be_started_today() -> None:
    """Its flags are keys and values of the config."""
    for row in RUNS.values():
        _, problems = parse_what_is_right(arguments(row), "")
        assert len(problems) == 0, row


def test_figures_in_the_text_are_those_of_rows() -> None:
    """The four that begin the page."""
    page = tables.PAGE.read_text().partition("<!-- table")[0]
    by_layout = {
        (tables.layout(row), tables.float8(row), tables.save_list(row)): row
        for row in tables.rows("runs", table="layouts", gpu="H200")
        if "peer_tokens_per_second" in row
    }
    for layout, arithmetic in (("FSDP 4", "bf16"), ("FSDP 4", "`rowwise`"), ("TP 4, async", "`rowwise`")):
        row = by_layout[layout, arithmetic, "`none`"]
        assert f"{row['tokens_per_second']:,}" in page
    whole = [row for row in tables.rows("loss", config="scripts/bench/once_150m.toml") if row["epochs"] == 1]
    bf16, rowwise = ([row["held_out_loss"] for row in whole if row["arm"] == arm] for arm in ("bf16", "rowwise"))
    assert f"ends {mean(rowwise) - mean(bf16):.4f} above bf16" in page
    arms = Arm.read("bf16"), Arm.read("rowwise")
    least = float(least_shown(dict(zip(arms, (bf16, rowwise), strict=True)), arms[1], arms[0]))
    assert f"could have shown a difference of {least:.3f}" in page
