import errno
import json
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from titanlite.errors import StepError
from titanlite.observe import guard
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
    assert read(path)["error"] == {"type": "StepError", "message": "loss is NaN at step 4", "rank": 0}


def test_what_two_ranks_write_at_one_instant_is_one_after_the_other(tmp_path, monkeypatch):
    """Rank 0 loses its peer, and has looked, when the process beside that one says what it ended of."""
    path = tmp_path / "status.json"
    first, write = Status(path), module.write_status
    run = {key: read(path)[key] for key in ("started", "host", "pid")}
    other = threading.Thread(target=guard._say_failed, args=(path, run, 1, "ChildProcessError", "rank 1 was killed"))

    def write_late(*args):
        other.start()
        other.join(0.2)  # while nobody else can write
        write(*args)

    monkeypatch.setattr(module, "write_status", write_late)
    first.failed(ConnectionError("another rank has ended"))
    other.join()
    assert read(path)["error"] == {"type": "ChildProcessError", "message": "rank 1 was killed", "rank": 1}


def test_who_holds_the_status_for_ever_keeps_nobody_from_writing(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_WAIT_S", 0.05)
    path = tmp_path / "status.json"
    status = Status(path)
    with module.one_writer(path):
        status.failed(StepError("loss is NaN at step 4"))
    assert read(path)["state"] == "failed"


def test_a_rank_that_ended_before_its_guard_was_awake_is_named(tmp_path):
    path = tmp_path / "status.json"
    Status(path)
    gone = "0"  # nobody's child
    code = "from titanlite.observe import guard; guard.main()"
    subprocess.run([sys.executable, "-c", code, str(path), "1", gone], input=b"60.0 0\n", check=True, timeout=300)
    assert (read(path)["error"]["type"], read(path)["error"]["rank"]) == ("ChildProcessError", 1)


CAUSE, GONE = RuntimeError("cause"), RuntimeError("connection closed by peer")
FINISHED, OF_RANK_0 = {"state": "finished", "step": 10}, StepError("of all ranks")


def stopped(by, step=3):
    return {"state": "stopped", "step": step, "by": by}


def failed(rank, step=0, error=CAUSE):
    told = {"type": type(error).__name__, "message": str(error), "rank": rank}
    return {"state": "failed", "step": step, "error": told}


@pytest.mark.parametrize(
    ("acts", "said"),
    [  # rank, what it does, and with what
        ([(1, "progress", 3), (1, "finished", 3), (1, "stopped", 3, "SIGTERM")], {"state": "running", "step": 0}),
        ([(0, "stopped", 5, "SIGTERM")], stopped("SIGTERM", 5)),
        ([(0, "stopped", 5, "SIGTERM"), (0, "finished", 10)], FINISHED),
        ([(0, "stopped", 3, "SIGTERM"), (1, "failed", GONE)], stopped("SIGTERM")),
        # A thread has noted the stop of a run that goes on until it fails.
        ([(0, "stopped", 3, "a second signal"), (0, "progress", 4), (0, "failed", GONE)], stopped("a second signal")),
        ([(1, "failed", CAUSE), (0, "progress", 3), (0, "failed", GONE), (2, "failed", GONE)], failed(1)),
        ([(1, "progress", 3), (1, "failed", CAUSE), (0, "failed", GONE)], failed(1, 3)),
        ([(1, "failed", CAUSE), (0, "failed", OF_RANK_0)], failed(0, error=OF_RANK_0)),
        ([(1, "failed", CAUSE), (0, "stalled", "rank 1 is silent")], failed(1)),
        # The thread that asks where all ranks are waits for them, and the run may end meanwhile.
        ([(0, "failed", CAUSE), (0, "stalled", "rank 1 is silent")], failed(0)),
    ],
)
def test_the_first_end_stands_unless_who_knows_better_writes_another(tmp_path, monkeypatch, acts, said):
    monkeypatch.setattr(module, "_RENEW_S", 0.0)
    path = tmp_path / "status.json"
    ranks = [Status(path, rank=rank) for rank in range(3)]
    for rank, act, *given in acts:
        getattr(ranks[rank], act)(*given)
    content = read(path)
    assert {key: content[key] for key in content.keys() - {"started", "host", "pid", "updated"}} == said
    assert list(tmp_path.iterdir()) == [path]


def test_what_an_earlier_run_failed_of_is_no_matter(tmp_path):
    path = tmp_path / "status.json"
    Status(path).failed(StepError("yesterday"))
    path.write_text(path.read_text().replace('updated": "20', 'updated": "19'))
    Status(path, rank=1).failed(StepError("today"))
    assert read(path)["error"]["message"] == "today"


def test_a_run_that_has_lost_its_folder_leaves_what_the_other_writes(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_RENEW_S", 0.0)
    path = tmp_path / "status.json"
    for began, stays in (("2099-01-01T00:00:00Z", True), ("2020-01-01T00:00:00Z", False)):
        first, second = (Status(path, rank=rank) for rank in (0, 1))
        second.progress(1)
        other = {"state": "running", "step": 1, "started": began, "host": "other", "pid": 1, "updated": began}
        for write in (first.progress, first.stalled, second.stalled, second.failed, first.finished, first.failed):
            path.write_text(json.dumps(other))
            write(3)
            assert (read(path) == other) is stays, write
        path.unlink()


def test_an_end_is_written_where_the_disk_has_no_room_for_another_file(tmp_path, monkeypatch):
    path = tmp_path / "status.json"
    status = Status(path)

    def full(path, text, by, on_disk):
        path.with_name(f"{path.name}{by}.tmp").touch()  # it still takes the name
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr(module, "write_durably", full)
    monkeypatch.setattr(module, "_RENEW_S", 0.0)
    with pytest.raises(OSError, match="No space left"):  # of which the run ends
        status.progress(3)
    status.failed(OSError("No space left"))
    assert (read(path)["state"], read(path)["step"]) == ("failed", 3)
    status.stopped(2, by="SIGTERM")  # shorter
    assert read(path)["state"] == "stopped"
    assert list(tmp_path.iterdir()) == [path]


def test_a_secret_in_an_exception_is_not_written(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_abcdefgh")
    monkeypatch.setenv("EMPTY_TOKEN", "")
    monkeypatch.setenv("HOT_KEY", "step")  # too short to be one
    status = Status(tmp_path / "status.json")
    status.failed(OSError("GET https://user:hf_abcdefgh@host: step refused"))
    assert read(tmp_path / "status.json")["error"]["message"] == "GET https://***@host: step refused"
    assert redact("nothing") == "nothing"


def test_a_run_that_makes_no_step_says_where_its_ranks_are_until_it_makes_one(tmp_path, monkeypatch):
    path = tmp_path / "status.json"
    status = Status(path, step=7)
    status.stalled("rank 3 is in next")
    assert (read(path)["state"], read(path)["step"], read(path)["stalled"]) == ("running", 7, "rank 3 is in next")
    assert status.stall == "rank 3 is in next"
    monkeypatch.setattr(module, "_RENEW_S", 0.0)
    status.progress(8)
    assert status.stall is None
    assert "stalled" not in read(path)


def test_a_run_is_known_by_its_first_process(tmp_path, monkeypatch):
    path = tmp_path / "status.json"
    Status(path, step=7)
    first = read(path)
    monkeypatch.setattr(os, "getpid", lambda: 4711)
    Status(path, rank=1).stalled("rank 0 is silent")
    assert {key: read(path)[key] for key in ("pid", "host", "started")} == {
        key: first[key] for key in ("pid", "host", "started")
    }


@pytest.mark.parametrize("rank", [0, 1])
def test_a_file_that_a_host_without_power_has_left_empty_is_written_anew(tmp_path, rank):
    path = tmp_path / "status.json"
    path.touch()
    Status(path, rank=rank).failed(ValueError("cause"))
    assert (read(path)["state"], read(path)["error"]["rank"]) == ("failed", rank)


@pytest.mark.parametrize("is_last", [True, False])
@pytest.mark.parametrize("state", ["finished", "stopped", "failed", "running"])
def test_a_start_with_nothing_to_do_leaves_an_end_as_it_was(tmp_path: Path, state: str, is_last: bool) -> None:
    """What says no end, or a stop of a run that is done by now, is to be written anew."""
    path = tmp_path / "status.json"
    content = {"state": state, "step": 7, "error": {}, "updated": "2026-01-01T00:00:00Z"}
    path.write_text(json.dumps(content, indent=2) + "\n")
    before = path.read_text()
    stays = state == "finished" or (state == "stopped" and not is_last)
    assert Status(path, 7).idle(is_last) == stays
    assert (path.read_text() == before) == stays


@pytest.mark.parametrize(
    "edited",
    [
        {"state": "failed", "updated": "2099"},
        {"state": "failed", "updated": "2099", "error": "a bug"},
        {"state": "stopped", "updated": 5},
        {"state": ["running"], "updated": "2099", "started": 5},
        ["running"],
    ],
)
def test_a_file_that_somebody_has_edited_ends_no_run(tmp_path, monkeypatch, edited):
    monkeypatch.setattr(module, "_RENEW_S", 0.0)
    path = tmp_path / "status.json"
    first, second = (Status(path, rank=rank) for rank in (0, 1))
    for write in (first.progress, second.stalled, second.failed, first.finished):
        run = guard._run_of(path)
        path.write_text(json.dumps(edited))
        guard._say_failed(path, run, 1, "ChildProcessError", "rank 1 was killed")
        write(3)
    assert (read(path)["state"], read(path)["step"]) == ("finished", 3)
