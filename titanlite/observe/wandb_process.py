"""Send a run to Weights & Biases from a separate process that reads metrics.jsonl: training never waits for wandb.

The first line of standard input is the task, as JSON. The next line is the exit code of training; if the input ends
without it, training was killed. The process reports to standard output, with one JSON object per line:
`{"started": mode}`, `{"taken": rows}`, `{"online_failed": why}` or `{"failed": [what, why]}`.

The run in wandb has each row of metrics.jsonl exactly once, even if rows were recorded offline, lost or sent twice. The
server keeps a run's rows as numbered lines, and a line that is sent again replaces the old one. So every start sends
all rows from line 0 on. One local folder of wandb then holds the complete run. Older folders are removed, because
`wandb sync` would send their outdated lines. If more lines were sent before, of rows that a crash lost, empty lines
replace the surplus. The file `lines` has the time at which each row was sent, and an empty line for each empty line. A
time is on disk before its row is sent.

wandb gets no more than its page needs: the config (without its secrets), the receipt, a chosen save-list, the rows, a
heat map of a mixture's experts and the samples at the end, and the load of the machine. It does not get the command
line, the environment, the git remote (which may hold a token), the source or the installed packages.

Numbers have the names in `metric_table.py`. wandb has no null: `_null` lists the keys of numbers that were not finite,
so that the row can be restored.
"""

import fcntl
import json
import os
import select
import shutil
import signal
import time
from contextlib import suppress
from html import escape
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Thread
from typing import IO, TYPE_CHECKING, Any, Literal

from titanlite.observe.metric_table import AXES, shown_name
from titanlite.redact import redact
from titanlite.streams import escaped

if TYPE_CHECKING:
    import wandb

_FILES = ("receipt.json", "activation_checkpoint.toml")  # files of the run's folder, sent beside config.toml
_LOOK_S = 0.5  # between checks for new rows and changed files


def main() -> None:
    """Start or continue the run in wandb, send rows until training ends, and finish the run."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, lambda *_: None)  # go on until training ends; wandb's service does not inherit handlers
    commands = os.fdopen(0, "rb", buffering=0, closefd=False)  # unbuffered, so that `select` sees all unread input
    reports = os.dup(1)
    os.dup2(2, 1)  # prints of wandb go to stderr, not among the reports

    def say(**what: object) -> None:
        with suppress(BrokenPipeError):  # the training process was killed
            os.write(reports, json.dumps(what).encode() + b"\n")

    work = json.loads(commands.readline())
    Thread(target=_end_after, args=(work["trainer"], work["end_s"]), daemon=True).start()
    doing = "start"
    try:
        rows = os.fdopen(os.open(work["metrics"], os.O_RDONLY), "rb")  # opened once: a restart replaces the file
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
        _show_files(run, Path(work["folder"]), say)
        doing = "finish"
        run.finish(exit_code=exit_code)
        import wandb

        wandb.teardown()
    except BaseException as error:  # also SystemExit, which wandb raises
        say(failed=[doing, _first_line(error)])
        os._exit(1)  # skips wandb's exit hooks, which wait for its service


def _end_after(trainer: int, seconds: float) -> None:
    """End this process `seconds` after the end of the process `trainer`, even if wandb is still waiting."""
    while os.getppid() == trainer:
        time.sleep(_LOOK_S)
    time.sleep(seconds)
    os._exit(1)


def _open_lines(path: Path, kept: int) -> tuple[int, list[float], int]:
    """Open the file `lines`; return its descriptor, the send times of the `kept` first rows, and the number of empty
    lines that follow them.
    """
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    with suppress(OSError):  # the file system may lack locks
        fcntl.flock(file, fcntl.LOCK_EX)  # wait for an earlier start's process, which may still send rows
    marks = [_sent_at(line) for line in path.read_bytes().split(b"\n")[:-1]]  # an incomplete line's row was not sent
    times = [mark for mark in marks if mark is not None][:kept]
    times += [time.time()] * (kept - len(times))  # rows of starts without wandb: the present time
    lost = max(0, len(marks) - kept)
    text = "".join(f"{mark}\n" for mark in [*times, *[""] * lost])
    os.pwrite(file, text.encode(), 0)  # overwritten in place: never has fewer lines
    os.ftruncate(file, os.lseek(file, len(text), os.SEEK_SET))
    os.fsync(file)
    return file, times, lost


def _sent_at(line: bytes) -> float | None:
    """Return the send time in a line of `lines`; None if the line is empty or damaged, which also counts as sent."""
    try:
        return float(line)
    except ValueError:
        return None


def _row(line: bytes, sent_at: float) -> dict[str, Any]:
    """Return the row to send for a line of metrics.jsonl: names with sections, no null values, and its send time."""
    given = json.loads(line)
    row = {shown_name(key): value for key, value in given.items() if value is not None}
    null = [key for key, value in given.items() if value is None]
    return row | ({"_null": null} if null else {}) | {"_timestamp": sent_at}


def _remove_older(run: "wandb.Run", work: dict[str, Any]) -> None:
    """Remove wandb's folders of earlier starts and of a failed online attempt: this start's folder has all rows."""
    for folder in Path(work["folder"], "wandb").glob(f"*run-*-{work['id']}"):
        if not Path(run.dir).is_relative_to(folder):
            shutil.rmtree(folder, ignore_errors=True)


def _start_or_offline(work: dict[str, Any], say: Any) -> "wandb.Run":
    """Start wandb in the configured mode, or offline if the server cannot be reached. `say` reports the mode."""
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
    """Start wandb in the given mode. It prints nothing, and collects nothing by itself but the machine's load."""
    import wandb

    # A failed attempt leaves its id "in use" in wandb's service until a teardown. The setting `silent` must follow it.
    wandb.teardown()
    for name in ("WANDB_RESUME", "WANDB_RESUME_FROM", "WANDB_FORK_FROM"):  # with these it would not begin at line 0
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
            login_timeout=1.0,  # do not ask for a key: nobody can answer
            finish_timeout=work["finish_timeout_s"],
            finish_timeout_raises=True,
        ),
    )
    for axis in AXES:
        run.define_metric(axis, hidden=True)
    run.define_metric("*", step_metric="tokens")
    return run


def _follow(run: "wandb.Run", rows: IO[bytes], lines: int, commands: IO[bytes], work: dict[str, Any], say: Any) -> int:
    """Send each row that is added to the file until training ends. Return training's exit code; 1 if it was killed."""
    at, taken, files = work["kept_bytes"], 0, dict[str, tuple[int, int]]()
    while True:
        ended = bool(select.select([commands], [], [], _LOOK_S)[0])
        gone = os.getppid() != work["trainer"]  # another process may still hold the pipe open
        rows.seek(at)
        found = rows.read()
        if new := found[: found.rfind(b"\n") + 1].splitlines(keepends=True):  # complete lines
            now = time.time()
            os.write(lines, f"{now}\n".encode() * len(new))
            os.fsync(lines)  # on disk before the rows are sent, in case of a power cut
            for row in new:
                run.log(_row(row, now))
            at, taken = at + sum(map(len, new)), taken + len(new)
            say(taken=taken)
        _send_files(run, work, files)
        if ended or gone:
            return int(commands.readline() or 1) if ended else 1


def _send_files(run: "wandb.Run", work: dict[str, Any], sent: dict[str, tuple[int, int]]) -> None:
    """Send the config once, and each of the run's files when it changes. `sent`: (mtime in ns, size) by name."""
    own = Path(run.dir)
    if not sent:
        (own / "config.toml").write_text(work["config_toml"], encoding="utf-8")
        run.save(str(own / "config.toml"), base_path=run.dir, policy="now")
        sent["config.toml"] = 0, 0
    for name in _FILES:
        with suppress(OSError):  # not written yet
            found = os.stat(Path(work["folder"], name))
            if sent.get(name) != (mark := (found.st_mtime_ns, found.st_size)):
                shutil.copyfile(Path(work["folder"], name), own / name)
                run.save(str(own / name), base_path=run.dir, policy="now")
                sent[name] = mark


def _show_files(run: "wandb.Run", folder: Path, say: Any) -> None:
    """Send the experts' heat map and the samples in the run's summary, where they take no line of the history."""
    import wandb

    def rows(name: str) -> list[dict[str, Any]]:
        path = folder / name
        return [json.loads(line) for line in path.read_text().split("\n")[:-1]] if path.is_file() else []

    def show_experts() -> None:
        from titanlite.observe.heat_map import draw_heat_map

        if experts := rows("experts.jsonl"):
            with TemporaryDirectory() as drawn:
                draw_heat_map({run.name or "": experts}, Path(drawn, "experts.png"))
                run.summary["experts/heat_map"] = wandb.Image(str(Path(drawn, "experts.png")))

    def show_samples() -> None:
        if samples := rows("samples.jsonl"):
            cells = [[str(row["step"]), *sample.values()] for row in samples for sample in row["samples"]]
            table = ["".join(f"<td>{escape(escaped(redact(cell)))}</td>" for cell in each) for each in cells]
            html = "<table><tr><th>step<th>prompt<th>text</tr>" + "".join(f"<tr>{row}</tr>" for row in table)
            run.summary["samples"] = wandb.Html(f"{html}</table>", inject=False)  # a `Table` would be an artifact

    for what, show in (("experts", show_experts), ("samples", show_samples)):
        try:
            show()
        except Exception as error:  # must not keep the run from being finished
            say(failed=[f"show the {what}", _first_line(error)])


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
