"""Whole runs with a mirror: a new disk goes on as the old one would have, and a store that hangs delays no run."""

import json
import os
import re
import shutil
import signal
import time
from pathlib import Path

import pytest

from tests.support.faulty_store import SECRET, FaultyStore, s3
from tests.support.launched import Desk, wait_for_step
from titanlite.training import train

FLAGS = ("--training.steps=8", "--checkpoint.interval=2", "--checkpoint.keep_latest_k=2")


def test_a_new_disk_goes_on_with_equal_bits(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = desk.run("whole", 2, *FLAGS)
    with s3(monkeypatch) as bucket:
        flags = *FLAGS, f"--checkpoint.mirror={bucket}/run", "--checkpoint.async_mode=async"
        first = desk.run("mirrored", 2, *flags, "--job.stop_after=5")
        assert "until the mirror s3://bucket/run has " in first.output
        shutil.rmtree(first.folder)
        rest = desk.run("mirrored", 2, *flags)
    assert "that of step 5 was taken from s3://bucket/run" in rest.output
    assert "resumed from step 5" in rest.output
    assert rest.content(8) == whole.content(8)
    files = [path for path in rest.folder.rglob("*") if path.is_file()]
    assert not [path for path in files if SECRET.encode() in path.read_bytes()]
    assert SECRET not in first.output + rest.output


def test_a_store_that_hangs_is_waited_for_as_long_as_stated(
    desk: Desk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = FaultyStore(tmp_path, monkeypatch)
    flags = *FLAGS, f"--checkpoint.mirror={store.url}"
    store.becomes("hangs")
    run, deadline = desk.start("hangs", 1, *flags), time.monotonic() + 120
    while "waits at most 600 s until the mirror" not in run.output():
        assert time.monotonic() < deadline, run.output()
        time.sleep(0.05)
    folder = desk.folder / "runs" / "hangs"
    assert json.loads((folder / "status.json").read_text())["state"] == "finished"
    os.kill(run.pids[0], signal.SIGTERM)
    assert run.wait(60) == [0], run.output()
    assert "step-00000008: the next start of the run copies them" in " ".join(run.output().split())
    assert store.complete() == []
    assert not [path for path in folder.rglob("*") if path.is_file() and SECRET.encode() in path.read_bytes()]
    stopped = desk.start("hangs", 1, *flags, "--training.steps=2000", plant=short_stop)
    wait_for_step(folder, 10)
    os.kill(stopped.pids[0], signal.SIGTERM)
    assert stopped.wait(60) == [0], stopped.output()
    assert re.search("waits at most [123] s until the mirror", stopped.output())
    store.becomes("ok")
    desk.run("hangs", 1, *flags, "--training.steps=2000", "--job.stop_after=1")
    assert max(store.complete()) >= 10


def short_stop() -> None:
    train.STOP_S = 3.0
