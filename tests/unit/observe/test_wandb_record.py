"""The run in Weights & Biases is the recorded one, whatever happened on the way: against a server on loopback."""

import fcntl
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.needs import slow
from tests.support.wandb_server import Server
from titanlite.comparison.runs import RunRecord
from titanlite.comparison.wandb_runs import read_offline, rows_of_lines
from titanlite.comparison.wandb_verdicts import send_verdicts
from titanlite.config.schema import Config, Job, Metrics
from titanlite.config.write import to_toml
from titanlite.observe.metrics import RunError, read_metrics
from titanlite.observe.wandb_process import _open_lines

ROOT = Path(__file__).parents[3]
START = """
import os, signal, sys, time
from pathlib import Path
from titanlite.comparison.wandb_verdicts import send_verdicts
from titanlite.config.schema import Config, Job, Metrics
from titanlite.observe import wandb as module
from titanlite.observe.metrics import MetricsFile
folder, mode, first, last, loss, end, log_freq, *limits = sys.argv[1:]
folder, first, last = Path(folder), int(first), int(last)
module._INIT_TIMEOUT_S, module._FINISH_TIMEOUT_S = map(float, limits)
module._END_S = {"offline": 100.0, "online": 100.0}
config = Config(job=Job(name="mine"), metrics=Metrics(wandb="offline" if mode == "off" else mode))
metrics = MetricsFile(folder / "metrics.jsonl", first - 1)
run = module.WandbRun(config, folder, folder / "metrics.jsonl", print) if mode != "off" else None
def write(row):
    metrics.write(row)
    if run:
        run.write(row)
for step in range(first, last + 1):
    if step % int(log_freq) == 0:
        write({"step": step, "loss": float(loss), "tokens": 1000 * step, "mfu": float("nan"), "seconds": 1.0})
    if step % 3 == 0:
        write({"step": step, "tokens": 1000 * step, "validation_loss": float(loss) + 0.5})
    if step == first and run:  # what follows is of a run that has started
        while not (run._started and run._taken) and not run._failed:
            time.sleep(0.05)
            run._hear(None)
        print("started", flush=True)
        sys.stdin.readline()
if run and end == "finish":
    run.finish()
elif run:
    while run._taken < run._rows:
        time.sleep(0.05)
        run._hear(None)
    if end == "killed with all":  # as a host that is switched off
        os.killpg(run._process.pid, signal.SIGKILL)
    else:
        time.sleep(float(end.removeprefix("killed after ")))
    os._exit(9)
"""


class History:
    """What happens to one run's folder, act by act."""

    def __init__(self, folder: Path, server: Server) -> None:
        self.folder, self.server, self.starts = folder / "run", server, 0
        clean = {key: value for key, value in os.environ.items() if not key.startswith("WANDB_")}
        own = {"WANDB_BASE_URL": server.url, "WANDB_API_KEY": "deadbeef" * 5, "HOME": str(folder)}
        self.environment = {**clean, **own, "PYTHONPATH": str(ROOT)}
        self.of_starts: dict[str, str] = {}

    def start(
        self, mode: str, first: int, last: int, end: str = "finish", log_freq: int = 1, outage: bool = False
    ) -> str:
        """Train from a step to a step, in a process of its own; with an outage, from the first row on."""
        self.starts += 1
        given = [str(self.folder), mode, str(first), str(last), str(self.starts), end, str(log_freq)]
        given += ["100" if self.server.up else "5", "2" if outage else "100"]  # no limit is met but in an outage
        process = subprocess.Popen(
            [sys.executable, "-c", START, *given],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env=self.environment | self.of_starts, cwd=self.folder.parent,
        )  # fmt: skip
        assert process.stdin is not None
        assert process.stdout is not None
        said = ""
        while mode != "off" and "started" not in said:
            line = process.stdout.readline()
            assert line, said
            said += line
        self.server.up = not outage and self.server.up
        said += process.communicate("\n", timeout=300)[0]
        assert process.returncode == (0 if end == "finish" else 9)
        return said

    def folders(self) -> list[Path]:
        """Those of wandb's, the oldest first."""
        return sorted(self.folder.glob("wandb/*run-*-*"), key=lambda path: path.name.removeprefix("offline-"))

    def sync(self, *folders: Path) -> None:
        """Run `wandb sync` on these, one after the other; on all if none is given."""
        each = map(str, folders or self.folders())
        done = subprocess.run(
            [sys.executable, "-m", "wandb", "sync", "--yes", "--include-synced", "--include-online", *each],
            env=self.environment, capture_output=True, text=True, check=False, timeout=300,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr

    def recorded(self) -> list[dict[str, Any]]:
        """The rows of metrics.jsonl."""
        return read_metrics(self.folder / "metrics.jsonl")

    def check(self, is_emptied: bool = False) -> None:
        """Hold the server's run against the record."""
        run = (self.folder / "wandb/run_id").read_text().strip()
        assert list(self.server.sent) == [run]
        lines = self.server.lines(run, is_emptied)
        assert rows_of_lines(lines) == self.recorded()
        assert [line["_step"] for line in lines] == list(range(len(lines)))  # of those that are empty, too


@pytest.fixture
def history(tmp_path: Path) -> Iterator[History]:
    with Server() as server:
        yield History(tmp_path, server)
        server.shutdown()


def offline_and_both_synced(run: History) -> None:
    run.start("offline", 1, 3)
    run.start("offline", 4, 6)
    run.sync()


def offline_and_each_synced(run: History) -> None:
    run.of_starts["WANDB_RESUME"] = "allow"  # of a user for whom that once helped
    run.start("offline", 1, 3)
    run.sync()
    run.start("offline", 4, 6)
    run.sync()


def online_and_resumed(run: History) -> None:
    run.start("online", 1, 3)
    run.start("online", 4, 6)


def online_and_a_crash(run: History) -> None:
    run.start("online", 1, 5, end="killed after 3")
    run.start("online", 4, 8)


def online_and_a_crash_whose_lost_steps_are_not_reached_again(run: History) -> None:
    run.start("online", 1, 5, end="killed after 0")  # what it sends in its end comes before what the next start sends
    run.start("online", 3, 3)


def offline_and_a_crash(run: History) -> None:
    run.start("offline", 1, 5, end="killed after 0")
    with (run.folder / "wandb/lines").open() as lines:
        fcntl.flock(lines, fcntl.LOCK_EX)  # until its process has ended, too
    run.sync()
    run.start("offline", 3, 4)
    run.sync()


def online_then_offline_then_online(run: History) -> None:
    run.start("online", 1, 3)
    run.start("offline", 4, 6)
    run.sync()
    run.start("online", 7, 8)


def an_outage_at_the_start(run: History) -> None:
    run.server.up = False
    assert "recording offline" in run.start("online", 1, 5, end="killed after 0")
    assert len(run.recorded()) == 6
    run.server.up = True
    run.start("online", 4, 6)


def no_answer_at_the_start(run: History) -> None:
    run.server.outage = None
    an_outage_at_the_start(run)


def an_error_at_the_start(run: History) -> None:
    run.server.outage = 500
    an_outage_at_the_start(run)


def no_answer_in_mid_run(run: History) -> None:
    run.server.outage = None
    an_outage_in_mid_run_and_a_resume(run)


def an_error_in_mid_run(run: History) -> None:
    run.server.outage = 500
    an_outage_in_mid_run_and_a_sync(run)


def an_outage_in_mid_run_and_a_resume(run: History) -> None:
    assert "cannot finish (Timed out" in run.start("online", 1, 5, outage=True)
    assert len(run.recorded()) == 6
    (folder,) = run.folders()
    assert read_offline(folder) == run.recorded()
    run.server.up = True
    run.start("online", 6, 7)


def an_outage_in_mid_run_and_a_sync(run: History) -> None:
    run.start("online", 1, 3)
    run.start("online", 4, 7, outage=True)
    run.server.up = True
    run.sync()


def a_fresh_start_online(run: History) -> None:
    run.start("online", 1, 5)
    run.start("online", 1, 3)


def a_fresh_start_offline(run: History) -> None:
    run.start("offline", 1, 5)
    run.sync()
    run.start("offline", 1, 3)
    run.sync()
    run.start("online", 4, 4)


def crashes_one_after_the_other(run: History) -> None:
    run.start("online", 1, 7, end="killed after 3")  # when it has sent lines
    run.start("offline", 5, 8, end="killed with all")
    run.start("online", 3, 4, end="killed with all")
    run.start("online", 4, 9)


def starts_without_wandb_and_other_rows(run: History) -> None:
    run.start("online", 1, 7, end="killed after 0")
    run.start("off", 3, 9, log_freq=2)
    run.start("off", 7, 8)
    run.start("online", 9, 10, log_freq=5)


HISTORIES: list[Callable[[History], None]] = [starts_without_wandb_and_other_rows]
# `test_a_copy_of_an_earlier_folder_may_be_synced_last` syncs two starts offline, and `test_a_run_is_read_back_from_the_
# server` goes on online.
_MORE = slow(
    crashes_one_after_the_other,
    no_answer_at_the_start,
    no_answer_in_mid_run,
    a_fresh_start_offline,
    online_and_a_crash,
    offline_and_both_synced,
    online_and_resumed,
    online_then_offline_then_online,
    an_outage_at_the_start,
    an_error_at_the_start,
    an_error_in_mid_run,
    offline_and_each_synced,
    online_and_a_crash_whose_lost_steps_are_not_reached_again,
    offline_and_a_crash,
    an_outage_in_mid_run_and_a_sync,
    an_outage_in_mid_run_and_a_resume,
    a_fresh_start_online,
)


@pytest.mark.parametrize("acts", [*HISTORIES, *_MORE], ids=lambda acts: acts.__name__)
def test_each_step_stands_once_with_its_last_value(history: History, acts: Callable[[History], None]) -> None:
    acts(history)
    history.check()
    history.check(is_emptied=True)


@pytest.mark.slow
def test_a_copy_of_an_earlier_folder_may_be_synced_last(history: History) -> None:
    """Where the server keeps lines: they are the same."""
    history.start("offline", 1, 3)
    (earlier,) = history.folders()
    copy = shutil.copytree(earlier, history.folder.parent / "copies" / earlier.name)
    history.start("offline", 4, 6)
    history.sync()
    history.sync(copy)
    history.check()


@pytest.mark.parametrize(
    ("said", "kept", "marks"),
    [
        ("", 0, []),
        ("1.5\n2.5\n", 2, [1.5, 2.5]),
        ("1.5\n2.5\n3.5\n", 1, [1.5, None, None]),
        ("1.5\n2.5\n3.5\nkeep 1\n4.5\n5.5\n", 2, [1.5, None, None, 4.5, None]),
        ("1.5\n2.5\nkeep 1\n3.5\n", 0, [None, None, None]),
        ("1.5\n2.5\n3.", 2, [1.5, 2.5]),  # cut off, and so not sent
        ("1.5\n\0\0\nkeep x\n4.5\n", 2, [1.5, None, None, 4.5]),
    ],
)
def test_lines_of_rows_that_are_lost_become_empty(
    tmp_path: Path, said: str, kept: int, marks: list[float | None]
) -> None:
    path = tmp_path / "lines"
    path.write_text(said)
    for _ in range(2):  # what a start adds changes nothing for the next
        file, found = _open_lines(path, kept)
        os.close(file)
        assert found == marks


def test_rows_of_starts_without_wandb_get_lines_of_their_own(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    path.write_text("1.5\nkeep 0\n")
    file, (lost, *new) = _open_lines(path, 2)
    os.close(file)
    assert lost is None
    assert len(new) == 2
    assert all(sent_at and sent_at > 1.5 for sent_at in new)


def test_a_start_waits_for_the_process_of_an_earlier_one(tmp_path: Path) -> None:
    file, _ = _open_lines(tmp_path / "lines", 0)
    waiting = threading.Thread(target=lambda: os.close(_open_lines(tmp_path / "lines", 0)[0]))
    waiting.start()
    waiting.join(0.3)
    assert waiting.is_alive()
    os.close(file)
    waiting.join(300)
    assert not waiting.is_alive()


@pytest.mark.slow
def test_a_run_of_which_it_is_not_known_what_was_sent_gets_an_id_of_its_own(history: History) -> None:
    history.start("online", 1, 3)
    (history.folder / "wandb/lines").unlink()
    history.start("online", 3, 3)
    former, run = history.server.sent
    assert (history.folder / "wandb/run_id").read_text().strip() == run != former
    assert len(history.server.lines(run)) == len(history.recorded()) == 4


COMPARE = """
import json, sys
from pathlib import Path
from titanlite.comparison.runs import read_runs
own, shown = read_runs([Path(word) for word in sys.argv[1:]])
print(json.dumps([own.rows == shown.rows, own.config == shown.config, own.receipt == shown.receipt, shown.state]))
"""


@pytest.mark.slow
def test_a_run_is_read_back_from_the_server(history: History) -> None:
    history.start("online", 1, 3)
    entry = {"feature": "compile", "requested": True, "applied": 3, "count": 3, "skipped": []}
    (history.folder / "receipt.json").write_text(json.dumps([entry]))
    (history.folder / "config.toml").write_text(to_toml(Config(job=Job(name="mine"), metrics=Metrics(wandb="online"))))
    history.start("online", 4, 6)  # which keeps receipt and config beside the rows
    history.check()
    history.check(is_emptied=True)
    assert json.loads(history.server.files["receipt.json"]) == [entry]
    path = f"me/proj/{(history.folder / 'wandb/run_id').read_text().strip()}"

    def compare(*words: str, command: tuple[str, ...] = ("-c", COMPARE)) -> tuple[int, str, str]:
        done = subprocess.run(
            [sys.executable, *command, str(history.folder), *words],
            env=history.environment, cwd=history.folder.parent, capture_output=True, text=True, check=False,
        )  # fmt: skip
        return done.returncode, done.stdout, done.stderr

    assert compare(path) == (0, '[true, true, true, "stopped"]\n', "")
    code, _, said = compare("me/proj/01234567")
    assert code == 1
    assert "me/proj/01234567 = Could not find run" in said
    assert "there is no such folder here" in said

    (history.folder / "config.toml").write_text(to_toml(Config(metrics=Metrics(wandb="online", wandb_project="proj"))))
    code, out, _ = compare(path, "--wandb", command=("-m", "titanlite", "compare"))
    assert code == 1, out  # both ended at step 6 of 10,000
    own, ended = path.rpartition("/")[2], "ended at step 6 of 10,000"
    verdict = f"equal bits in the 6 steps that both have (run {ended}; {own} {ended})"
    assert out.startswith(f"{own}: {verdict}\n")
    assert out.count(f"wandb: {path} has the verdict\n") == 1
    lines = [(run, text["compare/verdict"], text["compare/with"]) for run, text in history.server.summaries]
    assert lines == [(own, "the first of 2 runs", "run"), (own, verdict, "run")]
    assert history.server.files["compare.png"] == (history.folder.parent / "compare.png").read_bytes()

    history.server.sent |= {"of-group": [], "other": []}
    history.server.groups |= {own: "sweep", "of-group": "sweep", "other": "another"}
    code, out, _ = compare(path, "--wandb", command=("-m", "titanlite", "compare"))
    assert code == 1, out  # both ended at step 6 of 10,000
    assert out.count("wandb: me/proj/of-group has the verdict\n") == 1
    assert "me/proj/other" not in out
    (run, text) = history.server.summaries[-1]
    assert (run, text["compare/verdict"], text["compare/with"]) == ("of-group", f"{own}: {verdict}", "run")


def test_verdicts_are_for_runs_that_wandb_has(tmp_path: Path) -> None:
    record = RunRecord(name="run", rows=[], config={}, state="", receipt=None)
    with pytest.raises(RunError, match="a run that wandb has"):
        send_verdicts([(tmp_path, record)], [], tmp_path / "compare.png")
