"""A corpus is read while a process of its own makes it: what is read is what comes of it, and a failure is told."""

import errno
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.support.prepared import prepare_here
from titanlite.config.schema import Data
from titanlite.data.background import BackgroundPreparation, open_growing
from titanlite.data.cache import unfinished_of
from titanlite.data.corpus import Corpus
from titanlite.data.prepare import make, plan_preparation, prepare
from titanlite.data.progress import Progress
from titanlite.data.samples import Samples
from titanlite.data.shard_writer import read_made, read_wanted, want, wanted_of
from titanlite.errors import DataError

KEY = "data.source"


def write_records(path: Path, n: int, characters: int = 100_000) -> str:
    """Write records of text, all of them different."""
    with path.open("w") as file:
        for i in range(n):
            file.write(json.dumps({"text": f"{i} " * (characters // len(f"{i} "))}) + "\n")
    return str(path)


def open_data(source: str, cache: Path, **more: object) -> tuple[Corpus, Data]:
    data = replace(Data(source, cache_dir=str(cache), shuffle_window=1000, prepare="background"), **more)
    shards = open_growing(source, data, 256, KEY)
    assert not shards.is_whole
    return shards, data


@pytest.fixture
def started() -> Iterator[list[BackgroundPreparation]]:
    processes: list[BackgroundPreparation] = []
    yield processes
    for process in processes:
        with suppress(ProcessLookupError):  # that has ended
            os.kill(process._process.pid, signal.SIGCONT)
        process.close()


def start(shards: Corpus, data: Data, started: list[BackgroundPreparation]) -> BackgroundPreparation:
    started.append(BackgroundPreparation({KEY: shards}, data, 256))
    return started[-1]


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_what_is_read_meanwhile_is_what_comes_of_it(tmp_path: Path, started: list[BackgroundPreparation]) -> None:
    """Training asks for little at a time, and the process stays near it."""
    source = write_records(tmp_path / "a.jsonl", 400)
    whole = prepare_here(tmp_path / "first", source)
    shards, data = open_data(source, tmp_path / "cache", prepare_lead=1_000_000)
    start(shards, data, started)
    step, most = 500_000, 0
    for at in range(0, whole.tokens - step, step):
        known = shards.wait(at + step)
        assert np.array_equal(shards.read(at, step), whole.read(at, step))
        if known is None:
            most = max(most, shards.tokens - at)
    assert shards.wait(10**12) == whole.tokens
    assert most < step + 1_000_000 + 2 * (1 << 22)  # what was asked for, the lead, and what is encoded at once
    assert shards.is_whole
    assert files(shards.folder) == files(whole.folder)
    assert sorted(path.suffix for path in (tmp_path / "cache").iterdir() if path.is_file()) == [".lock"]
    assert open_growing(source, data, 256, KEY).is_whole  # a later run finds it


def test_who_is_killed_is_told_of_and_the_next_goes_on(
    tmp_path: Path, started: list[BackgroundPreparation], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("titanlite.data.corpus._ALONE_SECONDS", 1.0)
    source = write_records(tmp_path / "a.jsonl", 300)
    whole = prepare_here(tmp_path / "first", source)
    shards, data = open_data(source, tmp_path / "cache", prepare_lead=5_000_000)
    process = start(shards, data, started)
    shards.wait(1_000_000)
    os.kill(process._process.pid, signal.SIGKILL)
    with pytest.raises(DataError, match=r"ended without a word, killed perhaps(.|\n)*goes on from [1-9][\d,]* tokens"):
        shards.wait(10**12)
    before = shards.tokens
    again, data = open_data(source, tmp_path / "cache", prepare_lead=0)
    again.poll()
    assert again.tokens == before > 0  # at once, before anybody works
    start(again, data, started)
    assert again.wait(10**12) == whole.tokens
    assert files(again.folder) == files(whole.folder)


def test_another_run_reads_the_same_and_goes_on_where_the_first_ends(
    tmp_path: Path, started: list[BackgroundPreparation]
) -> None:
    source = write_records(tmp_path / "a.jsonl", 300)
    first, data = open_data(source, tmp_path / "cache", prepare_lead=5_000_000)
    one = start(first, data, started)
    first.wait(1_000_000)
    second, data = open_data(source, tmp_path / "cache", prepare_lead=5_000_000)
    start(second, data, started)
    second.wait(12_000_000)  # further than the first run allows: both are heard
    one.close()
    started.remove(one)
    assert second.wait(10**12) is not None
    assert second.is_whole


def test_what_is_wrong_with_a_record_reaches_who_waits(tmp_path: Path, started: list[BackgroundPreparation]) -> None:
    source = write_records(tmp_path / "a.jsonl", 200)
    with open(source, "a") as file:
        file.write("no JSON\n")
    shards, data = open_data(source, tmp_path / "cache")
    start(shards, data, started)
    with pytest.raises(DataError, match=r"1 bad record so far:\n.*a\.jsonl:201: not JSON"):
        shards.wait(10**12)
    # A run that allows it goes on.
    more, data = open_data(source, tmp_path / "cache", max_bad_records=1)
    start(more, data, started)
    whole = prepare_here(tmp_path / "first", source, max_bad_records=1)
    assert more.wait(10**12) == whole.tokens
    assert files(more.folder) == files(whole.folder)


def fail_in_the_child(monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    """Run some code in the process that tokenizes before it begins."""
    popen = subprocess.Popen
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[3]))

    def changed(command: list[str], **more: object) -> "subprocess.Popen[bytes]":
        return popen([sys.executable, "-c", f"import sys\n{code}\n{command[2]}"], **more)  # type: ignore[call-overload]

    monkeypatch.setattr(subprocess, "Popen", changed)


FULL = """
import resource, signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # so that a write fails, as on a disk that is full
resource.setrlimit(resource.RLIMIT_FSIZE, (60_000_000, 60_000_000))
from titanlite.data import prepare
prepare.PUBLISH_SECONDS = -1.0
"""


def test_a_full_disk_is_told_of_and_loses_nothing(
    tmp_path: Path, started: list[BackgroundPreparation], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_records(tmp_path / "a.jsonl", 400)
    whole = prepare_here(tmp_path / "first", source)
    shards, data = open_data(source, tmp_path / "cache")
    with monkeypatch.context() as patch:
        fail_in_the_child(patch, FULL)
        start(shards, data, started)
    with pytest.raises(DataError, match=r"data\.cache_dir = .*File too large(.|\n)*local disk"):
        shards.wait(10**12)
    again, data = open_data(source, tmp_path / "cache")
    made = read_made(unfinished_of(again.folder))
    assert made is not None
    assert 0 < made.all_tokens <= 30_000_000
    start(again, data, started)
    assert again.wait(10**12) == whole.tokens
    assert files(again.folder) == files(whole.folder)
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY


def test_it_ends_with_the_run_however_that_ends(tmp_path: Path) -> None:
    source = write_records(tmp_path / "a.jsonl", 300)
    script = """
import sys, time
from tests.unit.data.test_background import *
shards, data = open_data(sys.argv[1], Path(sys.argv[2]), prepare_lead=1)
print(BackgroundPreparation({KEY: shards}, data, 256)._process.pid, flush=True)
time.sleep(600)
"""
    run = subprocess.Popen(
        [sys.executable, "-c", script, source, str(tmp_path / "cache")],
        cwd=Path(__file__).parents[3],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert run.stdout is not None
    pid = int(run.stdout.readline())
    run.kill()
    run.communicate()
    for _ in range(100):
        if not Path(f"/proc/{pid}").exists() or "Z" in Path(f"/proc/{pid}/stat").read_text().split()[2]:
            return
        time.sleep(0.1)
    raise AssertionError("it still works")


def test_who_waits_is_let_go(tmp_path: Path, started: list[BackgroundPreparation]) -> None:
    source = write_records(tmp_path / "a.jsonl", 300)
    shards, data = open_data(source, tmp_path / "cache", prepare_lead=1)
    os.kill(start(shards, data, started)._process.pid, signal.SIGSTOP)
    threading.Timer(0.5, shards.close).start()
    with pytest.raises(DataError, match="closed while token"):
        shards.wait(10**12)


def test_a_block_of_a_full_shard_is_held_against_its_hash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("titanlite.data.shard_writer._SHARD_TOKENS", 100_000)
    monkeypatch.setattr("titanlite.data.prepare.PUBLISH_SECONDS", -1.0)
    source = write_records(tmp_path / "a.jsonl", 100)
    shards, data = open_data(source, tmp_path / "cache")
    go_on, is_there = threading.Event(), threading.Event()

    def pause(unfinished: Path) -> int:
        if (unfinished / "shard-00003.json").exists():
            is_there.set()
            go_on.wait(60)
        return 10**12

    monkeypatch.setattr("titanlite.data.prepare.read_wanted", pause)
    planned = plan_preparation(source, data, 256, KEY)
    thread = threading.Thread(target=make, args=(planned, Progress("", enable=False), 0))
    thread.start()
    assert is_there.wait(60)
    text = shards.read(150_000, 200_000)
    assert len(text) == 200_000
    path = unfinished_of(shards.folder) / "shard-00000.bin"
    content = path.read_bytes()
    path.write_bytes(content[:1000] + b"?" + content[1001:])
    with pytest.raises(DataError, match=r"shard-00000\.bin has changed: bytes 0 to 200000 are"):
        shards.read(10, 10)
    path.write_bytes(content)
    said = path.with_name("shard-00002.json")
    content = said.read_bytes()
    said.write_bytes(content.replace(b"100000", b"900000"))
    again, _ = open_data(source, tmp_path / "cache")
    assert np.array_equal(again.read(0, 200_000)[150_000:], text[:50_000])
    with pytest.raises(DataError, match=r"shard-00002\.json, which is damaged: another content(.|\n)*fix:  delete"):
        again.read(150_000, 200_000)
    said.write_bytes(content)
    assert np.array_equal(again.read(150_000, 200_000), text)
    go_on.set()
    thread.join()
    assert np.array_equal(shards.read(150_000, 200_000), text)


PLAN_FAILS = """
from titanlite.data import background
from titanlite.errors import DataError
plan = background.plan_preparation
def fails(source, data, vocab_size, key):
    if source.endswith("b.jsonl"):
        raise DataError("the server is away")
    return plan(source, data, vocab_size, key)
background.plan_preparation = fails
"""


@pytest.mark.parametrize(
    ("error", "said"),
    [
        ("DataError", "the server is away"),
        ("KeyError", "the process that tokenizes failed: KeyError: 'the server is away'"),
    ],
)
def test_a_source_that_fails_at_once_ends_the_start(
    error: str, said: str, tmp_path: Path, started: list[BackgroundPreparation], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another source goes on: nobody may wait for the one that failed before anybody saw it begin."""
    corpora = {}
    for name in "ab":
        shards, data = open_data(write_records(tmp_path / f"{name}.jsonl", 30), tmp_path / "cache", prepare_lead=1)
        corpora[name] = shards
    fail_in_the_child(monkeypatch, PLAN_FAILS.replace("DataError(", f"{error}("))
    began = threading.Thread(target=lambda: started.append(BackgroundPreparation(corpora, data, 256)), daemon=True)
    began.start()
    began.join(20)
    assert not began.is_alive()
    with pytest.raises(DataError, match=said):
        corpora["b"].wait(1)


def test_a_source_that_changes_between_two_looks_is_told_of(
    tmp_path: Path, started: list[BackgroundPreparation]
) -> None:
    source = write_records(tmp_path / "a.jsonl", 3)
    shards, data = open_data(source, tmp_path / "cache")
    os.utime(source, (1, 1))
    start(shards, data, started)
    with pytest.raises(DataError, match="files changed meanwhile"):
        shards.wait(1)


@pytest.mark.parametrize("poller", ["who reads", "another thread"])
def test_the_end_of_a_source_is_checked_whoever_finds_it(tmp_path: Path, poller: str) -> None:
    source = write_records(tmp_path / "a.jsonl", 1, 50)
    shards, data = open_data(source, tmp_path / "cache")
    checked: list[int | None] = []
    samples = Samples(shards, 64, lambda: checked.append(shards.tokens))
    prepare(source, data, 256, progress=False)
    if poller != "who reads":
        shards.poll()
        assert shards.is_whole
    with pytest.raises(DataError, match="fewer tokens than one sample"):
        samples.in_order(np.arange(4), seed=0, window=2)
    assert checked == [shards.tokens]
    samples.wait(1)
    assert len(checked) == 1


def test_what_the_system_says_of_the_cache_names_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of another type would reach one rank alone, as one of the run's folder."""
    shards, _ = open_data(write_records(tmp_path / "a.jsonl", 1, 50), tmp_path / "cache")

    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("titanlite.data.corpus.want", full)
    with pytest.raises(DataError, match=r"data\.cache_dir = .*No space left(.|\n)*make room"):
        shards.wait(1)


def test_what_a_reader_needs_is_asked_for_again_where_another_wrote_less(tmp_path: Path) -> None:
    shards, _ = open_data(write_records(tmp_path / "a.jsonl", 1, 50), tmp_path / "cache")
    shards.folder.parent.mkdir()
    unfinished = unfinished_of(shards.folder)

    def reader() -> None:
        with suppress(DataError):
            shards.wait(100)

    waiting = threading.Thread(target=reader)
    waiting.start()
    found = []
    for _ in range(2):
        for _ in range(30):
            if read_wanted(unfinished) == 100:
                break
            time.sleep(0.05)
        found.append(read_wanted(unfinished))
        wanted_of(unfinished).write_text("5")
    shards.close()
    waiting.join()
    assert found == [100, 100]


def test_who_needs_all_is_not_held_up_by_a_lead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As validation on a source that is trained on, before the first step."""
    monkeypatch.setattr("titanlite.data.prepare.PUBLISH_SECONDS", -1.0)
    source = write_records(tmp_path / "a.jsonl", 3, 50)
    shards, data = open_data(source, tmp_path / "cache")
    begun = threading.Event()
    monkeypatch.setattr("titanlite.data.prepare.read_wanted", lambda folder: (begun.set(), read_wanted(folder))[1])
    (tmp_path / "cache").mkdir()
    want(unfinished_of(shards.folder), 10**12)  # of an earlier run: not this one's
    planned = plan_preparation(source, data, 256, KEY)
    makers = [threading.Thread(target=make, args=(planned, Progress("", enable=False), 0), daemon=True)]
    makers[0].start()
    assert begun.wait(10)
    time.sleep(0.3)
    assert makers[0].is_alive()  # paused
    makers.append(threading.Thread(target=prepare, args=(source, data, 256, False), daemon=True))
    makers[1].start()
    for maker in makers:
        maker.join(10)
        assert not maker.is_alive()
    assert [path.suffix for path in (tmp_path / "cache").iterdir() if path.is_file()] == [".lock"]
