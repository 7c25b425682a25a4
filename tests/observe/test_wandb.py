"""Real wandb, offline: no network, no login. A small reader of its file format checks what would be sent."""

import os
import struct
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from titanlite.config.schema import Config, Job, Metrics
from titanlite.observe import wandb as module
from titanlite.observe.metrics import ValidationRow
from titanlite.observe.wandb import WandbRun

RUN = """
import sys
from pathlib import Path
from titanlite.config.schema import Config, Job, Metrics
from titanlite.observe import wandb as module
from titanlite.observe.metrics import StepRow, ValidationRow
module._INIT_TIMEOUT_S = 2.0
folder, mode, first, last = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
config = Config(job=Job(name="mine"), metrics=Metrics(wandb=mode, wandb_group="sweep", wandb_project="proj"))
run = module.WandbRun(config, folder, lambda text: print("WARN", text))
for step in range(first, last + 1):
    run.log(StepRow(step, 2.0, 0.5, 1e-3, 1000 * step, 1.0, 1.0, float("nan"), 1.0, 1.0, 1.0, 0.0))
run.log(ValidationRow(last, 1000 * last, 2.25))
run.finish()
"""
SECRETS = {"WANDB_API_KEY": "0123456789abcdef" * 2 + "deadbeef", "HF_TOKEN": "hf_verysecrettoken"}


def train(folder, mode, first, last, **env):
    """Run RUN in a process of its own, with secrets in its environment and on its command line."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith("WANDB_")}
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(folder), mode, str(first), str(last), "--password=argvsecret"],
        capture_output=True,
        text=True,
        check=False,
        env={**clean, "HOME": str(folder.parent), "PYTHONPATH": str(Path(__file__).parents[2]), **env},
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


def records(path):
    """The protobuf records of a .wandb file: LevelDB's log format, after 7 bytes of wandb's own."""
    from wandb.proto import wandb_internal_pb2

    data, at, whole = path.read_bytes(), 7, b""
    while at < len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole record, or last chunk of one
            record = wandb_internal_pb2.Record()
            record.ParseFromString(whole)
            whole = b""
            yield record


def items(history):
    return {item.key or "/".join(item.nested_key): item.value_json for item in history.item}


def produced(folder):
    return [path for path in folder.rglob("*") if path.is_file()]


def test_offline_for_real_and_again_after_a_resume(tmp_path):
    folder = tmp_path / "run"
    assert train(folder, "offline", 1, 6, **SECRETS) == ""
    run_id = (folder / "wandb/run_id").read_text().strip()
    assert train(folder, "offline", 4, 7, **SECRETS) == ""  # resumed from step 3
    assert (folder / "wandb/run_id").read_text().strip() == run_id

    files = sorted(folder.glob(f"wandb/offline-run-*/run-{run_id}.wandb"), key=lambda path: path.stat().st_mtime_ns)
    assert len(files) == 2
    steps = []
    for file in files:
        seen = list(records(file))
        run = next(r.run for r in seen if r.WhichOneof("record_type") == "run")
        assert (run.project, run.run_group, run.display_name, run.run_id) == ("proj", "sweep", "mine", run_id)
        config = {update.key or "/".join(update.nested_key): update.value_json for update in run.config.update}
        assert '"lr":0.0003' in config["optimizer"].replace(" ", "")
        axes = {r.metric.name or r.metric.glob_name: r.metric.step_metric for r in seen if r.HasField("metric")}
        assert axes["*"] == "tokens"
        rows = [items(r.history) for r in seen if r.WhichOneof("record_type") == "history"]
        assert all("tokens" in row for row in rows)
        assert rows[-1]["validation_loss"] == "2.25"
        assert "mfu" not in rows[0]
        steps += [int(row["step"]) for row in rows if "loss" in row]
    assert steps == [1, 2, 3, 4, 5, 6, 4, 5, 6, 7]

    for path in produced(folder):
        for secret in (*SECRETS.values(), "argvsecret"):
            assert secret.encode() not in path.read_bytes(), f"{secret} in {path}"
        assert path.suffix not in (".patch", ".py"), path


def test_online_without_a_server_falls_back_to_offline(tmp_path):
    folder = tmp_path / "run"
    out = train(folder, "online", 1, 3, WANDB_BASE_URL="http://127.0.0.1:9", **SECRETS)
    assert out.startswith("WARN wandb: online failed (")
    assert out.count("\n") == 1
    (file,) = folder.glob("wandb/offline-run-*/*.wandb")
    assert sum(r.WhichOneof("record_type") == "history" for r in records(file)) == 4
    for path in produced(folder):
        assert not any(secret.encode() in path.read_bytes() for secret in (*SECRETS.values(), "argvsecret")), path


class Broken:
    def log(self, row):
        raise OSError("service is gone\nwith key supersecret1")

    def finish(self, exit_code):
        raise OSError("still gone")


@pytest.fixture
def warned():
    return []


def test_a_failure_in_mid_run_is_one_warning(monkeypatch, tmp_path, warned):
    monkeypatch.setattr(module, "_start", lambda *_: Broken())
    run = WandbRun(Config(metrics=Metrics(wandb="online")), tmp_path, warned.append)
    for step in range(3):
        run.log(ValidationRow(step, step, 1.0))
    run.finish()
    assert warned == ["wandb: cannot log (service is gone); training goes on, metrics.jsonl has every row"]


def test_a_failing_finish_is_one_warning(monkeypatch, tmp_path, warned):
    monkeypatch.setattr(module, "_start", lambda *_: Broken())
    run = WandbRun(Config(metrics=Metrics(wandb="offline")), tmp_path, warned.append)
    run.finish(exit_code=1)
    run.finish()
    assert len(warned) == 1
    assert "still gone" in warned[0]


@pytest.fixture
def _no_session_stays():
    """wandb refuses to start in what is forked from a process that has one."""
    yield
    import wandb

    wandb.teardown()


@pytest.mark.usefixtures("_no_session_stays")
def test_a_folder_that_cannot_be_written_is_one_warning_and_shows_no_secret(monkeypatch, tmp_path, warned):
    monkeypatch.setenv("WANDB_API_KEY", "not-a-folder")
    (tmp_path / "not-a-folder").write_text("")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # wandb's imports
        config = Config(job=Job(name="x"), metrics=Metrics(wandb="offline"))
        run = WandbRun(config, tmp_path / "not-a-folder/run", warned.append)
    run.log(ValidationRow(1, 1, 1.0))
    assert len(warned) == 1
    assert "wandb: cannot start (" in warned[0]
    assert "not-a-folder" not in warned[0]
