"""Real wandb, offline: no network, no login. What would be sent is read back from its files."""

import contextlib
import json
import os
import re
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.needs import slow
from titanlite.comparison.wandb_runs import wandb_records
from titanlite.config.schema import Config, Job, Metrics
from titanlite.observe import wandb as module
from titanlite.observe.metrics import MetricsFile
from titanlite.observe.wandb import WandbRun, has_login

RUN = """
import sys
from pathlib import Path
from titanlite.config.schema import Config, Data, Job, Metrics
from titanlite.observe import wandb as module
from titanlite.observe.metrics import MetricsFile
folder, mode, first, last = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
module._INIT_TIMEOUT_S, module._END_S["offline"] = 5.0 if mode == "online" else 100.0, 100.0
data = Data(source="https://me:urlsecret@host/text.jsonl")
shown = Metrics(wandb=mode, wandb_group="sweep", wandb_project="proj")
config = Config(job=Job(name="mine"), data=data, metrics=shown)
path = folder / "metrics.jsonl"
metrics = MetricsFile(path, first - 1)
facts = dict(facts={"world_size": 2}, tags=["found by"])
run = module.WandbRun(config, folder, path, lambda text: print("WARN", text), **facts)
def step_row(step, loss, **more):
    at = {"step": step, "loss": loss, "grad_norm": 0.5, "lr": 1e-3, "tokens": 1000 * step, "epoch": 0.5}
    speed = {"tokens_per_second_per_gpu": 1.0, "tflops_per_gpu": 1.0, "mfu": float("nan"), "seconds": 1.0}
    return at | speed | {"memory_gib": 1.0, "memory_allocated_gib": 1.0, "data_wait_seconds": 0.0} | more
def write(row):
    metrics.write(row)
    run.write(row)
for step in range(first, last + 1):
    write(step_row(step, 2.0))
write({"step": last, "tokens": 1000 * last, "validation_loss": 2.25})
assert "wandb" not in sys.modules
"""
FINISH = "run.finish()"
SECRETS = {"WANDB_API_KEY": "0123456789abcdef" * 2 + "deadbeef", "HF_TOKEN": "hf_verysecrettoken"}


def train(folder, mode, first, last, end=FINISH, code=0, **env):
    """Run RUN and then `end` in a process of its own, with secrets in its environment and on its command line."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith("WANDB_")}
    done = subprocess.run(
        [sys.executable, "-c", RUN + end, str(folder), mode, str(first), str(last), "--password=argvsecret"],
        capture_output=True,
        text=True,
        check=False,
        env={**clean, "HOME": str(folder.parent), "PYTHONPATH": str(Path(__file__).parents[3]), **env},
        cwd=folder.parent,
        timeout=300,
    )
    assert done.returncode == code, done.stderr
    assert done.stderr == ""
    return done.stdout


def items_of(given):
    return {item.key or "/".join(item.nested_key): item.value_json for item in given}


def items(history):
    return items_of(history.item)


def produced(folder):
    return [path for path in folder.rglob("*") if path.is_file()]


def test_offline_for_real_and_again_after_a_resume(tmp_path):
    folder = tmp_path / "run"
    who = "-c user.name=me -c user.email=me@example.com"
    for command in ("init", "remote add origin https://remotesecret/x.git", f"{who} commit --allow-empty -m x"):
        subprocess.run(["git", *command.split()], cwd=tmp_path, check=True, capture_output=True)
    assert train(folder, "offline", 1, 6, **SECRETS) == ""
    run_id, between = (folder / "wandb/run_id").read_text().strip(), time.time()
    (folder / "experts.jsonl").write_text('{"step": 7, "tokens": 7000, "experts": {"layers.0": [3, 1]}}\n')
    assert train(folder, "offline", 4, 7, **SECRETS) == ""  # resumed from step 3
    assert (folder / "wandb/run_id").read_text().strip() == run_id

    (file,) = folder.glob(f"wandb/offline-run-*/run-{run_id}.wandb")  # the newest start's, which has all
    seen = list(wandb_records(file))
    run = next(r.run for r in seen if r.WhichOneof("record_type") == "run")
    assert (run.project, run.run_group, run.display_name, run.run_id) == ("proj", "sweep", "mine", run_id)
    config = {update.key or "/".join(update.nested_key): update.value_json for update in run.config.update}
    assert '"lr":0.0003' in config["optimizer"].replace(" ", "")
    axes = {r.metric.name or r.metric.glob_name: r.metric for r in seen if r.HasField("metric")}
    assert axes["*"].step_metric == "tokens"
    assert [name for name, metric in axes.items() if metric.options.hidden] == ["step", "tokens"]  # no panels
    assert [r.exit.exit_code for r in seen if r.WhichOneof("record_type") == "exit"] == [0]
    assert set(run.tags) == {"found by"}
    assert config["world_size"] == "2"
    lines = [items(r.history) for r in seen if r.WhichOneof("record_type") == "history"]
    assert ["tokens" in line for line in lines] == [True] * 3 + [False] * 4 + [True] * 5  # empty where rows were lost
    rows = [line for line in lines if "tokens" in line]
    assert rows[-1]["val/loss"] == "2.25"
    assert "perf/mfu" not in rows[0]
    assert [int(row["step"]) for row in rows if "train/loss" in row] == [1, 2, 3, 4, 5, 6, 7]
    times = [float(row["_timestamp"]) for row in rows]
    assert times[2] < between < times[3]  # a row that is sent again keeps its time

    summary = {key: value for r in seen if r.HasField("summary") for key, value in items_of(r.summary.update).items()}
    heat_map = json.loads(summary["experts/heat_map"])
    assert (heat_map["_type"], heat_map["format"]) == ("image-file", "png")
    assert (file.parent / "files" / heat_map["path"]).stat().st_size == heat_map["size"] > 0

    for path in produced(folder):
        for secret in (*SECRETS.values(), "argvsecret", "remotesecret", "urlsecret"):
            assert secret.encode() not in path.read_bytes(), f"{secret} in {path}"
        assert path.suffix not in (".patch", ".py"), path
        assert path.name != "requirements.txt"
        assert path.suffix != ".wandb" or sys.executable.encode() not in path.read_bytes()


ALTERED = """
import time
def all_taken(rows):
    until = time.monotonic() + 30
    while run._taken < rows and time.monotonic() < until:
        run._hear(None)
        time.sleep(0.02)
all_taken(4)
{how}
write(step_row(4, 2.0, mfu=1.0))
all_taken(5)
run.finish()
"""


@pytest.mark.parametrize(
    "how", ["path.rename('elsewhere')", *slow("path.unlink(); path.write_text('mine')", "path.unlink()")]
)
def test_rows_of_a_file_that_is_written_anew_are_sent_once(tmp_path, how):
    train(tmp_path / "run", "offline", 1, 3, ALTERED.format(how=how))
    (file,) = tmp_path.glob("run/wandb/offline-run-*/*.wandb")
    rows = [items(r.history) for r in wandb_records(file) if r.WhichOneof("record_type") == "history"]
    assert [row.get("step") for row in rows] == ["1", "2", "3", "3", "4"]


@pytest.mark.slow
def test_online_without_a_server_falls_back_to_offline(tmp_path):
    folder = tmp_path / "run"
    out = train(folder, "online", 1, 3, WANDB_BASE_URL="http://127.0.0.1:9", **SECRETS)
    assert out.startswith("WARN wandb: online failed (")
    assert out.count("\n") == 1
    (file,) = folder.glob("wandb/offline-run-*/*.wandb")
    assert sum(r.WhichOneof("record_type") == "history" for r in wandb_records(file)) == 4
    for path in produced(folder):
        assert not any(secret.encode() in path.read_bytes() for secret in (*SECRETS.values(), "argvsecret")), path


def core_of(pid):
    """The process id of wandb's service, below a process."""
    for status in Path("/proc").glob("[0-9]*/status"):
        with contextlib.suppress(OSError):
            fields = dict(line.split(":\t", 1) for line in status.read_text().splitlines() if ":\t" in line)
            if fields["PPid"] == str(pid) and fields["Name"].startswith("wandb-core"):
                return int(fields["Pid"])
    return None


HANGS = """
import os, signal, time
sys.path.insert(0, {tests!r})
from test_wandb import core_of
while run._taken == 0:
    time.sleep(0.05)
    run._hear(None)
core = core_of(run._process.pid)
os.kill(core, signal.SIGSTOP)
for step in range(5000):
    write(step_row(10 + step, 2.0, mfu=0.5, tokens=1000 * step))
module._END_S["offline"] = 2.0
run.finish(1)
os.kill(core, signal.SIGKILL)
sys.exit(7)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="finds wandb's service in /proc")
def test_a_service_that_hangs_delays_neither_rows_nor_the_end(tmp_path):
    out = train(tmp_path / "run", "offline", 1, 3, end=HANGS.format(tests=str(Path(__file__).parent)), code=7)
    (line,) = out.splitlines()
    said = re.fullmatch(
        r"WARN wandb: cannot finish \(no end within 2 s\); it took (\d+) of 5004 rows, and may not have sent them all; "
        r"metrics.jsonl has every row",
        line,
    )
    assert said
    assert 4 <= int(said[1]) <= 5004


def test_a_run_that_is_killed_is_recorded_to_its_last_row(tmp_path):
    folder = tmp_path / "run"
    from google.protobuf.message import DecodeError

    train(folder, "offline", 1, 40, end="import os; os._exit(9)", code=9)
    by, seen = time.monotonic() + 300, []
    while not any(r.WhichOneof("record_type") == "exit" for r in seen):
        assert time.monotonic() < by
        time.sleep(0.1)
        with contextlib.suppress(ValueError, struct.error, DecodeError):  # no file yet, or one that is being written
            (file,) = folder.rglob("*.wandb")
            seen = list(wandb_records(file))
    assert sum(r.WhichOneof("record_type") == "history" for r in seen) == 41
    assert [r.exit.exit_code for r in seen if r.WhichOneof("record_type") == "exit"] == [1]


STAND_IN = """
import os, time
def teardown(): pass
setup = Settings = lambda *_, **__: None
def hang(*_, **__): time.sleep(1e6)
def end(*_, **__): os.kill(os.getpid(), 9)
def fail(*_, **__): raise OSError(f"no service\\nwith {os.environ.get('WANDB_API_KEY')}")
class Run:
    dir = os.path.dirname(__file__)
    log = finish = define_metric = save = lambda *_, **__: None
def init(**_): return Run()
"""


@pytest.fixture
def warned():
    return []


@pytest.fixture
def run_with(tmp_path, monkeypatch, warned):
    """Log three rows with a wandb that is STAND_IN but for one change, and finish."""

    def act(change, mode="offline", taken=0):
        (tmp_path / "wandb.py").write_text(STAND_IN + change)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        monkeypatch.setitem(module._END_S, mode, 2.0 if "hang" in change else 200.0)
        monkeypatch.setattr(module, "_INIT_TIMEOUT_S", 1.0)
        path = tmp_path / "run/metrics.jsonl"
        metrics = MetricsFile(path, 0)
        config = Config(job=Job(name="x"), metrics=Metrics(wandb=mode))
        run = WandbRun(config, path.parent, path, warned.append)
        for step in range(3):
            row = {"step": step, "tokens": step, "validation_loss": 1.0}
            metrics.write(row)
            run.write(row)
        while run._taken < taken:
            time.sleep(0.01)
            run._hear(None)
        run.finish(exit_code=1)
        run.finish()
        metrics.close()
        return warned

    return act


LAST = "metrics.jsonl has every row"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("Run.log = fail", "cannot log (no service); it took 0 of 3 rows"),
        ("Run.finish = fail", "cannot finish (no service); it took 3 of 3 rows, and may not have sent them all"),
        ("init = fail", "cannot start (no service); it took 0 of 3 rows"),
        ("def init(**_): raise SystemExit(3)", "cannot start (3); it took 0 of 3 rows"),
        ("init = hang", "cannot finish (no end within 3 s); it took 0 of 3 rows"),
        ("Run.log = end", "cannot go on (its process ended with -9); it took 0 of 3 rows"),
    ],
)
def test_what_fails_is_one_warning(run_with, change, said):
    assert run_with(change) == [f"wandb: {said}; {LAST}"]


def test_what_was_taken_before_a_hang_is_said(run_with):
    (said,) = run_with("Run.finish = hang", taken=3)
    assert (
        said == f"wandb: cannot finish (no end within 2 s); it took 3 of 3 rows, and may not have sent them all; {LAST}"
    )


SIGNALLED = """
def init(**_):
    for number in (1, 2, 10, 15):
        os.kill(os.getpid(), number)
    return Run()
"""


@pytest.mark.parametrize("change", ["", SIGNALLED], ids=["as it should", "signals that are for training"])
def test_nothing_is_said_where_nothing_fails(run_with, change):
    assert run_with(change) == []


def test_where_offline_fails_too_nothing_is_said_to_be_recorded(run_with):
    said = run_with("init = fail", mode="online")
    assert said == [f"wandb: cannot start (no service); it took 0 of 3 rows; {LAST}"]


def test_what_its_interpreter_prints_at_its_start_is_no_report(run_with, tmp_path):
    (tmp_path / "sitecustomize.py").write_text("print('hello')")
    assert run_with("") == []


@pytest.mark.parametrize("damaged", [b"", b"\xff\xfe", b"0123"])
def test_an_id_that_was_cut_off_is_made_anew(run_with, tmp_path, damaged):
    path = tmp_path / "run/wandb/run_id"
    path.parent.mkdir(parents=True)
    path.write_bytes(damaged)
    assert run_with("") == []
    assert re.fullmatch("[0-9a-f]{8}\n", path.read_text())


def test_where_the_log_has_no_room_training_goes_on(tmp_path, monkeypatch):
    (tmp_path / "wandb.py").write_text(STAND_IN + "init = fail")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def full(text: str) -> None:
        raise OSError(28, "No space left on device")

    path = tmp_path / "run/metrics.jsonl"
    MetricsFile(path, 0).close()
    run = WandbRun(Config(job=Job(name="x"), metrics=Metrics(wandb="offline")), path.parent, path, full)
    run.finish()


KILLED = """
import os
print(run._process.pid, flush=True)
os._exit(9)
"""


def test_a_run_that_is_killed_leaves_no_process_that_waits_for_wandb(tmp_path):
    (tmp_path / "wandb.py").write_text(STAND_IN + "Run.log = hang")
    change = "module._END_S['offline'] = 1.0\n"
    paths = f"{Path(__file__).parents[3]}{os.pathsep}{tmp_path}"
    code = RUN.replace("run = module.WandbRun", f"{change}run = module.WandbRun")
    done = subprocess.run(
        [sys.executable, "-c", code + KILLED, str(tmp_path / "run"), "offline", "1", "3"],
        capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": paths}, timeout=300,
    )  # fmt: skip
    assert done.returncode == 9, done.stderr
    stat, by = Path(f"/proc/{int(done.stdout)}/stat"), time.monotonic() + 300
    with contextlib.suppress(OSError):  # it is gone
        while stat.read_text().split()[2] != "Z":
            assert time.monotonic() < by
            time.sleep(0.1)


def test_a_folder_that_cannot_be_written_is_one_warning_and_shows_no_secret(monkeypatch, tmp_path, warned):
    monkeypatch.setenv("WANDB_API_KEY", "not-a-folder")
    (tmp_path / "not-a-folder").write_text("")
    config = Config(job=Job(name="x"), metrics=Metrics(wandb="offline"))
    run = WandbRun(config, tmp_path / "not-a-folder/run", tmp_path / "metrics.jsonl", warned.append)
    run.write({"step": 1, "tokens": 1, "validation_loss": 1.0})
    run.finish()
    assert len(warned) == 1
    assert "wandb: cannot start (" in warned[0]
    assert "not-a-folder" not in warned[0]


KEY, OTHER = "machine api.wandb.ai login user password abc", "machine github.com login me password abc"
OWN = {"WANDB_BASE_URL": "https://wandb.here:8080"}


@pytest.mark.parametrize(
    ("files", "env", "is_there"),
    [
        ({}, {}, False),
        ({}, {"WANDB_API_KEY": "abc"}, True),
        ({}, {"WANDB_IDENTITY_TOKEN_FILE": "token"}, True),
        ({".netrc": KEY}, {}, True),
        ({"_netrc": KEY}, {}, True),
        ({"other": KEY}, {"NETRC": "~/other"}, True),
        ({".netrc": OTHER}, {}, False),
        ({".netrc": "machine"}, {}, False),
        ({".netrc": KEY}, OWN, False),
        ({".netrc": "machine wandb.here:8080 login user password abc"}, OWN, True),
        (
            {
                ".netrc": "machine wandb.us password abc",
                ".config/wandb/settings": "[default]\nbase_url = https://wandb.us",
            },
            {},
            True,
        ),
        ({".config/wandb/settings": "[default]\napi_key = abc"}, {}, True),
        ({".config/wandb/settings": "no settings"}, {}, False),
    ],
)
def test_a_login_is_where_wandb_looks_for_it(tmp_path, monkeypatch, files, env, is_there):
    for name in [name for name in os.environ if name.startswith("WANDB_") or name == "NETRC"]:
        monkeypatch.delenv(name)
    for name, value in {"HOME": str(tmp_path), **env}.items():
        monkeypatch.setenv(name, value)
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    assert has_login() == is_there


@pytest.mark.parametrize("name", ["run_id", "run_id.tmp", "lines"])
def test_a_link_in_place_of_its_files_is_not_followed(tmp_path, warned, name):
    path, other = tmp_path / "run/metrics.jsonl", tmp_path / "of somebody"
    MetricsFile(path, 0).close()
    (path.parent / "wandb").mkdir()
    if name == "run_id":  # which is read where it is known what was sent
        (path.parent / "wandb/lines").touch()
    (path.parent / "wandb" / name).symlink_to(other)
    other.write_text("01234567\n")
    run = WandbRun(Config(job=Job(name="x"), metrics=Metrics(wandb="offline")), path.parent, path, warned.append)
    run.finish()
    assert len(warned) == 1
    assert f"a link in place of a file: '{path.parent / 'wandb' / name}'" in warned[0]
    assert other.read_text() == "01234567\n"
