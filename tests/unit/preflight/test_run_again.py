"""Processes that are started end before who started them goes on, however that is interrupted."""

import os
import signal
import threading
import time
from pathlib import Path

import pytest

from titanlite.preflight.run_again import run_again

RANK = """
import os, signal, sys, time
from pathlib import Path

mine = Path(sys.argv[1]) / os.environ["RANK"]
signal.signal(signal.SIGTERM, lambda *_: sys.exit())
mine.with_suffix(".begun").touch()
try:
    time.sleep(60)
finally:
    time.sleep(0.5)
    mine.with_suffix(".ended").touch()
"""


def test_ranks_end_before_an_interrupt_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a_rank.py").write_text(RANK)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")

    def interrupt() -> None:
        until = time.monotonic() + 60
        while len(list(tmp_path.glob("*.begun"))) < 2 and time.monotonic() < until:
            time.sleep(0.05)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
    threading.Thread(target=interrupt).start()
    try:
        with pytest.raises(KeyboardInterrupt):
            run_again("a_rank", [str(tmp_path)], 2)
    finally:
        signal.signal(signal.SIGINT, before)
    assert sorted(path.name for path in tmp_path.glob("*.ended")) == ["0.ended", "1.ended"]
