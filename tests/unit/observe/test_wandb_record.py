"""The run in Weights & Biases is the recorded one, whatever happened on the way: against a server on loopback."""

import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.needs import slow
from tests.support.wandb_server import Server
from titanlite.comparison.runs import RunRecord
from titanlite.comparison.wandb_runs import rows_of_lines
from titanlite.comparison.wandb_verdicts import send_verdicts
from titanlite.observe.metrics import RunError, read_metrics
from titanlite.observe.wandb_process import _follow, _open_lines

START = """
import os, signal, sys, time
from pathlib import Path
from titanlite.config.schema import Config, Data, Job, Metrics
from titanlite.observe import wandb as module
from titanlite.observe.metrics import MetricsFile
folder, mode, first, last, loss, end, log_freq, *limits, password = sys.argv[1:]
folder, first, last = Path(folder), int(first), int(last)
module._INIT_TIMEOUT_S, module._FINISH_TIMEOUT_S = map(float, limits)
module._END_S = {"offline": 100.0, "online": 100.0}
shown = Metrics(wandb="offline" if mode == "off" else mode, wandb_group="sweep", wandb_project="proj")
config = Config(job=Job(name="mine"), data=Data(source="https://me:urlsecret@host/text.jsonl"), metrics=shown)
path = folder / "metrics.jsonl"
metrics = MetricsFile(path, first - 1)
facts = dict(facts={"world_size": 2}, tags=["found by"])
run = module.WandbRun(config, folder, path, print, **facts) if mode != "off" else None
def write(row):
    metrics.write(row)
    if run:
        run.write(row)
def until(is_done):
    while not is_done() and not run._failed:
        time.sleep(0.05)
        run._hear(None)
for step in range(first, last + 1):
    if step % int(log_freq) == 0:
        write({"step": step, "loss": float(loss), "tokens": 1000 * step, "mfu": float("nan"), "seconds": 1.0})
    if step % 3 == 0:
        write({"step": step, "tokens": 1000 * step, "validation_loss": float(loss) + 0.5})
    if step == first and run:  # what follows is of a run that has started
        until(lambda: run._started and run._taken)
        print("started", flush=True)
        sys.stdin.readline()
assert "wandb" not in sys.modules
if run and end == "finish":
    run.close()
elif run:
    until(lambda: run._taken >= run._rows)
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
        self.environment = server.environment(folder)
        self.of_starts: dict[str, str] = {}

    @property
    def run(self) -> str:
        """Its id."""
        return (self.folder / "wandb/run_id").read_text().strip()

    def start(
        self,
        mode: str,
        first: int,
        last: int,
        end: str = "finish",
        log_freq: int = 1,
        outage: bool = False,
        down: bool = False,
    ) -> str:
        """Train from a step to a step, in a process of its own; with an outage, from the first row on."""
        self.starts += 1
        self.server.up = not down and self.server.up
        given = [str(self.folder), mode, str(first), str(last), str(self.starts), end, str(log_freq)]
        given += ["100" if self.server.up else "5", "2" if outage else "100"]  # no limit is met but in an outage
        process = subprocess.Popen(
            [sys.executable, "-c", START, *given, "--password=argvsecret"],
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
        """Run `wandb sync` on these; on all if none is given."""
        self.server.sync(self.folder.parent, *(folders or self.folders()))

    def recorded(self) -> list[dict[str, Any]]:
        """The rows of metrics.jsonl."""
        return read_metrics(self.folder / "metrics.jsonl")

    def check(self, is_emptied: bool = False) -> None:
        """Hold the server's run against the record."""
        assert list(self.server.sent) == [self.run]
        lines = self.server.lines(self.run, is_emptied)
        assert rows_of_lines(lines) == self.recorded()
        assert [line["_step"] for line in lines] == list(range(len(lines)))  # of those that are empty, too


@pytest.fixture
def history(tmp_path: Path) -> Iterator[History]:
    with Server() as server:
        yield History(tmp_path, server)
        server.shutdown()


SECRETS = ("deadbeef" * 5, "hf_verysecrettoken", "argvsecret", "remotesecret", "urlsecret")


def test_offline_for_real_and_again_after_a_resume(history: History) -> None:
    who = "-c user.name=me -c user.email=me@example.com"
    for command in ("init", "remote add origin https://remotesecret/x.git", f"{who} commit --allow-empty -m x"):
        subprocess.run(["git", *command.split()], cwd=history.folder.parent, check=True, capture_output=True)
    history.of_starts["HF_TOKEN"] = SECRETS[1]
    assert history.start("offline", 1, 6) == "started\n"
    run, between = history.run, time.time()
    (history.folder / "experts.jsonl").write_text('{"step": 7, "tokens": 7000, "experts": {"layers.0": [3, 1]}}\n')
    sample = {"step": 7, "tokens": 7000, "samples": [{"prompt": "a", "text": f"b {SECRETS[1]}"}]}
    (history.folder / "samples.jsonl").write_text(json.dumps(sample) + "\n")
    assert history.start("offline", 4, 7) == "started\n"  # resumed from step 3
    (history.folder / "samples.jsonl").unlink()  # written by this test with its secret

    (folder,) = history.folders()  # the newest start's, which has all
    for path in (path for path in history.folder.rglob("*") if path.is_file()):
        for secret in SECRETS:
            assert secret.encode() not in path.read_bytes(), f"{secret} in {path}"
        assert path.suffix not in (".patch", ".py"), path
        assert path.name != "requirements.txt"
        assert path.suffix != ".wandb" or sys.executable.encode() not in path.read_bytes()
    history.sync()
    history.check()
    assert history.run == run
    said, config = history.server.said[run], json.loads(history.server.said[run]["config"])
    assert (said["project"], said["groupName"], said["displayName"], said["tags"]) == (
        "proj", "sweep", "mine", ["found by"],
    )  # fmt: skip
    assert (config["optimizer"]["value"]["lr"], config["world_size"]["value"]) == (0.0003, 2)
    axes = {metric.get("1") or metric["2"]: metric for metric in config["_wandb"]["value"]["m"]}
    assert [2 in axes[name]["6"] for name in ("step", "tokens", "*")] == [True, True, False]  # hidden: no panels
    assert history.server.exits == {run: 0}
    lines = history.server.lines(run)
    assert ["tokens" in line for line in lines] == [True] * 4 + [False] * 4 + [True] * 5  # empty where rows were lost
    rows = [line for line in lines if "tokens" in line]
    assert "perf/mfu" not in rows[0]
    assert [int(row["step"]) for row in rows if "train/loss" in row] == [1, 2, 3, 4, 5, 6, 7]
    times = [float(row["_timestamp"]) for row in rows]
    assert times[3] < between < times[4]  # a row that is sent again keeps its time
    (picture,) = folder.glob("files/media/images/experts/heat_map_*.png")
    assert picture.stat().st_size > 0
    (table,) = folder.glob("files/media/html/samples*.html")
    assert "<td>7</td><td>a</td><td>b ***</td>" in table.read_text()


CRASH, AT_ONCE, HOST_OFF = "killed after 3", "killed after 0", "killed with all"
SYNC, UP, WAIT = "sync", "up", "wait"
NO_SERVER = [("online", 1, 5, {"down": True, "end": AT_ONCE}), UP, ("online", 4, 6)]
# What is done to a run: starts (mode, first and last step, and how), `wandb sync` of all folders, a server that is up
# again.
SCENES: dict[str, list[Any]] = {
    "starts without wandb, and other rows": [
        ("online", 1, 7, {"end": AT_ONCE}), ("off", 3, 9, {"log_freq": 2}), ("off", 7, 8),
        ("online", 9, 10, {"log_freq": 5}),
    ],
    "crashes one after the other": [  # the first when it has sent lines
        ("online", 1, 7, {"end": CRASH}), ("offline", 5, 8, {"end": HOST_OFF}), ("online", 3, 4, {"end": HOST_OFF}),
        ("online", 4, 9),
    ],
    "offline, and each synced": [("offline", 1, 3), SYNC, ("offline", 4, 6), SYNC],
    # What a process sends in its end comes before what the next start sends.
    "a crash whose lost steps are not reached again": [("online", 1, 5, {"end": AT_ONCE}), ("online", 3, 3)],
    "offline, and a crash": [("offline", 1, 5, {"end": AT_ONCE}), WAIT, SYNC, ("offline", 3, 4), SYNC],
    "no answer at the start": [None, *NO_SERVER],
    "an error at the start": [500, *NO_SERVER],
    "no answer in mid-run": [None, ("online", 1, 5, {"outage": True}), UP, ("online", 6, 7)],
    "an error in mid-run": [500, ("online", 1, 3), ("online", 4, 7, {"outage": True}), UP, SYNC],
    "a fresh start offline": [("offline", 1, 5), SYNC, ("offline", 1, 3), SYNC, ("online", 4, 4)],
}  # fmt: skip


# `test_a_copy_of_an_earlier_folder_may_be_synced_last` syncs two starts offline, and `test_a_run_is_read_back_from_the_
# server` goes on online.
@pytest.mark.parametrize("scene", ["starts without wandb, and other rows", *slow(*list(SCENES)[1:])])
def test_each_step_stands_once_with_its_last_value(history: History, scene: str) -> None:
    history.of_starts["WANDB_RESUME"] = "allow"  # of a user for whom that once helped
    for act in SCENES[scene]:
        if act == SYNC:
            history.sync()
        elif act == UP:
            history.server.up = True
        elif act == WAIT:
            with (history.folder / "wandb/lines").open() as lines:
                fcntl.flock(lines, fcntl.LOCK_EX)  # until its process has ended, too
        elif act in (None, 500):
            history.server.outage = act
        else:
            mode, first, last, *how = act
            said = history.start(mode, first, last, **dict(*how))
            if not history.server.up and first == 1:
                assert re.search("wandb: (online failed .*; recording offline|cannot finish .Timed out)", said)
                assert len(history.recorded()) == 6
    history.check()
    history.check(is_emptied=True)


def test_a_run_that_is_killed_is_recorded_to_its_last_row_and_has_failed(history: History) -> None:
    history.start("online", 1, 40, end="killed after 0")
    by = time.monotonic() + 300
    while history.run not in history.server.exits:
        assert time.monotonic() < by
        time.sleep(0.1)
    history.check()
    assert len(history.recorded()) == 53
    assert history.server.exits[history.run] == 1


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
    ("said", "kept", "times", "lost"),
    [
        ("", 0, [], 0),
        ("1.5\n2.5\n", 2, [1.5, 2.5], 0),
        ("1.5\n2.5\n3.5\n", 1, [1.5], 2),
        ("1.5\n\n\n4.5\n5.5\n", 2, [1.5, 4.5], 3),
        ("1.5\n2.5\n\n", 0, [], 3),
        ("1.5\n2.5\n3.", 2, [1.5, 2.5], 0),  # cut off, and so not sent
        ("1.5\n\0\0\0\n\xff\xfe\n4.5\n", 2, [1.5, 4.5], 2),  # damaged by a power cut: empty lines
    ],
)
def test_lines_of_rows_that_are_lost_become_empty(
    tmp_path: Path, said: str, kept: int, times: list[float], lost: int
) -> None:
    path = tmp_path / "lines"
    path.write_text(said, encoding="latin-1")
    for _ in range(2):  # what a start adds changes nothing for the next
        file, *found = _open_lines(path, kept)
        os.write(file, b"9.5\n")
        os.close(file)
        assert path.read_text().endswith("\n9.5\n" if kept + lost else "9.5\n")
        path.write_text(path.read_text().removesuffix("9.5\n"))
        assert found == [times, lost]


def test_rows_of_starts_without_wandb_get_the_time_of_this_one(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    path.write_text("1.5\n\n")
    file, times, lost = _open_lines(path, 2)
    os.close(file)
    assert (times[0], lost) == (1.5, 0)
    assert times[1] > 1.5


def test_a_start_waits_for_the_process_of_an_earlier_one(tmp_path: Path) -> None:
    file, *_ = _open_lines(tmp_path / "lines", 0)
    waiting = threading.Thread(target=lambda: os.close(_open_lines(tmp_path / "lines", 0)[0]))
    waiting.start()
    waiting.join(0.3)
    assert waiting.is_alive()
    os.close(file)
    waiting.join(300)
    assert not waiting.is_alive()


def test_rows_are_those_of_the_file_that_was_there_at_the_start(tmp_path: Path) -> None:
    class Run:
        dir = str(tmp_path)
        save = staticmethod(lambda *_, **__: None)

        @staticmethod
        def log(row: dict[str, float]) -> None:
            sent.append(row["train/loss"])

    def text(*losses: float) -> str:
        return "".join(json.dumps({"step": step, "loss": loss}) + "\n" for step, loss in enumerate(losses, 1))

    sent: list[float] = []
    path, commands = tmp_path / "metrics.jsonl", tmp_path / "commands"
    path.write_text(text(1.5, 2.5, 3.5))
    commands.write_text("0\n")
    work = {"trainer": os.getppid(), "kept_bytes": len(text(1.5)), "folder": str(tmp_path), "config_toml": ""}
    with path.open("rb") as rows, commands.open("rb", buffering=0) as said, (tmp_path / "lines").open("wb") as lines:
        (tmp_path / "new").write_text(text(1.25, 2.125, 3.0625, 4.03125))  # the next start's, which trains again
        (tmp_path / "new").replace(path)
        assert _follow(Run(), rows, lines.fileno(), said, work, lambda **_: None) == 0  # type: ignore[arg-type]
    assert sent == [2.5, 3.5]


@pytest.mark.slow
def test_a_run_of_which_it_is_not_known_what_was_sent_gets_an_id_of_its_own(history: History) -> None:
    history.start("online", 1, 3)
    (history.folder / "wandb/lines").unlink()
    history.start("online", 3, 3)
    former, run = history.server.sent
    assert history.run == run != former
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
    history.start("online", 4, 6)  # which keeps receipt and config beside the rows
    history.check()
    history.check(is_emptied=True)
    assert json.loads(history.server.files["receipt.json"]) == [entry]
    (history.folder / "config.toml").write_bytes(history.server.files["config.toml"])
    path = f"me/proj/{history.run}"

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
    history.server.sent["12345678"] = [(0, ['{"loss": 1.0, "_step": 0}'])]
    code, _, said = compare("me/proj/12345678")
    assert code == 1
    assert "want: a run of titanlite's" in said
    del history.server.sent["12345678"]

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
    for run, group in ((own, "sweep"), ("of-group", "sweep"), ("other", "another")):
        history.server.said.setdefault(run, {"config": "{}"})["groupName"] = group
    code, out, _ = compare(path, "--wandb", command=("-m", "titanlite", "compare"))
    assert code == 1, out  # both ended at step 6 of 10,000
    assert out.count("wandb: me/proj/of-group has the verdict\n") == 1
    assert "me/proj/other" not in out
    (run, text) = history.server.summaries[-1]
    assert (run, text["compare/verdict"], text["compare/with"]) == ("of-group", f"{own}: {verdict}", "run")


def test_verdicts_are_for_runs_that_wandb_has(tmp_path: Path) -> None:
    record = RunRecord("run", [], {}, "", None, path=tmp_path)
    with pytest.raises(RunError, match="a run that wandb has"):
        send_verdicts([record], [], tmp_path / "compare.png")


def test_lines_that_are_empty_are_no_rows() -> None:
    lines = [{"_step": 0}, {"step": 1, "tokens": 5, "train/loss": 2.0, "_null": ["mfu"], "_step": 1}]
    assert rows_of_lines(lines) == [{"step": 1, "tokens": 5, "loss": 2.0, "mfu": None}]
