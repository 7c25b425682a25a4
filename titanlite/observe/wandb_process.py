"""Talk to Weights & Biases in a process that follows metrics.jsonl, so that training waits for nothing of wandb's.

What to do comes as one line of JSON on standard input; the next line is the exit code of training, and the end of the
input without one says that training was killed. What it reports goes to standard output, one JSON object a line:
`{"started": mode}`, `{"taken": rows}`, `{"online_failed": why}` or `{"failed": [what, why]}`.

The run in wandb is the recorded one: each row of metrics.jsonl once, whatever was offline, lost or sent twice. The
server keeps a run's rows as numbered lines, and a line that is sent again replaces what was there. So every start sends
the whole file from line 0 on, and one folder of wandb's holds all of the run; older ones are removed, for somebody may
sync them later. After these rows come empty lines, as many as were ever sent beyond them: rows that a crash lost, whose
steps are trained again. `lines` has the time of each row that was sent, and nothing for an empty line; what is added to
it is on disk before it is sent.

wandb is given as little as needed: the config (without its secrets), the receipt and a chosen save-list, the rows, at
the end a mixture's heat map, and the machine's load. Not the command line, the environment, the git remote (which may
hold a token), the source or the installed packages.

A row's numbers have the names of `metric_table.py`. wandb has no null: the keys of numbers that were not finite are in
the row's `_null`, so that the row can be read back as it was.
"""

import fcntl
import json
import os
import select
import shutil
import signal
import time
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Thread
from typing import IO, TYPE_CHECKING, Any, Literal

from titanlite.observe.metric_table import AXES, shown_name

if TYPE_CHECKING:
    import wandb

_FILES = ("receipt.json", "activation_checkpoint.toml")  # of the run's folder, which wandb keeps beside its config.toml
_LOOK_S = 0.5  # how often for new rows, and for files that have changed


def main() -> None:
    """Start or go on with a run, send rows until training ends, finish."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, lambda *_: None)  # rows come until training ends; wandb's service has handlers of its own
    commands = os.fdopen(0, "rb", buffering=0, closefd=False)  # unbuffered: `select` must see what is not read yet
    reports = os.dup(1)
    os.dup2(2, 1)  # what wandb prints is no report

    def say(**what: object) -> None:
        with suppress(BrokenPipeError):  # of a process that was killed
            os.write(reports, json.dumps(what).encode() + b"\n")

    work = json.loads(commands.readline())
    Thread(target=_end_after, args=(work["trainer"], work["end_s"]), daemon=True).start()
    doing = "start"
    try:
        rows = os.fdopen(os.open(work["metrics"], os.O_RDONLY), "rb")  # once: the next start writes another file there
        kept = rows.read(work["kept_bytes"]).splitlines()
        lines, times, lost = _open_lines(Path(work["folder"], "wandb/lines"), len(kept))
        run = _start_or_offline(work, say)
        doing = "log"
        for row, sent_at in zip(kept, times, strict=True):
            run.log(_row(row, sent_at))
        for _ in range(lost):
            run.log({})
        _remove_older(run, work)
        exit_code = _follow(run, rows, lines, commands, work, say)
        _show_experts(run, Path(work["folder"], "experts.jsonl"), say)
        doing = "finish"
        run.finish(exit_code=exit_code)
        import wandb

        wandb.teardown()
    except BaseException as error:  # wandb's own exits, too
        say(failed=[doing, _first_line(error)])
        os._exit(1)  # not by way of wandb's hooks, which wait for its service


def _end_after(trainer: int, seconds: float) -> None:
    """End this process some time after training was killed, whatever wandb waits for."""
    while os.getppid() == trainer:
        time.sleep(_LOOK_S)
    time.sleep(seconds)
    os._exit(1)


def _open_lines(path: Path, kept: int) -> tuple[int, list[float], int]:
    """Open the file of lines; return it, when each kept row was sent, and how many empty lines follow these."""
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    with suppress(OSError):  # a file system without locks
        fcntl.flock(file, fcntl.LOCK_EX)  # the process of an earlier start may still be sending what is lost by now
    marks = [_sent_at(line) for line in path.read_bytes().split(b"\n")[:-1]]  # a line that was cut off was not sent
    times = [mark for mark in marks if mark is not None][:kept]
    times += [time.time()] * (kept - len(times))  # of starts without wandb
    lost = max(0, len(marks) - kept)
    text = "".join(f"{mark}\n" for mark in [*times, *[""] * lost])
    os.pwrite(file, text.encode(), 0)  # no fewer lines at any instant
    os.ftruncate(file, os.lseek(file, len(text), os.SEEK_SET))
    os.fsync(file)
    return file, times, lost


def _sent_at(line: bytes) -> float | None:
    """Return when a row was sent; None for an empty line, and for one that is damaged: it was sent all the same."""
    try:
        return float(line)
    except ValueError:
        return None


def _row(line: bytes, sent_at: float) -> dict[str, Any]:
    """Make the row that wandb gets: names in groups, no null values, and the time when it was sent."""
    given = json.loads(line)
    row = {shown_name(key): value for key, value in given.items() if value is not None}
    null = [key for key, value in given.items() if value is None]
    return row | ({"_null": null} if null else {}) | {"_timestamp": sent_at}


def _remove_older(run: "wandb.Run", work: dict[str, Any]) -> None:
    """Remove what wandb wrote at earlier starts, and in an attempt to get online: this start's has all of it."""
    for folder in Path(work["folder"], "wandb").glob(f"*run-*-{work['id']}"):
        if not Path(run.dir).is_relative_to(folder):
            shutil.rmtree(folder, ignore_errors=True)


def _start_or_offline(work: dict[str, Any], say: Any) -> "wandb.Run":
    """Start wandb in the mode asked for; offline if the server cannot be reached."""
    mode, online_failed = work["config"]["metrics"]["wandb"], None
    try:
        run = _start(work, mode)
    except Exception as error:
        if mode == "offline":
            raise
        mode, online_failed = "offline", _first_line(error)
        run = _start(work, mode)
    say(started=mode, online_failed=online_failed)
    return run


def _start(work: dict[str, Any], mode: Literal["online", "offline"]) -> "wandb.Run":
    """Start wandb in one mode, saying nothing and sending only what we log."""
    import wandb

    # A failed attempt leaves its id "in use" in wandb's service process, and a silent setting holds only from here.
    wandb.teardown()
    for name in ("WANDB_RESUME", "WANDB_RESUME_FROM", "WANDB_FORK_FROM"):  # it would begin at another line than 0
        os.environ.pop(name, None)
    wandb.setup(wandb.Settings(silent=True))
    asked = work["config"]["metrics"]
    run = wandb.init(
        project=asked["wandb_project"],
        group=asked["wandb_group"] or None,
        name=work["config"]["job"]["name"],
        id=work["id"],
        mode=mode,
        dir=work["folder"],
        config=work["config"],
        tags=work["tags"],
        settings=wandb.Settings(
            silent=True,
            console="off",
            disable_git=True,
            disable_code=True,
            save_code=False,
            disable_job_creation=True,
            x_save_requirements=False,
            x_disable_meta=True,
            x_stats_pid=work["trainer"],
            program="",
            init_timeout=work["init_timeout_s"],
            login_timeout=1.0,  # there is nobody to ask for a key
            finish_timeout=work["finish_timeout_s"],
            finish_timeout_raises=True,
        ),
    )
    for axis in AXES:
        run.define_metric(axis, hidden=True)
    run.define_metric("*", step_metric="tokens")
    return run


def _follow(run: "wandb.Run", rows: IO[bytes], lines: int, commands: IO[bytes], work: dict[str, Any], say: Any) -> int:
    """Send each row that is added to the file, until training says how it ended or is gone; return its exit code."""
    at, taken, files = work["kept_bytes"], 0, dict[str, tuple[int, int]]()
    while True:
        ended = bool(select.select([commands], [], [], _LOOK_S)[0])
        gone = os.getppid() != work["trainer"]  # though another process may still hold its end of the pipe
        rows.seek(at)
        found = rows.read()
        if new := found[: found.rfind(b"\n") + 1].splitlines(keepends=True):  # whole lines
            now = time.time()
            os.write(lines, f"{now}\n".encode() * len(new))
            os.fsync(lines)  # what is sent next is not to be forgotten in a power cut
            for row in new:
                run.log(_row(row, now))
            at, taken = at + sum(map(len, new)), taken + len(new)
            say(taken=taken)
        _send_files(run, work, files)
        if ended or gone:
            return int(commands.readline() or 1) if ended else 1


def _send_files(run: "wandb.Run", work: dict[str, Any], sent: dict[str, tuple[int, int]]) -> None:
    """Give wandb the config, and the run's files that have changed: the receipt is written at the first step."""
    own = Path(run.dir)
    if not sent:
        (own / "config.toml").write_text(work["config_toml"], encoding="utf-8")
        run.save(str(own / "config.toml"), base_path=run.dir, policy="now")
        sent["config.toml"] = 0, 0
    for name in _FILES:
        with suppress(OSError):  # not there yet
            found = os.stat(Path(work["folder"], name))
            if sent.get(name) != (mark := (found.st_mtime_ns, found.st_size)):
                shutil.copyfile(Path(work["folder"], name), own / name)
                run.save(str(own / name), base_path=run.dir, policy="now")
                sent[name] = mark


def _show_experts(run: "wandb.Run", path: Path, say: Any) -> None:
    """Give wandb the heat map of a mixture's experts in the run's summary, which takes none of its lines."""
    if not path.is_file():
        return
    try:
        import wandb

        from titanlite.observe.heat_map import draw_heat_map

        rows = [json.loads(line) for line in path.read_text().split("\n")[:-1]]
        with TemporaryDirectory() as folder:
            if rows:
                draw_heat_map({run.name or "": rows}, Path(folder, "experts.png"))
                run.summary["experts/heat_map"] = wandb.Image(str(Path(folder, "experts.png")))
    except Exception as error:  # no reason not to finish
        say(failed=["draw the experts", _first_line(error)])


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
