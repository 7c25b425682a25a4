"""Signals: all ranks save and leave after the same step, and the same command goes on as if nothing had happened."""

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.launched import REPOSITORY, Desk, Ended, torchrun, wait_for_step
from tests.support.needs import slow
from titanlite.training import feed, loop, stop, train

VALIDATE = ("--validation.enable=true", "--validation.freq=4", "--validation.steps=2")


@pytest.fixture(scope="module")
def undisturbed(desk: Desk) -> Ended:
    """Two ranks, with validation."""
    return desk.run("undisturbed", 2, *VALIDATE, "--job.stop_after=10")


def at_step(step: int, act: Callable[[], object], rank: int = 0) -> Callable[[], None]:
    """Do something on one rank within a step, after what the step says about signals has been asked."""

    def plant() -> None:
        take, now = loop.train_step, [0]

        def counted(*args: Any, **more: Any) -> dict[str, torch.Tensor]:
            now[0] += 1
            if now[0] == step and os.environ.get("RANK", "0") == str(rank):
                act()
            return take(*args, **more)

        loop.train_step = counted

    return plant


def kill(number: int) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), number)


# All ranks are told in the next step, whose results are read one step later, or at once if it validates.
@pytest.mark.parametrize(("signalled", "stopped"), [(5, 7), *slow((3, 4))])
def test_a_signal_to_one_rank_stops_all_after_the_same_step(
    desk: Desk, undisturbed: Ended, signalled: int, stopped: int
) -> None:
    name = f"one rank {signalled}"
    run = desk.run(name, 2, *VALIDATE, plant=at_step(signalled, kill(signal.SIGTERM), rank=1))
    assert run.status["state"] == "stopped"
    assert run.status["step"] == stopped
    assert run.status["by"] == "a signal to another rank"
    assert "SIGTERM" not in run.output  # the first rank of a host speaks, or each would
    assert run.checkpoints() == [stopped]
    # Stopped at step 4, where validation is due: saving comes first, and validation when the run goes on.
    assert [row["step"] for row in run.rows if "validation_loss" in row] == ([4] if stopped > 4 else [])
    rest = desk.run(name, 2, *VALIDATE, "--job.stop_after=10")
    timeless = ("step", "tokens", "loss", "grad_norm", "lr", "validation_loss")
    kept = [[{k: row[k] for k in timeless if k in row} for row in run.rows] for run in (rest, undisturbed)]
    assert kept[0] == kept[1]
    assert rest.content(10) == undisturbed.content(10)


@pytest.mark.parametrize(
    ("flags", "call"),
    [((), 2), (("--optimizer.ema_decay=0.5", "--validation.weights=both"), 3)],
    ids=["of the weights", "of their average"],
)
def test_a_signal_in_a_validation_leaves_it_to_the_next_start(desk: Desk, flags: tuple[str, ...], call: int) -> None:
    """To one rank of two, between batches: nothing of the validation is logged, and nothing of the run is lost."""

    def plant() -> None:
        take = feed.Feed.measuring

        def counted(self: feed.Feed, step: int, what: str) -> None:
            now.append(step)
            if len(now) == call and os.environ["RANK"] == "1":
                os.kill(os.getpid(), signal.SIGTERM)
            take(self, step, what)

        now: list[int] = []
        feed.Feed.measuring = counted

    name, all_flags = f"in a validation {call}", (*VALIDATE, *flags)
    run = desk.run(name, 2, *all_flags, plant=plant)
    assert (run.status["state"], run.status["step"], run.checkpoints()) == ("stopped", 4, [4])
    assert not [row for row in run.rows if "validation_loss" in row]
    rest = desk.run(name, 2, *all_flags, "--job.stop_after=10")
    whole = desk.run(f"not {name}", 2, *all_flags, "--job.stop_after=10")
    measured = "step", "validation_loss", "validation_loss_ema"
    told = [[[row.get(k) for k in measured] for row in run.rows if measured[1] in row] for run in (rest, whole)]
    assert told[0] == told[1]
    assert rest.content(10) == whole.content(10)


def test_a_signal_in_the_last_validation_leaves_it_to_the_next_start(desk: Desk) -> None:
    steps = (*VALIDATE, "--training.steps=6")
    run = desk.run("last of all", 1, *steps, plant=at_step(6, kill(signal.SIGTERM)))
    assert (run.status["state"], run.status["step"], run.checkpoints()) == ("stopped", 6, [6])
    assert "stopped by SIGTERM after step 6" in run.output
    again = desk.run("last of all", 1, *steps)
    assert again.status["state"] == "finished"
    assert [row["step"] for row in again.rows if "validation_loss" in row] == [4, 6]


@pytest.mark.slow
def test_a_validation_that_was_due_is_logged_once_however_often_the_run_goes_on(desk: Desk) -> None:
    desk.run("due", 1, *VALIDATE, plant=at_step(3, kill(signal.SIGTERM)))
    for _ in range(2):  # neither gets as far as a checkpoint of its own
        job = desk.start("due", 1, *VALIDATE, plant=at_step(1, kill(signal.SIGKILL)))
        assert job.wait() == [-signal.SIGKILL]
    run = desk.run("due", 1, *VALIDATE, "--job.stop_after=5")
    assert [row["step"] for row in run.rows if "validation_loss" in row] == [4]


def test_a_signal_in_the_last_steps_does_not_skip_the_last_validation(desk: Desk) -> None:
    steps = ("--training.steps=6", "--checkpoint.enable=false")
    run = desk.run("last", 1, *VALIDATE, *steps, plant=at_step(5, kill(signal.SIGTERM)))
    assert run.status["state"] == "finished"
    assert [row["step"] for row in run.rows if "validation_loss" in row] == [4, 6]
    said = "SIGTERM: will stop without saving (checkpoint.enable = false) at most two steps after the one at hand"
    assert said in run.output


def test_a_run_whose_terminal_hangs_up_saves_and_says_the_rest_in_its_log(desk: Desk) -> None:
    def plant() -> None:
        ours, theirs = os.openpty()
        for fd in (1, 2):
            os.dup2(theirs, fd)
        sys.stdout = sys.stderr = os.fdopen(1, "w", buffering=1)

        def hang_up() -> None:
            os.close(ours)
            os.kill(os.getpid(), signal.SIGHUP)

        at_step(2, hang_up)()

    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        run = desk.run("hung up", 1, plant=plant)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert (run.status["state"], run.checkpoints()) == ("stopped", [4])
    log = (run.folder / "logs" / "rank0.log").read_text()
    assert log.count("the terminal is lost (Input/output error)") == 1
    assert "stopped by SIGHUP after step 4" in log


def test_what_signals_did_before_they_do_afterwards() -> None:
    numbers = [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP]
    before = [signal.signal(number, signal.SIG_IGN) for number in numbers]
    try:
        with stop.StopSignals(saves=True, last_words=pytest.fail):
            noted = [number for number in numbers if signal.getsignal(number) != signal.SIG_IGN]
        assert noted == numbers[:-1]  # a shell's background job ignores SIGINT, and is to stop; nohup is meant
        assert all(signal.getsignal(number) == signal.SIG_IGN for number in numbers)
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def test_a_run_that_is_stopped_before_its_next_step_is_at_its_last_one(desk: Desk) -> None:
    def plant() -> None:
        train.restore = lambda *_: signal.raise_signal(signal.SIGTERM)

    before = desk.run("early again", 1, "--job.stop_after=2")
    run = desk.run("early again", 1, "--job.stop_after=4", plant=plant, ends=128 + signal.SIGTERM)
    assert (run.status["state"], run.status["by"], run.status["step"]) == ("stopped", "SIGTERM", 2)
    assert "stopped by SIGTERM before step 3\n" in run.output
    assert run.rows == before.rows
    assert desk.run("early again", 1, "--job.stop_after=4").status["step"] == 4


@pytest.mark.parametrize("in_steps", [False, True])
def test_a_signal_to_a_forked_process_is_its_own(in_steps: bool, capfd: pytest.CaptureFixture[str]) -> None:
    """A pool of a model file, say, ends its workers by SIGTERM: neither they nor this process take it for a stop."""
    said: list[str] = []
    with stop.StopSignals(True, last_words=lambda: said.append("stopped")) as signals:
        stop._TAKEN_UP_S, before = 0.2, stop._TAKEN_UP_S
        if in_steps:
            signals.begin_steps()
        child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,))
        child.start()
        child.terminate()
        child.join(300)
        time.sleep(0.5)  # the watcher would have ended this process
        stop._TAKEN_UP_S = before
    assert child.exitcode == -signal.SIGTERM
    assert signals.received is None
    assert not said
    assert "saving and stopping" not in capfd.readouterr().err


SHELL = ("--no-python", "sh", "-c", '"$0" "$@"; true', sys.executable)


@pytest.mark.parametrize("between", [(), *slow((SHELL,))])
def test_ranks_whose_torchrun_is_killed_save_and_stop(desk: Desk, tmp_path: Path, between: tuple[str, ...]) -> None:
    """Also with a shell between, which nobody kills. Of several ranks, all stop when one does: below."""
    name = f"killed agent {len(between)}"
    argv, folder = desk.flags(name, "--training.steps=100000"), desk.folder / "runs" / name
    launcher = torchrun(
        ["--standalone", "--nproc-per-node=1", *between], str(REPOSITORY / "train.py"), argv, tmp_path / "log"
    )
    try:
        wait_for_step(folder, 3)
    finally:
        launcher.kill()
        launcher.wait(300)
    ended, deadline = Ended(folder, ""), time.monotonic() + 300
    while ended.status["state"] == "running":
        assert time.monotonic() < deadline
        time.sleep(0.05)
    last, by = ended.status["step"], "the end of its launcher (job.stop_with_launcher)"
    assert (ended.status["state"], ended.status["by"]) == ("stopped", by)
    assert ended.checkpoints() == [last]
    assert [row["step"] for row in ended.rows] == list(range(1, last + 1))
    assert f"stopped by {by} after step {last}" in (folder / "logs" / "rank0.log").read_text()


@pytest.mark.parametrize(
    ("key", "world", "is_ended"), [("true", 2, True), *slow(("false", 2, False)), ("true", 1, False)]
)
def test_ranks_end_with_their_launcher_and_a_process_alone_or_told_to_outlives_it(
    desk: Desk, key: str, world: int, is_ended: bool
) -> None:
    """Rank 0, which another stops, says why though it has not looked itself yet."""

    def plant() -> None:
        rank = int(os.environ.get("RANK", "0"))
        at_step(3, lambda: setattr(os, "getppid", lambda: 1), rank)()
        stop._LOOK_S = 1000 if is_ended and rank == 0 else 0.01
        take = loop.train_step
        loop.train_step = lambda *args, **more: (time.sleep(0.1), take(*args, **more))[1]

    flags = (f"--job.stop_with_launcher={key}", f"--training.steps={100_000 if is_ended else 8}")
    run = desk.run(f"left behind {key} {world}", world, *flags, plant=plant)
    assert run.status["state"] == ("stopped" if is_ended else "finished")
    assert run.status.get("by") == (stop._LAUNCHER_GONE if is_ended else None)
