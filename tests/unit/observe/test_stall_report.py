"""Ranks that say where they are, as threads with a store of one process."""

import os
import re
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta

import pytest
import torch.distributed as dist

from titanlite.observe import stall_report as module
from titanlite.observe.stall_report import StallReport, innermost_line

PROCESS = f"host {socket.gethostname()}, process {os.getpid()}"


def held(store: dist.Store, places: dict[int, str], world: int, wait_s: float) -> dict[int, str | None]:
    """What each rank that is called is told."""
    told: dict[int, str | None] = {}

    def hold(rank: int) -> None:
        told[rank] = StallReport(store, rank, world).hold(places[rank], wait_s)

    threads = [threading.Thread(target=hold, args=(rank,)) for rank in places]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return told


SILENT = f"    {module._SILENT}: rank"
NINE = dict.fromkeys(range(9), "step 58, in read") | {3: "step 57, in next", 7: "step 57, in next"}


@pytest.mark.parametrize(
    ("places", "world", "told"),
    [
        (NINE, 9, {0: "    step 58, in read: ranks 0-2, 4-6, 8\n    step 57, in next: ranks 3, 7"}),
        ({0: "here", 1: "here", 3: "here"}, 4, {0: f"    here: ranks 0-1, 3\n{SILENT} 2"}),
        ({1: "here", 2: "there"}, 3, {1: f"{SILENT} 0\n    here: rank 1 ({PROCESS})\n    there: rank 2 ({PROCESS})"}),
    ],
    ids=["all answer", "one is silent", "rank 0 is silent"],
)
def test_one_rank_is_told_where_all_are_by_place(places: dict[int, str], world: int, told: dict[int, str]) -> None:
    assert held(dist.HashStore(), places, world, wait_s=1.0) == {**dict.fromkeys(places), **told}


def test_rank_0_waits_no_longer_than_for_all(monkeypatch) -> None:
    monkeypatch.setattr(module.time, "sleep", lambda _seconds, sleep=time.sleep: sleep(0.01))
    held(dist.HashStore(), dict.fromkeys(range(3), "here"), world=3, wait_s=3600)  # which no test has


def test_a_store_in_which_the_main_thread_waits_is_not_blamed() -> None:
    """As NCCL does when it makes a communicator and a peer does not come."""
    store = dist.PrefixStore("default", dist.TCPStore("127.0.0.1", 0, 1, is_master=True))
    stall_report, began = StallReport(store, 1, 2), threading.Event()

    def waits() -> None:
        began.set()
        with suppress(RuntimeError):
            store.get("never")

    store.set_timeout(timedelta(seconds=3))
    main = threading.Thread(target=waits)
    main.start()
    began.wait()
    time.sleep(0.5)  # until it is in the store
    try:
        assert stall_report.hold("here", 1.5) == f"{SILENT} 0\n    here: rank 1 ({PROCESS})"
    finally:
        main.join()


@pytest.mark.parametrize("fails", [True, False])
@pytest.mark.parametrize(("agent", "who"), [("False", "rank 0"), ("True", "torchrun, and perhaps ranks beside it")])
def test_a_store_that_does_not_answer_is_named_by_its_host(monkeypatch, agent: str, who: str, fails: bool) -> None:
    class Silent:
        def clone(self) -> "Silent":
            return self

        def set(self, key: str, value: str) -> None:
            """Waits for no answer."""

        def check(self, keys: list[str]) -> None:
            if fails:
                raise RuntimeError("Connection reset by peer")
            threading.Event().wait(600)

    monkeypatch.setenv("MASTER_ADDR", "c12")
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", agent)
    told = held(Silent(), {1: "here", 2: "here"}, world=3, wait_s=0.5)  # type: ignore[arg-type]
    silent = f"the job's store does not answer, so what hosts it is stopped, gone or cut off: {who}, on c12"
    assert told == {1: f"    here: rank 1\n    {silent}", 2: None}


def test_what_was_said_of_an_earlier_wait_does_not_count() -> None:
    store = dist.HashStore()
    held(store, {0: "here", 1: "here"}, world=2, wait_s=0.5)
    time.sleep(1.25)
    now = f"    now: rank 0 ({PROCESS})\n{SILENT} 1 ({PROCESS})"
    assert held(store, {0: "now"}, world=2, wait_s=0.5)[0] == now


def test_the_innermost_line_of_titanlite_is_named(monkeypatch) -> None:
    seen: list[str] = []

    def noted(seconds: float, sleep: Callable[[float], None] = time.sleep) -> None:
        seen.append(innermost_line(sys._getframe()))
        sleep(seconds)

    monkeypatch.setattr(module.time, "sleep", noted)
    StallReport(dist.HashStore(), 0, 2).hold("here", 1.0)
    assert re.fullmatch(r"titanlite/observe/stall_report\.py:\d+ in _poll", seen[0])


def test_without_any_the_innermost_of_all_is_named() -> None:
    class Outside:
        f_code, f_lineno, f_back = test_without_any_the_innermost_of_all_is_named.__code__, 7, None

    assert innermost_line(Outside()) == f"{__file__}:7 in {Outside.f_code.co_name}"  # type: ignore[arg-type]
    assert innermost_line(None) == "no line"
