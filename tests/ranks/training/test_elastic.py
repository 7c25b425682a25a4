"""What only torchrun can show: two agents as on two hosts, a killed worker, a log that ends with the culprit."""

from pathlib import Path

import pytest

from tests.support.launched import REPOSITORY, Desk, Ended, free_port, torchrun

TRAIN = str(REPOSITORY / "train.py")

# A run in which rank 1 alone fails in step 3, or in its 13th is killed, or its host is lost with all processes, or its
# launcher is told to stop, as the first argument says.
BROKEN = """
import os
import signal
import sys

import train
from titanlite.errors import DataError
from titanlite.exit_code import exit_code, leave
from titanlite.training import loop

kind = sys.argv.pop(1)
take, now = loop.train_step, [0]

def broken(*args, **more):
    now[0] += 1
    if os.environ["RANK"] == "1":
        if now[0] == 13:  # later than all steps of who resumes from step 10
            if kind in ("lost", "stop"):
                os.kill(os.getppid(), signal.SIGKILL if kind == "lost" else signal.SIGTERM)
            if kind in ("lost", "killed"):
                os.kill(os.getpid(), signal.SIGKILL)
        if kind in ("bug", "input") and now[0] == 3:
            raise {"bug": ZeroDivisionError, "input": DataError}[kind]("planted on rank 1")
    return take(*args, **more)

loop.train_step = broken
leave(exit_code(train.main))
"""


def two_hosts(desk: Desk, folder: Path, kind: str, name: str, restarts: int) -> tuple[list[int], list[str]]:
    """Run a launcher for each of two hosts, to their ends; return their exit codes and what they printed."""
    script, logs = folder / "broken.py", [folder / f"{kind}-first", folder / f"{kind}-second"]
    script.write_text(BROKEN)
    meet = ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port()}", "--rdzv-id=hosts"]
    launcher = ["--nnodes=2", "--nproc-per-node=1", f"--max-restarts={restarts}", *meet]
    agents = [
        torchrun(launcher, str(script), [kind, *desk.flags(name, "--checkpoint.interval=10")], log) for log in logs
    ]
    try:
        return [agent.wait(300) for agent in agents], [log.read_text() for log in logs]
    finally:
        for agent in agents:
            agent.kill()


@pytest.mark.slow
def test_two_hosts_survive_a_killed_worker(desk: Desk, tmp_path: Path) -> None:
    undisturbed = desk.run("no hosts", 2, "--checkpoint.interval=10")
    codes, said = two_hosts(desk, tmp_path, "killed", "hosts", restarts=1)
    assert codes == [0, 0], "\n".join(said)
    run = Ended(desk.folder / "runs" / "hosts", "\n".join(said))
    assert run.status["state"] == "finished"
    assert run.trained() == undisturbed.trained()  # every step once
    assert run.content(20) == undisturbed.content(20)
    # Each host says what concerns it; steps are said once.
    lines = run.output.splitlines()
    resumed = [line for line in lines if "resumed from step" in line]
    assert len(resumed) == 2, run.output
    assert len([line for line in resumed if line.startswith("[rank 1] ")]) == 1
    assert {int(line.split()[-1]) for line in resumed} == {10}
    assert sum(line.startswith("step 20/20") for line in lines) == 1


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["lost", "stop"])
def test_two_hosts_resume(desk: Desk, tmp_path: Path, kind: str) -> None:
    """Neither waits for a host that is lost; a host that is told to stop takes the other with it, and saves first."""
    undisturbed = desk.run(f"{kind}, undisturbed", 2, "--checkpoint.interval=10")
    codes, said = two_hosts(desk, tmp_path, kind, kind, restarts=0)
    assert 0 not in codes, "\n".join(said)
    run = Ended(desk.folder / "runs" / kind, "\n".join(said))
    if kind == "stop":
        assert run.status["state"] == "stopped", run.output
    step = 10 if kind == "lost" else run.status["step"]  # a stop comes in any step from the 13th on
    codes, said = two_hosts(desk, tmp_path, "again", kind, restarts=0)
    assert codes == [0, 0], "\n".join(said)
    assert f"resumed from step {step}" in "\n".join(said)
    assert run.trained() == undisturbed.trained()
    assert run.content(20) == undisturbed.content(20)


@pytest.mark.slow  # what torchrun reads of a rank is held by tests/cli/test_exit_code.py
@pytest.mark.parametrize("kind", ["input", "bug"])
def test_the_log_ends_with_the_rank_that_failed_first(desk: Desk, tmp_path: Path, kind: str) -> None:
    script, log = tmp_path / "broken.py", tmp_path / "log"
    script.write_text(BROKEN)
    run = torchrun(["--standalone", "--nproc-per-node=2"], str(script), [kind, *desk.flags(kind)], log)
    try:
        assert run.wait(300) == 1
    finally:
        run.kill()
    said = log.read_text()
    _, _, cause = said.rpartition("Root Cause")
    assert "rank      : 1" in cause, said
    assert f"exitcode  : {2 if kind == 'input' else 1}" in cause
    assert "planted on rank 1" in cause
    status = Ended(desk.folder / "runs" / kind, said).status
    assert (status["state"], status["error"]["rank"]) == ("failed", 1)
    assert status["step"] == 1  # of two that were made: a step is reported while the next one runs
    assert status["error"]["message"] == "planted on rank 1"
    if kind == "input":
        assert said.count("\n[rank 1] planted on rank 1") == 1
