"""Each way in which a run can end: what status.json, the exit codes, the checkpoints and the last lines say of it."""

import os
import resource
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple

import pytest
import torch

from tests.ranks.training.test_stop import at_step, kill
from tests.support.launched import Desk, Ended
from titanlite.observe.metrics import MetricsFile, Row
from titanlite.training import loop, stop, train


class End(NamedTuple):
    """A fault, and what comes of it."""

    plant: Callable[[], object]
    codes: list[int]
    status: dict[str, Any]  # of an error its type and rank
    said: tuple[str, ...] = ()  # by rank 0, or in its log
    saved: tuple[int, ...] = ()
    flags: tuple[str, ...] = ("--training.steps=6",)


def failed(kind: str, rank: int = 0) -> dict[str, Any]:
    return {"state": "failed", "error": (kind, rank)}


def stopped(by: str, step: int) -> dict[str, Any]:
    return {"state": "stopped", "by": by, "step": step}


def signalled(number: signal.Signals) -> End:
    """A signal in the second step."""
    again = "a second signal, a second or more later, ends the run at once, without saving"
    said = f"{number.name}: will save and stop at most two steps after the one at hand; {again}"
    stops = f"stopped by {number.name} after step 4"
    return End(at_step(2, kill(number)), [0], stopped(number.name, 4), (said, stops), (4,), ())


def before_steps(window: str, number: signal.Signals, ranks: int = 1) -> End:
    """A signal while the run is made ready, on all ranks."""

    def plant() -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # whatever pytest's worker does with it
        setattr(train, window, lambda *_, **__: signal.raise_signal(number))  # of this thread: it goes no further

    said = f"stopped by {number.name} before step 1\n"
    if ranks > 1:
        said += "torchrun sends it, too, when another process has ended"
    return End(plant, [128 + number] * ranks, stopped(number.name, 0), (said,))


def ignores_hangups() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    at_step(2, kill(signal.SIGHUP))()


def twice() -> None:
    stop._ONE_REQUEST_S = 600
    kill(signal.SIGTERM)()
    kill(signal.SIGTERM)()


def once_more_later() -> None:
    kill(signal.SIGTERM)()
    time.sleep(1.1)
    kill(signal.SIGINT)()
    time.sleep(60)  # the thread that ends the process is slow where the machine is busy: train no further meanwhile


def in_native_code(of: object, call: str, *kills: Callable[[], None]) -> Callable[[], None]:
    """Wait in native code in place of a call, and be signalled there once a second."""

    def waits(*_: object, **__: object) -> None:
        for second, signalled in enumerate(kills, 1):
            threading.Timer(second, signalled).start()
        torch.distributed.HashStore().wait(["what never comes"], timedelta(seconds=600))

    def plant() -> None:
        stop._TAKEN_UP_S = stop._ONE_REQUEST_S = 0.2
        setattr(of, call, waits)

    return plant


def stops_rank_0_alone() -> None:
    build = train.build

    def stopped(*args: Any) -> Any:
        if os.environ["RANK"] == "0":
            signal.raise_signal(signal.SIGTERM)
        return build(*args)

    train.build = stopped


def full_disk() -> None:
    """On rank 0, as if its file could grow no further."""
    write = MetricsFile.write

    def limited(self: MetricsFile, row: Row) -> None:
        if row["step"] == 3:
            size = os.fstat(self._file.fileno()).st_size
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (size + 10, resource.RLIM_INFINITY))
        try:
            write(self, row)
        finally:  # or this rank's output would be cut off as well
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))

    MetricsFile.write = limited  # type: ignore[method-assign]


def divides() -> None:
    raise ZeroDivisionError("a bug")


_GONE = "ConnectionError: another rank has ended, or the connection to it broke: its log or the launcher's output"
ENDS = {
    "finished": End(lambda: None, [0, 0], {"state": "finished", "step": 6}, saved=(6,)),
    "stop_after": End(
        lambda: None,
        [0, 0],
        stopped("job.stop_after", 3),
        ("stopped by job.stop_after after step 3",),
        (3,),
        ("--job.stop_after=3",),
    ),
    **{number.name: signalled(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)},
    "under nohup": End(ignores_hangups, [0], {"state": "finished", "step": 6}, saved=(6,)),
    "one request twice": End(at_step(2, twice), [0], stopped("SIGTERM", 4), saved=(4,), flags=()),
    "a second request": End(
        at_step(2, once_more_later),
        [130],
        stopped("a second signal, SIGINT", 1),
        ("stopped at once by a second signal, SIGINT, after step 1; the newest checkpoint is of step 1\n",),
        (1,),
        ("--training.steps=6", "--checkpoint.interval=1"),
    ),
    "a second request in native code": End(
        in_native_code(loop.Loop, "train", kill(signal.SIGTERM), kill(signal.SIGTERM)),
        [143],
        stopped("a second signal, SIGTERM", 0),
        ("stopped at once by a second signal, SIGTERM, after step 0; there is no checkpoint\n",),
    ),
    "while data are opened": before_steps("open_data", signal.SIGTERM),
    "while it is built": before_steps("build", signal.SIGINT),
    "before the first step": before_steps("Watchdog", signal.SIGUSR1),
    "two while they are built": before_steps("build", signal.SIGTERM, ranks=2),
    "one of two while they are built": End(stops_rank_0_alone, [143, 1], stopped("SIGTERM", 0)),
    "in native code": End(
        in_native_code(train, "build", kill(signal.SIGINT)),
        [130],
        stopped("SIGINT", 0),
        ("stopped by SIGINT before step 1\n",),
    ),
    "a bug": End(at_step(3, divides), [1], failed("ZeroDivisionError"), ("\nZeroDivisionError: a bug\n",)),
    "a bug of another rank": End(at_step(3, divides, 1), [1, 1], failed("ZeroDivisionError", 1), (_GONE,)),
    "another rank is killed": End(
        at_step(3, kill(signal.SIGKILL), 1), [1, -signal.SIGKILL], failed("ChildProcessError", 1), (_GONE,)
    ),
    "a full disk": End(full_disk, [2, 1], failed("ConfigError"), ("metrics.jsonl = File too large; ",)),
}


@pytest.mark.parametrize("name", [*ENDS])
def test_an_end_is_what_it_says(desk: Desk, name: str) -> None:
    end = ENDS[name]
    job = desk.start(name, len(end.codes), *end.flags, plant=end.plant)
    assert job.wait() == end.codes, job.output()
    ended, deadline = Ended(desk.folder / "runs" / name, ""), time.monotonic() + 300
    while (status := ended.status).get("error", {}).get("type") == "ConnectionError":
        assert time.monotonic() < deadline  # the process beside the other rank says so, after that one's end
        time.sleep(0.05)
    if "error" in status:
        status["error"] = status["error"]["type"], status["error"]["rank"]
    assert {key: status[key] for key in end.status} == end.status
    assert ended.checkpoints() == [*end.saved]
    of_rank_0 = job.output().partition("--- rank 1")[0]
    for text in end.said:
        assert of_rank_0.count(text) == 1
    for text in end.said[-1:]:
        assert text.strip().partition("\n")[0] in (ended.folder / "logs" / "rank0.log").read_text()
    assert ("Traceback" in of_rank_0) == (1 in end.codes[:1])
