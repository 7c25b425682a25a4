"""The watchdog in real processes: it ends them, so it cannot run in this one."""

import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

HEAD = """
import ctypes, sys, time
from pathlib import Path
from titanlite.observe import watchdog as module
from titanlite.observe.status import Status
from titanlite.observe.watchdog import Watchdog
folder = Path(sys.argv[1])
log = folder / "rank3.log"

def all_reduce_that_hangs(seconds=60):
    time.sleep(seconds)
"""


def run(folder, body):
    start = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", HEAD + body, str(folder)],
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
        env={"PYTHONPATH": str(Path(__file__).parents[2])},
    )
    return done, time.monotonic() - start


def test_a_hang_ends_the_process_and_says_where(tmp_path):
    done, seconds = run(
        tmp_path,
        """
status = Status(folder / "status.json")
with Watchdog(60, log, rank=3, on_timeout=lambda error: (time.sleep(0.3), status.failed(error))) as watchdog:
    watchdog.progress(7, "step")
    watchdog.set_timeout(0.5)
    all_reduce_that_hangs()
""",
    )
    assert done.returncode == 1
    assert seconds < 10
    for text in (done.stderr, (tmp_path / "rank3.log").read_text()):
        assert re.search(r"watchdog: rank 3 made no progress for [01] s at step 7, in step; stacks", text)
        assert "in all_reduce_that_hangs" in text
    content = json.loads((tmp_path / "status.json").read_text())
    assert content["state"] == "failed"
    assert content["error"]["type"] == "TimeoutError"


def test_it_is_silent_while_there_is_progress_and_during_a_long_first_step(tmp_path):
    done, _ = run(
        tmp_path,
        """
module._LAST_WORDS_S = 1.0
with Watchdog(30, log, rank=0) as watchdog:
    time.sleep(1.2)  # compilation, longer than the limit of later steps
    watchdog.set_timeout(1.0)
    for step in range(1, 7):
        watchdog.progress(step, "step")
        time.sleep(0.25)
time.sleep(2.2)  # closed: watches no more, nor does faulthandler's timer
print("done")
""",
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")
    assert (tmp_path / "rank3.log").read_text() == ""


def test_a_hang_that_keeps_the_interpreter_is_ended_too(tmp_path):
    done, seconds = run(
        tmp_path,
        """
module._LAST_WORDS_S = 0.5
def native_code_that_hangs():
    ctypes.PyDLL(None).usleep(20_000_000)  # PyDLL keeps the interpreter lock, as a bad extension does
with Watchdog(0.5, log, rank=0) as watchdog:
    time.sleep(0.1)
    native_code_that_hangs()
""",
    )
    assert done.returncode == 1
    assert seconds < 10
    assert "Timeout" in done.stderr
    assert "in native_code_that_hangs" in done.stderr


@pytest.mark.parametrize(
    "lost",
    ["sys.stderr = sys.__stderr__ = None", "import os; ours, theirs = os.pipe(); os.dup2(theirs, 2); os.close(ours)"],
)
def test_a_process_without_standard_error_is_ended_too(tmp_path, lost):
    done, _ = run(
        tmp_path,
        lost
        + """
with Watchdog(0.3, log, rank=0):
    all_reduce_that_hangs(10)
""",
    )
    assert done.returncode == 1
    assert "in all_reduce_that_hangs" in (tmp_path / "rank3.log").read_text()


def test_last_words_that_hang_do_not_keep_the_process(tmp_path):
    done, seconds = run(
        tmp_path,
        """
module._LAST_WORDS_S = 0.5
with Watchdog(0.3, log, rank=0, on_timeout=lambda error: time.sleep(60)):
    all_reduce_that_hangs()
""",
    )
    assert done.returncode == 1
    assert seconds < 10
    assert "in all_reduce_that_hangs" in done.stderr
