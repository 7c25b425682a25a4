"""A rank that waits for data excuses those that wait for it, as long as its data comes."""

import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from titanlite.observe.shared_wait import SharedWait

ROOT = Path(__file__).parents[3]

SCRIPT = """
import sys, time
from pathlib import Path
from titanlite.observe.watchdog import Watchdog
asked = []
def is_excused(limit):
    asked.append(limit)
    print("asked", flush=True)
    return len(asked) < 4
with Watchdog(0.3, Path(sys.argv[1]), rank=0, is_excused=is_excused):
    time.sleep(60)
"""


def test_a_watchdog_ends_a_run_when_it_is_excused_no_longer(tmp_path: Path) -> None:
    began = time.monotonic()
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "log")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stdout.count("asked") == 4
    assert "rank 0 made no progress for 0 s" in done.stderr
    assert time.monotonic() - began > 1.2


def test_what_one_rank_tells_another_sees_for_a_while() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=20))
    one, other = SharedWait(store), SharedWait(store)
    assert not other.is_on(60)
    one.tell()
    assert other.is_on(60)
    time.sleep(0.05)
    assert not other.is_on(0.01)
