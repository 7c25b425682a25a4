"""The watchdog in real processes: it ends them, so it cannot run in this one."""

import contextlib
import json
import re
import signal
import subprocess
import sys
import time
from concurrent import futures
from pathlib import Path

import pytest

from titanlite.observe import watchdog as module

HEAD = """
import ctypes, fcntl, sys, termios, threading, time
from pathlib import Path
from titanlite.observe import watchdog as module
from titanlite.observe.guard import Guard
from titanlite.observe.status import Status
from titanlite.observe.watchdog import Watchdog
folder = Path(sys.argv[1])
log = folder / "rank3.log"

def all_reduce_that_hangs():
    time.sleep(3600)

def until_read(guard):
    while fcntl.ioctl(guard._pipe.fileno(), termios.FIONREAD, bytes(4)) != bytes(4):
        time.sleep(0.01)
"""


def run(folder, body):
    return subprocess.run(
        [sys.executable, "-c", HEAD + body, str(folder)],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        env={"PYTHONPATH": str(Path(__file__).parents[3])},
    )


HANGS = """
class Slow(Status):
    def failed(self, error):
        super().failed(error)
        time.sleep({last_s})
{before}
with Watchdog(60, log, rank=3, status=Slow(folder / "status.json")) as watchdog:
    watchdog.progress(7, "step")
    watchdog.set_timeout(0.5)
    all_reduce_that_hangs()
"""


@pytest.mark.parametrize(
    ("before", "last_s", "has_stderr"),
    [
        ("", 0.3, True),
        ("module._LAST_WORDS_S = 0.5", 3600, True),
        ("sys.stderr = sys.__stderr__ = None", 0.3, False),
        ("import os; ours, theirs = os.pipe(); os.dup2(theirs, 2); os.close(ours)", 0.3, False),
    ],
    ids=["it has its last words", "which may hang", "without standard error", "of which nobody reads"],
)
def test_a_hang_ends_the_process_and_says_where(tmp_path, before, last_s, has_stderr):
    done = run(tmp_path, HANGS.format(before=before, last_s=last_s))
    assert done.returncode == 1
    for text in ((tmp_path / "rank3.log").read_text(), *[done.stderr] * has_stderr):
        assert re.search(r"watchdog: rank 3 made no progress for \d+ s at step 7, in step; stacks", text)
        assert "in all_reduce_that_hangs" in text
    content = json.loads((tmp_path / "status.json").read_text())
    assert (content["state"], content["error"]["type"]) == ("failed", "TimeoutError")


def test_it_is_silent_while_there_is_progress_and_during_a_long_first_step(tmp_path):
    done = run(
        tmp_path,
        """
with Watchdog(300, log, rank=0) as watchdog:
    time.sleep(2.1)  # compilation, longer than the limit of later steps
    watchdog.set_timeout(2.0)
    for step in range(1, 12):
        watchdog.progress(step, "step")
        time.sleep(0.2)
print(*[thread.name for thread in threading.enumerate()])  # closed: watches no more
""",
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "MainThread\n", "")
    assert (tmp_path / "rank3.log").read_text() == ""


def test_a_hang_that_keeps_the_interpreter_is_ended_too(tmp_path):
    done = run(
        tmp_path,
        """
module._LAST_WORDS_S = 0.5
def native_code_that_hangs():
    ctypes.PyDLL(None).sleep(3600)  # PyDLL keeps the interpreter lock, as a bad extension does
Status(folder / "status.json")
guard, told = Guard(folder / "status.json", 0), threading.Event()
runs = guard.runs
guard.runs = lambda *given: (runs(*given), told.set())
with Watchdog(2, log, rank=0, guard=guard):
    told.wait()
    native_code_that_hangs()
""",
    )
    assert done.returncode == -signal.SIGABRT
    said = r"rank 0 made no progress for \d+ s, in native code that keeps the interpreter"
    assert re.search(f"watchdog: {said}; stacks", done.stderr)
    assert "in native_code_that_hangs" in done.stderr
    content = json.loads((tmp_path / "status.json").read_text())
    assert content["state"] == "failed"
    assert re.fullmatch(said, content["error"]["message"])


STOPPED = """
Status(folder / "status.json")
guard = Guard(folder / "status.json", 0)
module._LAST_WORDS_S = 0.5
with Watchdog(4, log, rank=0, guard=guard) as watchdog:
    print("ready", flush=True)
    {waits}
guard.close()
print("went on")
"""


@pytest.mark.slow
def test_time_in_which_a_process_is_stopped_does_not_count(tmp_path):
    """Neither for the watchdog nor for the process beside it, of which one would end it when it is woken.

    Nor where it makes progress and where it makes none.
    """
    waiting = "time.sleep(0.5)", "[watchdog.progress(step, 'step') or time.sleep(0.1) for step in range(20)]"
    env = {"PYTHONPATH": str(Path(__file__).parents[3])}
    with contextlib.ExitStack() as stack:
        processes = []
        for number, waits in enumerate(waiting):
            (folder := tmp_path / str(number)).mkdir()
            command = [sys.executable, "-c", HEAD + STOPPED.format(waits=waits), str(folder)]
            started = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)
            processes.append(stack.enter_context(started))
        for process in processes:
            assert process.stdout.readline() == "ready\n"
        time.sleep(0.3)
        for process in processes:
            process.send_signal(signal.SIGSTOP)
        time.sleep(5.5)
        for process in processes:
            process.send_signal(signal.SIGCONT)
        for process, waits in zip(processes, waiting, strict=True):
            out, err = process.communicate(timeout=300)
            assert (process.returncode, out, err) == (0, "went on\n", ""), waits


@pytest.mark.parametrize(
    ("reported", "idle_s", "longest_s"),
    [
        (0.0, 3.0, 3.8),  # before the look at 1.0; it is stopped from 1.1 to 3601.1
        (1.05, 1.95, 2.75),  # after that look
        (3601.15, 0.05, 2.95),  # woken, and before the next look
    ],
)
def test_a_report_on_either_side_of_a_stop_counts_from_when_it_came(reported, idle_s, longest_s):
    """All of the stop but the two seconds by which a thread may be late by itself is left out."""
    first = module._Seen(0.0, 0.0, 180.0, 1, "step")
    clock = module._Clock(first, 0.0)
    assert clock.idle_s(first, 1.0) == 1.0
    seen = first._replace(since=reported)
    assert clock.idle_s(seen, 3601.2) == pytest.approx(idle_s)
    assert clock.idle_s(seen._replace(since=3602.0), 3602.1) == pytest.approx(0.1)
    assert clock.longest_s == pytest.approx(longest_s)
    assert clock.idle_s(seen._replace(since=3603.0, limited=3603.0), 3603.1) == pytest.approx(0.1)
    assert clock.longest_s == 0.0


@pytest.mark.parametrize(
    ("rank", "end"), [(0, "os.kill(os.getpid(), signal.SIGKILL)"), (1, "ctypes.string_at(0)"), (1, "os._exit(1)")]
)
def test_a_rank_that_ends_without_a_word_has_failed(tmp_path, rank, end):
    run(
        tmp_path,
        f"""
import os, signal
Status(folder / "status.json", 7)
guard = Guard(folder / "status.json", {rank})
guard.runs(100)
guard.runs(100, 9)
until_read(guard)
{end}
""",
    )
    content = wait_for_end(tmp_path)
    assert (content["state"], content["step"], content["error"]["rank"]) == ("failed", 9, rank)
    assert re.match(rf"rank {rank} \(process \d+\) ended without a word", content["error"]["message"])
    assert [path.name for path in tmp_path.iterdir()] == ["status.json"]


def wait_for_end(folder):
    for _ in range(6000):
        content = json.loads((folder / "status.json").read_text())
        if content["state"] != "running":
            return content
        time.sleep(0.05)
    raise AssertionError(content)


LAST = [
    "status.failed(ValueError('said'))",
    "guard.close()",
    "Status(folder / 'status.json', 9)",
]


def test_what_has_been_said_stays(tmp_path):
    """How the run ended, that this rank has done its part, or that another has begun."""
    folders = [tmp_path / str(number) for number in range(len(LAST))]

    def end_with(last, folder):
        folder.mkdir()
        return run(
            folder,
            f"""
import os
status = Status(folder / "status.json", 7)
guard = Guard(folder / "status.json", 0)
guard.runs(100)
until_read(guard)
time.sleep(1.2)  # as `started` counts seconds
{last}
print((folder / "status.json").read_text(), end="", flush=True)
os._exit(1)
""",
        )

    with futures.ThreadPoolExecutor(len(LAST)) as threads:
        ended = list(threads.map(end_with, LAST, folders))
    time.sleep(1.0)
    for last, folder, done in zip(LAST, folders, ended, strict=True):
        assert done.stdout, last
        assert (folder / "status.json").read_text() == done.stdout, last
        assert "Traceback" not in done.stderr, last
