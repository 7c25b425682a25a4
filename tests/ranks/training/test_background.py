"""A run whose source is tokenized meanwhile is the run of the source tokenized before, however it is interrupted."""

import gzip
import json
import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import titanlite.data.background
import titanlite.data.corpus
import titanlite.training.data_wait
from tests.support.launched import Ended
from titanlite.checkpoint.publish import step_folder
from titanlite.checkpoint.saved_state import read_state

if TYPE_CHECKING:
    from tests.support.launched import Desk

# Batches of a few records, each put on disk, and not too fast.
SLOW = """
import os, signal, time
from titanlite.data import encode, prepare
from titanlite.data.shard_writer import ShardWriter
encode._BATCH_CHARACTERS, prepare.PUBLISH_SECONDS = 1500, -1.0
before = ShardWriter.publish
def publish(self, read):
    {}
    time.sleep(0.03)
    before(self, read)
ShardWriter.publish = publish
"""
SIZE = ["--training.global_batch_size=16", "--training.local_batch_size=8", "--training.steps=26"]
SIZE += ["--validation.enable=false", "--data.max_bad_records=1"]
WINDOW = ["--data.shuffle_window=1024", "--data.prepare_lead=3000"]  # 16 samples, a step


def plan(program: str = "pass") -> Callable[[], None]:
    """What a rank does before it starts, so that the process beside it is slow, or worse."""

    def plant() -> None:
        titanlite.data.background._PROGRAM = SLOW.format(program) + titanlite.data.background._PROGRAM
        titanlite.data.corpus._ALONE_SECONDS = 0.5
        titanlite.training.data_wait._TELL_SECONDS = 0.0

    return plant


@pytest.fixture
def flags(desk: "Desk", request: pytest.FixtureRequest) -> list[str]:
    return of_records(desk, request.node.name)


def of_records(desk: "Desk", name: str) -> list[str]:
    """A source of 40 records and a bad one, a bit more than an epoch of the run, and a cache of its own."""
    path = desk.folder / f"{name}.jsonl"
    with path.open("w") as file:
        for i in range(40):
            file.write(json.dumps({"text": f"record {i} of this test, " * 22}) + "\n")
        file.write("no JSON\n")
    cache = desk.folder / f"cache of {name}"
    shutil.rmtree(cache, ignore_errors=True)
    return [f"--data.source={path}", f"--data.cache_dir={cache}", *SIZE, *WINDOW]


def cache_of(flags: list[str]) -> Path:
    return Path(next(flag.partition("=")[2] for flag in flags if "cache_dir" in flag))


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def prepared(desk: "Desk") -> tuple[list[str], Ended, Path, dict[str, bytes]]:
    """The run of a source that is tokenized before, and the shards of that; all sources have the same records."""
    flags = of_records(desk, "prepared")
    first = desk.run("first", 2, *flags)
    (folder,) = (path for path in cache_of(flags).iterdir() if path.is_dir())
    return flags, first, folder, files(folder)


def test_a_run_in_the_background_is_the_run_of_a_prepared_source(
    desk: "Desk", prepared: tuple[list[str], Ended, Path, dict[str, bytes]]
) -> None:
    flags, first, folder, shards = prepared
    assert first.losses("epoch")[-1] > 1
    shutil.rmtree(cache_of(flags))
    pause = "self.tokens > 9000 and not globals().get('slept') and globals().update(slept=[time.sleep(3)])"
    back = desk.run("back", 2, *flags, "--data.prepare=background", plant=plan(pause))
    assert back.trained() == first.trained()
    assert back.content(26) == first.content(26)
    assert files(folder) == shards
    assert "data.source is tokenized to its end: " in back.output
    assert back.receipt["data.shuffle_window"]["applied"] == {"samples": 16, "of_tokens": 64}
    assert "shuffled within windows of 16 samples: 1,024 tokens, what 1 steps take" in back.output
    told, of_prepared = back.receipt["data.source"], first.receipt["data.source"]
    assert told == of_prepared | {"applied": {"prepare": "background"} | of_prepared["applied"]}
    assert told["applied"]["bad_records"] == len(told["skipped"]) == 1
    assert "1 bad record skipped (data.max_bad_records)" in back.output
    assert back.losses("epoch")[0] is None
    assert back.losses("epoch")[-1] == first.losses("epoch")[-1]
    assert sum(back.losses("data_wait_seconds")) > sum(first.losses("data_wait_seconds"))
    again = desk.run("again", 1, *flags, "--data.prepare=background", "--job.stop_after=1")
    assert again.losses() == pytest.approx(first.losses()[:1], rel=1e-4)
    assert "in the background" not in again.output  # it is there


@pytest.mark.slow
def test_a_signal_to_one_rank_is_answered_while_all_wait_for_data(
    desk: "Desk", flags: list[str], prepared: tuple[list[str], Ended, Path, dict[str, bytes]]
) -> None:
    begun = desk.folder / "waits"
    wait = f"(self.tokens > 9000 and (open({str(begun)!r}, 'w'), time.sleep(600)))"
    flags.append("--data.prepare=background")
    job = desk.start("signal", 2, *flags, plant=plan(wait))
    deadline = time.monotonic() + 300
    while "and waits for it" not in job.output() or not begun.exists():
        assert time.monotonic() < deadline, job.output()
        time.sleep(0.05)
    time.sleep(3)  # until the last step that has its data is done
    os.kill(job.pids[1], signal.SIGTERM)
    sent = time.monotonic()
    assert job.wait() == [0, 0], job.output()
    assert time.monotonic() - sent < 60
    stopped = Ended(desk.folder / "runs" / "signal", job.output())
    assert stopped.status["state"] == "stopped"
    assert stopped.status["by"] == "a signal to another rank"
    assert stopped.checkpoints() == [stopped.status["step"]]
    assert stopped.losses("step")[-1] == stopped.status["step"] > 0
    assert 7000 < stopped.receipt["data.source"]["applied"]["tokens_so_far"] < 12_000
    ended, first = desk.run("signal", 2, *flags), prepared[1]
    assert ended.trained() == first.trained()
    assert ended.content(26) == first.content(26)


@pytest.mark.slow
def test_a_process_that_is_killed_ends_the_run_and_the_next_goes_on(desk: "Desk", flags: list[str]) -> None:
    first = desk.run("unharmed", 2, *flags)
    shutil.rmtree(cache_of(flags))
    flags.append("--data.prepare=background")
    kill = "self.tokens > 9000 and os.kill(os.getpid(), signal.SIGKILL)"
    killed = desk.run("killed", 2, *flags, plant=plan(kill), ends=2)
    for of_rank in killed.output.split("--- rank ")[1:]:
        assert "the process that tokenizes it has ended without a word, killed perhaps" in of_rank
    assert killed.status["state"] == "failed"
    assert killed.checkpoints() == [killed.status["step"]]
    assert killed.status["step"] > 0
    assert list(cache_of(flags).glob("*.unfinished"))
    saved = read_state(step_folder(killed.folder / "checkpoints", last := killed.status["step"]), last)
    assert (saved.corpora, len(saved.inputs[""])) == ({"": ""}, 16)
    ended = desk.run("killed", 2, *flags, plant=plan())
    assert "tokens are there already" in ended.output
    assert "holds different text" not in ended.output
    assert ended.trained() == first.trained()
    assert ended.content(26) == first.content(26)


@pytest.mark.slow
def test_a_source_that_turns_out_too_short_is_said(desk: "Desk", flags: list[str]) -> None:
    source = Path(flags[0].partition("=")[2])
    packed = source.with_suffix(".jsonl.gz")  # of which nothing is counted beforehand
    packed.write_bytes(gzip.compress(source.read_bytes()))
    flags = [f"--data.source={packed}", *flags[1:], "--data.prepare=background", "--data.prepare_lead=0"]
    flags += ["--training.seq_len=1024", "--training.global_batch_size=32"]
    ended = desk.run("short", 1, *flags, plant=plan(), ends=2)
    assert "want: at least 32,769 tokens: 32 samples of training.seq_len = 1024, and 1" in ended.output
