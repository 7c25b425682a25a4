"""The process that talks to Weights & Biases: it follows metrics.jsonl, so that training waits for nothing of wandb's.

Run by path, with what to do as one line of JSON on standard input; the next line is the exit code of training, and the
end of the input without one says that training was killed. What is to be told goes to the file descriptor that the
argument names, one JSON object a line: `{"started": mode}`, `{"taken": rows}`, `{"online_failed": why}` or `{"failed":
[what, why]}`.

wandb is told as little as needed: the config (which has no key for a secret), the rows, and the machine's load. Not the
command line, the environment, the git remote (which may hold a token), the source or the installed packages.
"""

import json
import os
import select
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import IO, TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import wandb

_LOOK_S = 0.5  # how often for new rows


def main() -> None:
    """Start or go on with a run, send rows until training ends, finish."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, lambda *_: None)  # rows come until training ends; wandb's service has handlers of its own
    told = os.fdopen(0, "rb", buffering=0, closefd=False)  # unbuffered: `select` must see what is not read yet
    reports = int(sys.argv[1])

    def say(**what: object) -> None:
        with suppress(BrokenPipeError):  # of a process that was killed
            os.write(reports, json.dumps(what).encode() + b"\n")

    work = json.loads(told.readline())
    Thread(target=_end_after, args=(work["trainer"], work["end_s"]), daemon=True).start()
    doing = "start"
    try:
        with Path(work["metrics"]).open("rb") as rows:  # now: a run that is resumed puts another file in its place
            rows.seek(work["from"])
            run = _start_or_offline(work, say)
            doing = "log"
            exit_code = _follow(run, rows, told, work["trainer"], say)
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


def _start_or_offline(work: dict[str, Any], say: Any) -> "wandb.Run":
    """Start wandb in the mode asked for; offline if the server cannot be reached."""
    mode, online_failed = work["mode"], None
    if mode == "online":
        try:
            run = _start(work, "online")
        except Exception as error:
            mode, online_failed = "offline", _first_line(error)
    if mode == "offline":
        run = _start(work, "offline")
    say(started=mode, online_failed=online_failed)
    return run


def _start(work: dict[str, Any], mode: Literal["online", "offline"]) -> "wandb.Run":
    """Start wandb in one mode, saying nothing and sending only what we log."""
    import wandb

    # A failed attempt leaves its id "in use" in wandb's service process, and a silent setting holds only from here.
    wandb.teardown()
    wandb.setup(wandb.Settings(silent=True))
    run = wandb.init(
        project=work["project"],
        group=work["group"] or None,
        name=work["name"],
        id=work["id"],
        resume="allow" if mode == "online" else None,
        mode=mode,
        dir=work["folder"],
        config=work["config"],
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
        ),
    )
    run.define_metric("step")
    run.define_metric("tokens")
    run.define_metric("*", step_metric="tokens")
    return run


def _follow(run: "wandb.Run", rows: IO[bytes], told: IO[bytes], trainer: int, say: Any) -> int:
    """Send each row that is added to the file, until training says how it ended or is gone; return its exit code."""
    taken, half = 0, b""
    while True:
        ended = bool(select.select([told], [], [], _LOOK_S)[0])
        gone = os.getppid() != trainer  # though another process may still hold its end of the pipe
        before = taken
        while line := rows.readline():
            half += line
            if half.endswith(b"\n"):
                run.log({key: value for key, value in json.loads(half).items() if value is not None})
                taken, half = taken + 1, b""
        if taken > before:
            say(taken=taken)
        if ended or gone:
            return int(told.readline() or 1) if ended else 1


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


if __name__ == "__main__":
    main()
