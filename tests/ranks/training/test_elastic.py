"""What only torchrun can show: two agents as on two hosts, a killed worker, a log that ends with the culprit."""

from pathlib import Path

import pytest

from tests.support.launched import REPOSITORY, Desk, Ended, free_port, torchrun

TRAIN = str(REPOSITORY / "train.py")

# A run in which rank 1 alone fails in step 3, or is killed in its 13th, as the first argument says.
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
        if kind == "killed" and now[0] == 13:  # later than all steps of who resumes from step 10
            os.kill(os.getpid(), signal.SIGKILL)
        if kind != "killed" and now[0] == 3:
            raise {"bug": ZeroDivisionError, "input": DataError}[kind]("planted on rank 1")
    return take(*args, **more)

loop.train_step = broken
leave(exit_code(train.main))
"""


@pytest.mark.slow
def test_two_hosts_survive_a_killed_worker(desk: Desk, tmp_path: Path) -> None:
    script, logs = tmp_path / "broken.py", [tmp_path / "first", tmp_path / "second"]
    script.write_text(BROKEN)
    hosts = ["killed", *desk.flags("hosts", "--checkpoint.interval=5")]
    meet = ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port()}", "--rdzv-id=hosts"]
    launcher = ["--nnodes=2", "--nproc-per-node=1", "--max-restarts=1", *meet]
    agents = [torchrun(launcher, str(script), hosts, log) for log in logs]
    try:
        undisturbed = desk.run("no hosts", 2, "--checkpoint.interval=5")
        codes = [agent.wait(300) for agent in agents]
    finally:
        for agent in agents:
            agent.kill()
    said = [log.read_text() for log in logs]
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
