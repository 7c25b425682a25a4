"""Tokenize sources in a background process, while the run that started it trains on the tokens written so far.

A run starts one background process per host, with a thread for each source: tokenizers release Python's lock. The
process writes the same folders as `titanlite prepare`, under the same lock. While another process holds the lock, the
background process waits, and it continues the work if the other one ends early. It pauses when it is too far ahead of
training. It ends when the run ends, for whatever reason: its standard input is a pipe from the run.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import NoReturn

from titanlite.config.schema import Data
from titanlite.data.cache import POLL_SECONDS, maker_failed, say_failed
from titanlite.data.corpus import Corpus
from titanlite.data.prepare import make, plan_preparation
from titanlite.data.progress import Progress
from titanlite.errors import TitanliteError
from titanlite.streams import guard_streams

_PROGRAM = "from titanlite.data.background import prepare_for_run; sys.exit(prepare_for_run())"
_END_SECONDS = 5.0  # time to end after standard input is closed; then the process is killed


class BackgroundPreparation:
    """The process that tokenizes the sources of a run."""

    def __init__(self, corpora: Mapping[str, Corpus], data: Data, vocab_size: int) -> None:
        asked = {
            "data": asdict(data),
            "vocab_size": vocab_size,
            "sources": [[key, corpus.source, str(corpus.folder), corpus.terms] for key, corpus in corpora.items()],
        }
        start = f"import sys; sys.path.append({str(Path(__file__).parents[2])!r})"
        # A new session keeps Ctrl-C and the signals of a launcher from this process: the run handles them.
        self._process = subprocess.Popen(
            [sys.executable, "-c", f"{start}; {_PROGRAM}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
            env=os.environ | {"TOKENIZERS_PARALLELISM": "true"},
        )
        assert self._process.stdin is not None  # noqa: S101
        self._process.stdin.write(json.dumps(asked).encode() + b"\n")
        self._process.stdin.flush()
        for corpus in corpora.values():  # wait until each folder exists or is being made
            while not corpus.folder.exists():
                said = maker_failed(corpus.folder, corpus.terms)
                if said is None or self._process.poll() is not None:
                    break
                time.sleep(POLL_SECONDS)

    def close(self) -> None:
        """End the process. The next start of the run continues from the tokens on disk."""
        assert self._process.stdin is not None  # noqa: S101
        self._process.stdin.close()
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def open_growing(source: str, data: Data, vocab_size: int, key: str) -> Corpus:
    """Open the shards of a source, even if they are incomplete. Token files are first prepared completely."""
    planned = plan_preparation(source, data, vocab_size, key)
    if planned.tokenizer is None or source.startswith("memory://"):  # no other process can read memory://
        make(planned, Progress(f"reading {source}", enable=False))
    return Corpus(planned.folder, planned, grows=not planned.folder.exists())


def prepare_for_run() -> int:
    """Tokenize the sources that the first line of standard input lists; return 0 when all of them are complete.

    The process exits with 0 as soon as standard input is closed. If a source cannot be used, the process writes the
    reason into the lock file of the source's folder and exits with 2.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the run handles it: it saves a checkpoint, then closes the pipe
    guard_streams()
    with open(0, "rb", buffering=0, closefd=False) as pipe:
        asked = json.loads(pipe.readline())
    data, threads = Data(**asked["data"]), list[threading.Thread]()

    def tokenize(key: str, source: str, folder: str, terms: str) -> None:
        try:
            planned = plan_preparation(source, data, asked["vocab_size"], key)
            if planned.folder != Path(folder):
                raise planned.source.refused(", whose files changed meanwhile", "files that do not change", "run again")
            progress = Progress(f"preparing {source}", enable=True, is_quiet=True)
            make(planned, progress, data.prepare_lead or None)
        except BaseException as error:
            _end_for(error, Path(folder), terms)

    def end_with_the_run() -> None:
        while os.read(0, 1):
            pass
        os._exit(0)

    threading.Thread(target=end_with_the_run, daemon=True).start()
    for source in asked["sources"]:
        threads.append(threading.Thread(target=tokenize, args=source))
        threads[-1].start()
    for thread in threads:
        thread.join()
    return 0


def _end_for(error: BaseException, folder: Path, terms: str) -> NoReturn:
    """Write `error` into the lock file of `folder`, which waiting processes read, and end this process with code 2."""
    said = f"{error}"
    if not isinstance(error, TitanliteError):
        traceback.print_exc()
        said = f"the process that tokenizes failed: {type(error).__name__}: {error}"
    try:
        say_failed(folder, terms, said)
    except OSError:  # the lock file cannot be written
        sys.stderr.write(f"{said}\n")
    os._exit(2)
