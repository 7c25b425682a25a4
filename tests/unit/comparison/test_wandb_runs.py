"""What wandb was given comes back as it was: from its files, and from a server."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from titanlite.commands import main
from titanlite.comparison.runs import read_runs
from titanlite.comparison.wandb_runs import read_offline, read_wandb_folder, rows_of_lines, wandb_records
from titanlite.config.schema import Config
from titanlite.config.write import to_toml
from titanlite.observe.metrics import RunError, read_metrics

RUN = """
import json, sys
from pathlib import Path
from titanlite.config.schema import Config, Job, Metrics, Training
from titanlite.observe import wandb as module
from titanlite.observe.metrics import MetricsFile
folder = Path(sys.argv[1])
module._INIT_TIMEOUT_S, module._END_S["offline"] = 100.0, 100.0
config = Config(job=Job(name="mine"), training=Training(steps=40), metrics=Metrics(wandb="offline"))
metrics = MetricsFile(folder / "metrics.jsonl", 0)
entry = {"feature": "compile", "requested": True, "applied": 3, "count": 3, "skipped": []}
(folder / "receipt.json").write_text(json.dumps([entry]))
run = module.WandbRun(config, folder, folder / "metrics.jsonl", print, facts={"world_size": 2})
nan, inf = float("nan"), float("inf")
def rows():
    for step in range(1, 41):
        loss = nan if step == 7 else 10 / 3 / step
        at, of_step = {"step": step, "tokens": 1000 * step}, {"loss": loss, "grad_norm": inf if step == 7 else 0.1}
        yield at | of_step | {"lr": 1e-3 / step, "epoch": step / 7, "mfu": nan, "memory_gib": 1.0, "seconds": 0.1}
        if step % 10 == 0:
            yield at | {"validation_loss": nan if step == 10 else 2.25}
            layers = {f"layers.{i}.attention.{name}": 1 / (3 + i) for i in range(40) for name in ("wo", "wqkv")}
            yield at | {f"float8_output_sqnr_db.{layer}": sqnr for layer, sqnr in layers.items()}
for row in rows():
    metrics.write(row)
    run.write(row)
run.finish()
"""


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that real wandb has recorded, in more than one block of its file."""
    folder = tmp_path_factory.mktemp("recorded") / "run"
    root = str(Path(__file__).parents[3])
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(folder)],
        env={"PYTHONPATH": root, "HOME": str(folder.parent), "PATH": ""}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    (folder / "config.toml").write_text(to_toml(Config()))
    return folder


@pytest.fixture
def offline(run_folder: Path) -> Path:
    (folder,) = run_folder.glob("wandb/offline-run-*")
    return folder


def test_the_rows_are_those_of_the_file(run_folder: Path, offline: Path) -> None:
    rows = read_metrics(run_folder / "metrics.jsonl")
    (file,) = offline.glob("*.wandb")
    assert file.stat().st_size > 32768
    assert any(row.get("loss", 0) is None for row in rows)
    assert {"step": 10, "tokens": 10000, "validation_loss": None} in rows
    assert read_offline(offline) == read_offline(file) == rows


def test_what_else_compare_takes(offline: Path) -> None:
    (record,) = read_runs([offline])
    assert record.config["training.steps"] == 40
    assert "world_size" not in record.config  # of the run, and no key
    assert record.receipt is not None
    assert [entry["feature"] for entry in record.receipt] == ["compile"]
    assert record.state == "finished"


def test_compare_takes_the_folder(run_folder: Path, offline: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["compare", str(run_folder), str(offline), "--out", str(run_folder.parent / "both.png")])
    assert code == 1  # step 7 has no finite loss
    said = capsys.readouterr().out
    assert (run_folder.parent / "both.png").is_file()
    assert f"\n  {offline.name} " in said


@pytest.mark.parametrize("kept", [7, 8, 1000, -1])
def test_a_file_that_grows_gives_the_rows_that_are_whole(offline: Path, tmp_path: Path, kept: int) -> None:
    (file,) = offline.glob("*.wandb")
    cut = tmp_path / file.name
    cut.write_bytes(file.read_bytes()[:kept])
    whole = list(wandb_records(file))
    records = list(wandb_records(cut))
    assert records == whole[: len(records)]
    assert len(records) < len(whole)


def test_a_run_that_goes_on(offline: Path, tmp_path: Path) -> None:
    (file,) = offline.glob("*.wandb")
    cut = tmp_path / file.name
    cut.write_bytes(file.read_bytes()[:-100])
    assert read_wandb_folder(cut).state == "running"
    assert read_runs([cut])[0].is_running
    os.utime(cut, (0, 0))  # of a run that was killed
    assert not read_runs([cut])[0].is_running


def test_damage_is_said(offline: Path, tmp_path: Path) -> None:
    (file,) = offline.glob("*.wandb")
    content = bytearray(file.read_bytes())
    content[5000] ^= 1
    damaged = tmp_path / file.name
    damaged.write_bytes(content)
    with pytest.raises(RunError, match="another checksum"):
        read_offline(damaged)
    damaged.write_bytes(b"something else")
    with pytest.raises(RunError, match="not wandb's mark"):
        read_offline(damaged)


def test_no_folder_of_wandbs(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="offline-run-"):
        read_offline(tmp_path)


FOREIGN = """
import sys, wandb
run = wandb.init(mode="offline", dir=sys.argv[1], settings=wandb.Settings(silent=True))
run.log({"loss": 1.0})
run.finish()
"""


def test_a_run_of_another_trainer_is_refused(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", FOREIGN, str(tmp_path)], check=True, capture_output=True, cwd=tmp_path)
    (folder,) = tmp_path.glob("wandb/offline-run-*")
    with pytest.raises(RunError, match="a run of titanlite's"):
        read_offline(folder)


def test_lines_that_are_empty_are_no_rows() -> None:
    lines = [{"_step": 0}, {"step": 1, "tokens": 5, "train/loss": 2.0, "_null": ["mfu"], "_step": 1}]
    assert rows_of_lines(lines) == [{"step": 1, "tokens": 5, "loss": 2.0, "mfu": None}]
