"""What fails of wandb is one warning: with stand-ins for it. `test_wandb_record.py` has the real one."""

import contextlib
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from titanlite.config.schema import Config, Job, Metrics
from titanlite.observe import wandb as module
from titanlite.observe.metrics import MetricsFile
from titanlite.observe.wandb import WandbRun, has_login

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


SIGNALLED = """
def init(**_):
    for number in (1, 2, 10, 15):
        os.kill(os.getpid(), number)
    return Run()
"""
TAKEN, LAST = "it took {} of 3 rows", "; metrics.jsonl has every row"
SENT = f"{TAKEN.format(3)}, and may not have sent them all"


@pytest.fixture
def run_with(tmp_path, monkeypatch):
    """Log three rows with a wandb that is STAND_IN but for one change, finish, and return what was said."""

    def act(change, mode="offline", taken=0, folder="run", warn=None):
        (tmp_path / "wandb.py").write_text(STAND_IN + change)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        monkeypatch.setitem(module._END_S, mode, 2.0 if "hang" in change else 200.0)
        monkeypatch.setattr(module, "_INIT_TIMEOUT_S", 1.0)
        path, warned = tmp_path / "run/metrics.jsonl", []
        metrics = MetricsFile(path, 0)
        config = Config(job=Job(name="x"), metrics=Metrics(wandb=mode))
        run = WandbRun(config, tmp_path / folder, path, warn or warned.append)
        for step in range(3):
            row = {"step": step, "tokens": step, "validation_loss": 1.0}
            metrics.write(row)
            run.write(row)
        while run._taken < taken:
            time.sleep(0.01)
            run._hear(None)
        run.close(has_failed=True)
        run.close()
        metrics.close()
        return warned

    return act


@pytest.mark.parametrize(
    ("change", "given", "said"),
    [
        ("Run.log = fail", {}, f"cannot log (no service); {TAKEN.format(0)}"),
        ("Run.finish = fail", {}, f"cannot finish (no service); {SENT}"),
        ("init = fail", {}, f"cannot start (no service); {TAKEN.format(0)}"),
        ("init = fail", {"mode": "online"}, f"cannot start (no service); {TAKEN.format(0)}"),  # nor recorded offline
        ("def init(**_): raise SystemExit(3)", {}, f"cannot start (3); {TAKEN.format(0)}"),
        ("init = hang", {}, f"cannot finish (no end within 3 s); {TAKEN.format(0)}"),
        ("Run.finish = hang", {"taken": 3}, f"cannot finish (no end within 2 s); {SENT}"),
        ("Run.log = end", {}, f"cannot go on (its process ended with -9); {TAKEN.format(0)}"),
    ],
)
def test_what_fails_is_one_warning(run_with, change, given, said):
    assert run_with(change, **given) == [f"wandb: {said}{LAST}"]


@pytest.mark.parametrize("change", ["", SIGNALLED], ids=["as it should", "signals that are for training"])
def test_nothing_is_said_where_nothing_fails(run_with, tmp_path, change):
    (tmp_path / "sitecustomize.py").write_text("print('hello')")  # is no report
    assert run_with(change) == []


@pytest.mark.parametrize("damaged", [b"", b"\xff\xfe", b"0123"])
def test_an_id_that_was_cut_off_is_made_anew(run_with, tmp_path, damaged):
    path = tmp_path / "run/wandb/run_id"
    path.parent.mkdir(parents=True)
    path.write_bytes(damaged)
    assert run_with("") == []
    assert re.fullmatch("[0-9a-f]{8}\n", path.read_text())


def test_where_the_log_has_no_room_training_goes_on(run_with):
    def full(text):
        raise OSError(28, "No space left on device")

    run_with("init = fail", warn=full)


KILLED = """
import os, sys
from pathlib import Path
from titanlite.config.schema import Config, Metrics
from titanlite.observe import wandb as module
path = Path(sys.argv[1])
path.write_text('{"step": 1, "tokens": 1}\\n')
module._END_S["offline"] = 1.0
run = module.WandbRun(Config(metrics=Metrics(wandb="offline")), path.parent, path, print)
print(run._process.pid, flush=True)
os._exit(9)
"""


def test_a_run_that_is_killed_leaves_no_process_that_waits_for_wandb(tmp_path):
    (tmp_path / "wandb.py").write_text(STAND_IN + "Run.log = hang")
    paths = f"{Path(__file__).parents[3]}{os.pathsep}{tmp_path}"
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path / "metrics.jsonl")],
        capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": paths}, timeout=300,
    )  # fmt: skip
    assert done.returncode == 9, done.stderr
    stat, by = Path(f"/proc/{int(done.stdout)}/stat"), time.monotonic() + 300
    with contextlib.suppress(OSError):  # it is gone
        while stat.read_text().split()[2] != "Z":
            assert time.monotonic() < by
            time.sleep(0.1)


def test_a_folder_that_cannot_be_written_is_one_warning_and_shows_no_secret(run_with, monkeypatch, tmp_path):
    monkeypatch.setenv("WANDB_API_KEY", "not-a-folder")
    (tmp_path / "not-a-folder").write_text("")
    (said,) = run_with("", folder="not-a-folder/run")
    assert "wandb: cannot start (" in said
    assert "not-a-folder" not in said


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
def test_a_link_in_place_of_its_files_is_not_followed(run_with, tmp_path, name):
    own, other = tmp_path / "run/wandb", tmp_path / "of somebody"
    own.mkdir(parents=True)
    if name == "run_id":  # which is read where it is known what was sent
        (own / "lines").touch()
    (own / name).symlink_to(other)
    other.write_text("01234567\n")
    (said,) = run_with("")
    assert f"a link in place of a file: '{own / name}'" in said
    assert other.read_text() == "01234567\n"
