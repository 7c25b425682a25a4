import io
import json
import math
import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from tests.support.run_folder import STEP
from titanlite.errors import ConfigError
from titanlite.observe.console import Console
from titanlite.observe.metrics import MetricsFile, RunError, read_metrics
from titanlite.preflight.run_folder import RunFolder

FULL = Path("/dev/full")


def write_steps(path, steps, resume_step):
    file = MetricsFile(path, resume_step)
    for step in steps:
        file.write(STEP | {"step": step, "tokens": 1000 * step})
    file.close()


def test_rows_are_readable_while_the_run_goes_on_which_may_be_killed(tmp_path):
    file = MetricsFile(tmp_path / "m.jsonl", 0)
    file.write(STEP)
    assert len(read_metrics(tmp_path / "m.jsonl")) == 1
    file.close()


def test_rows_are_on_disk_when_sync_returns(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(os.fstat(fd).st_size))
    file = MetricsFile(tmp_path / "m.jsonl", 0)
    file.write(STEP)
    file.sync()
    assert synced == [(tmp_path / "m.jsonl").stat().st_size]
    file.close()


def test_resume_leaves_no_gap_and_no_repeat(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write_steps(path, range(1, 8), 0)  # the checkpoint is of step 5, the crash came after 7
    write_steps(path, range(6, 11), 5)
    assert [row["step"] for row in read_metrics(path)] == list(range(1, 11))
    assert list(tmp_path.iterdir()) == [path]


def test_resume_drops_what_is_trained_and_validated_again(tmp_path):
    path, kinds = tmp_path / "metrics.jsonl", ("loss", "validation_loss", "validation_loss_ema")

    def kept():
        return [(row["step"], *(kind for kind in kinds if kind in row)) for row in read_metrics(path)]

    file = MetricsFile(path, 0)
    for step in (1, 2):
        file.write(STEP | {"step": step})
        file.write({"step": step, "tokens": 1000 * step, "validation_loss": 3.0})
        file.write({"step": step, "tokens": 1000 * step, "validation_loss_ema": 2.5, "validation_loss_ema.a": 2.0})
    file.close()
    of_1 = [(1, kind) for kind in kinds]
    MetricsFile(path, 2, validates_again=True).close()
    assert kept() == [*of_1, (2, "loss")]
    MetricsFile(path, 1).close()
    assert kept() == of_1


def test_a_fresh_start_begins_a_file_and_keeps_what_there_was(tmp_path):
    path, first, second = (tmp_path / f"metrics{which}.jsonl" for which in ("", ".earlier-1", ".earlier-2"))
    write_steps(path, [1, 2, 3], 0)
    path.write_text(path.read_text() + "damage, and half a li")
    before = path.read_text()
    file = MetricsFile(path, 0)
    assert file.earlier == first
    file.close()
    write_steps(path, [1], 0)  # nothing was written meanwhile
    write_steps(path, [1, 2], 0)
    assert first.read_text() == before
    assert [[row["step"] for row in read_metrics(one)] for one in (second, path)] == [[1], [1, 2]]
    assert sorted(tmp_path.iterdir()) == sorted([path, first, second])


@pytest.mark.parametrize("kept", [1, 20, -1])
def test_a_last_line_cut_short_by_a_crash_is_dropped(tmp_path, kept):
    path = tmp_path / "metrics.jsonl"
    write_steps(path, [1, 2, 3], 0)
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:2]) + lines[2][:kept])  # -1: only the newline is missing
    assert [row["step"] for row in read_metrics(path)] == [1, 2]
    write_steps(path, [3], 3)  # resumes from a step whose row was lost: nothing is glued to the half line
    assert [row["step"] for row in read_metrics(path)] == [1, 2, 3]


def test_numbers_that_are_not_finite_are_null(tmp_path):
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path, 0)
    file.write(STEP | {"loss": math.nan, "grad_norm": math.inf, "mfu": math.nan, "float8_output_sqnr_db.w": math.inf})
    file.close()

    def refuse(constant):
        raise ValueError(constant)

    row = json.loads(path.read_text(), parse_constant=refuse)
    assert (row["loss"], row["grad_norm"], row["mfu"], row["lr"]) == (None, None, None, 3e-4)
    assert row["float8_output_sqnr_db.w"] is None  # of each layer


def test_damage_before_the_last_line_is_named_with_its_lines(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\nrubbish\n{"step": 2}\n[1]\n{"loss": 2}\n\xff\n')
    with pytest.raises(RunError) as error:
        MetricsFile(path, 5)
    text = str(error.value)
    assert f"{path}: 4 problems" in text
    for part in ("line 2  row", "rubbish", "line 4", "line 5", "line 6", "want: a JSON object with a step"):
        assert part in text
    assert "fix:  delete" in text


@pytest.mark.parametrize("value", ["9" * 401, str(2**63), "true", '"x"', "[1]"])
@pytest.mark.parametrize("key", ["step", "tokens", "loss", "grad_norm.all"])
def test_what_is_read_is_a_number_of_64_bits(tmp_path, key, value):
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{{"step": 1, "{key}": {value}}}\n')
    with pytest.raises(RunError, match="line 1  row = "):
        read_metrics(path)


def test_what_another_version_has_written_stays(tmp_path):
    path = tmp_path / "metrics.jsonl"
    row = {"step": 1, "tokens": 9, "loss": 5.0, "is_warm": True, "phase": "decay", "of": {"a": [1]}, "more.loss": "x"}
    path.write_text(json.dumps(row) + "\n")
    assert read_metrics(path) == [row]
    MetricsFile(path, 1).close()
    assert read_metrics(path) == [row]


def test_the_cheap_modules_import_nothing_slow():
    code = """
import sys
import titanlite.observe.metrics, titanlite.observe.console, titanlite.receipt, titanlite.observe.wandb
import titanlite.observe.status, titanlite.observe.watchdog, titanlite.observe.kernel_classes
print(sorted({"torch", "rich", "wandb", "matplotlib", "numpy"} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout == "[]\n"


@pytest.mark.skipif(not FULL.exists(), reason="no device that is always full")
def test_a_full_disk_is_told_with_the_path_of_the_file(tmp_path):
    file, log = MetricsFile(tmp_path / "metrics.jsonl", 0), Console(0, 0, 10, tmp_path, io.StringIO())
    for written in (file._file, log._file):
        full = os.open(FULL, os.O_WRONLY)
        os.dup2(full, written.fileno())
        os.close(full)
    for fails, path in ((partial(file.write, {"step": 1}), file._path), (partial(log.notice, "text"), log._path)):
        with (
            pytest.raises(ConfigError, match=f"{re.escape(str(path))} = No space left on device; "),
            RunFolder(tmp_path).write_errors_explained(),
        ):
            fails()
    for each in (file, log):  # what was not written is tried again
        with pytest.raises(OSError, match=re.escape(str(each._path))):
            each.close()
