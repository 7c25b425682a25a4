import json
import os
import re
import threading

from titanlite.errors import StepError
from titanlite.observe import status as module
from titanlite.observe.status import Status
from titanlite.redact import redact


def read(path):
    return json.loads(path.read_text())


def test_running_is_written_at_once_with_who_and_since_when(tmp_path):
    path = tmp_path / "status.json"
    Status(path, step=7)
    content = read(path)
    assert (content["state"], content["step"], content["pid"]) == ("running", 7, os.getpid())
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", content["started"])
    assert content["updated"] >= content["started"]
    assert content["host"]


def test_progress_is_written_seldom_but_never_lost(tmp_path, monkeypatch):
    path = tmp_path / "status.json"
    status = Status(path)
    status.progress(1)
    assert read(path)["step"] == 0
    monkeypatch.setattr(module, "_RENEW_S", 0.0)
    status.progress(2)
    assert read(path)["step"] == 2
    monkeypatch.setattr(module, "_RENEW_S", 1e9)
    status.progress(3)
    status.failed(StepError("loss is NaN at step 4"))
    assert (read(path)["state"], read(path)["step"]) == ("failed", 3)
    assert read(path)["error"] == {"type": "StepError", "message": "loss is NaN at step 4"}


def test_the_two_clean_ends(tmp_path):
    path = tmp_path / "status.json"
    status = Status(path)
    status.stopped(5, by="SIGTERM")
    assert (read(path)["state"], read(path)["by"], read(path)["step"]) == ("stopped", "SIGTERM", 5)
    status.finished(10)
    assert (read(path)["state"], read(path)["step"]) == ("finished", 10)
    assert "by" not in read(path)
    assert list(tmp_path.iterdir()) == [path]


def test_a_reader_never_sees_half_a_file(tmp_path):
    path = tmp_path / "status.json"
    status = Status(path)
    done = threading.Event()

    def write():
        for step in range(300):
            status.stopped(step, by="x" * 5000)
        done.set()

    writer = threading.Thread(target=write)
    writer.start()
    while not done.is_set():
        assert read(path)["state"] in ("running", "stopped")
    writer.join()


def test_a_secret_in_an_exception_is_not_written(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_abcdefgh")
    monkeypatch.setenv("EMPTY_TOKEN", "")
    monkeypatch.setenv("HOT_KEY", "step")  # too short to be one
    status = Status(tmp_path / "status.json")
    status.failed(OSError("GET https://user:hf_abcdefgh@host: step refused"))
    assert read(tmp_path / "status.json")["error"]["message"] == "GET https://user:***@host: step refused"
    assert redact("nothing") == "nothing"
