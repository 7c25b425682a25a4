"""A preparation that was cut off goes on where it was, and what comes of it is what it would have been."""

import errno
import gzip
import json
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.support.prepared import prepare_here
from tests.unit.data.test_sources import write_parquet
from tests.unit.data.test_tokenizer import make_tokenizer
from titanlite.config.schema import Data
from titanlite.data import prepare as module
from titanlite.data.cache import unfinished_of
from titanlite.data.documents import documents
from titanlite.data.encode import Encoded, encode
from titanlite.data.prepare import prepare
from titanlite.data.shard_writer import ShardWriter, read_made
from titanlite.data.shards import Meta
from titanlite.data.sources import resolve
from titanlite.data.tally import Tally
from titanlite.errors import DataError

N_RECORDS = 12


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches of a few documents, each put on disk; shards that end anywhere in them; pieces of large documents."""
    monkeypatch.setattr("titanlite.data.prepare.PUBLISH_SECONDS", -1.0)
    monkeypatch.setattr("os.fsync", lambda file: None)
    monkeypatch.setattr("titanlite.data.encode._BATCH_CHARACTERS", 500)
    monkeypatch.setattr("titanlite.data.encode._PIECE_CHARACTERS", 300)
    monkeypatch.setattr("titanlite.data.encode._AROUND_CHARACTERS", 20)
    monkeypatch.setattr("titanlite.data.shard_writer._SHARD_TOKENS", 301)


def texts() -> list[str]:
    """Short texts, long ones, an empty one, and one with a NUL at its end that is cut into pieces before."""
    chosen = random.Random(4)
    found = [
        " ".join(f"word{chosen.randrange(99)}" for _ in range(chosen.choice((3, 30, 250)))) for _ in range(N_RECORDS)
    ]
    found[3], found[7] = "", found[7] + " bad".join(" and so on" for _ in range(200)) + "\0"
    return found


def write(kind: str, folder: Path) -> str:
    folder.mkdir()
    records = [json.dumps({"text": text}) for text in texts()]
    records.insert(5, "no JSON")
    if kind == "text":
        for i, text in enumerate(texts()):
            (folder / f"{i:02d}.txt").write_text(text)
        (folder / "99.txt").write_bytes(b"\xff")
    elif kind == "jsonl":
        (folder / "a.jsonl").write_text("\n".join(records[:6]) + "\n")
        (folder / "b.jsonl").write_text("\n".join(records[6:]))
    elif kind == "jsonl.gz":
        (folder / "a.jsonl.gz").write_bytes(gzip.compress("\n".join(records).encode()))
    elif kind == "parquet":
        write_parquet(folder / "a.parquet", text=texts()[:5])
        write_parquet(folder / "b.parquet", text=texts()[5:])
    return f"hf:{folder}" if kind == "hf" else str(folder)


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


class Killed(BaseException):
    pass


def killed_after(n_batches: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a preparation be killed behind some batches."""

    def killed_there(*args: object) -> Iterator[list[Encoded]]:
        for n, batch in enumerate(encode(*args)):  # type: ignore[arg-type]
            if n == n_batches:
                raise Killed
            yield batch

    monkeypatch.setattr(module, "encode", killed_there)


@pytest.mark.parametrize(
    ("kind", "tokenizer", "max_tokens"),
    [
        ("text", "bytes", 0),
        ("text", "bpe", 2000),
        ("jsonl", "bytes", 3000),
        ("jsonl", "bpe", 0),
        ("jsonl.gz", "bytes", 0),
        ("parquet", "bytes", 0),
    ],
)
def test_cut_off_after_any_batch_the_result_is_the_same(
    kind: str, tokenizer: str, max_tokens: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write(kind, tmp_path / "in")
    name = "bytes" if tokenizer == "bytes" else str(make_tokenizer(tmp_path / "tokenizer.json"))
    keys = {"tokenizer": name, "max_bad_records": 3, "max_tokens": max_tokens}
    whole = prepare_here(tmp_path / "whole", source, 300, **keys)
    assert len(whole.meta.shards) > 3
    assert whole.meta.n_bad_records > 0 or tokenizer == "bpe" or kind == "parquet"
    n_kept = n_batches = 0
    for n in range(1, 100, 3):
        shutil.rmtree(tmp_path / "cut", ignore_errors=True)
        for end in (n, n + 2, 100):  # killed twice, and then let be
            killed_after(end, monkeypatch)
            try:
                again = prepare_here(tmp_path / "cut", source, 300, **keys)
                break
            except Killed:
                folder = unfinished_of(tmp_path / "cut" / "cache" / whole.folder.name)
                made = read_made(folder)
                n_kept += made is not None
                for path in [*folder.glob("shard-*.bin")][-1:]:  # what was written behind it is not looked at
                    with path.open("ab") as file:
                        file.write(b"half of a block")
        assert content(again.folder) == content(whole.folder), n
        n_batches = n
        if end == n:
            break
    assert n_batches >= 4
    assert n_kept > n_batches // 3  # else nothing was gone on from


def test_what_was_bad_before_counts_after_a_restart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write("jsonl", tmp_path / "in")
    (tmp_path / "in" / "c.jsonl").write_text("no JSON either\n")
    for limit, n_bad in ((2, 3), (2, 3), (0, 2)):
        with pytest.raises(DataError, match=rf"{n_bad} bad records so far:\n.*a\.jsonl:6: not JSON"):
            prepare_here(tmp_path, source, max_bad_records=limit)
    more, whole = (prepare_here(folder, source, max_bad_records=3) for folder in (tmp_path, tmp_path / "other"))
    assert more.meta == whole.meta


DAMAGES: dict[str, tuple[str, Callable[[bytes], bytes | None]]] = {
    "a full shard": ("shard-00000.bin", lambda content: b"?" + content[1:]),
    "the last shard": ("shard-0000N.bin", lambda content: b"?" + content[1:]),
    "a shard is gone": ("shard-00000.bin", lambda content: None),
    "a number of progress": ("progress.json", lambda content: content.replace(b'"record": 1', b'"record": 2')),
    "progress without hash": ("progress.json", lambda content: content.replace(b'"hash"', b'"other"')),
    "a number of a full shard": ("shard-00000.json", lambda content: content.replace(b'"max_id": 1', b'"max_id": 2')),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_is_not_as_it_was_is_made_anew(
    damage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    source = write("jsonl", tmp_path / "in")
    with monkeypatch.context() as patch:
        killed_after(8, patch)
        with pytest.raises(Killed):
            prepare_here(tmp_path, source, max_bad_records=3)
    (folder,) = (tmp_path / "cache").glob("*.unfinished")
    made = read_made(folder)
    assert made is not None
    assert made.n_shards > 0
    assert made.tokens > 0
    name, change = DAMAGES[damage]
    path = folder / name.replace("N", str(made.n_shards))
    before = path.read_bytes()
    if (after := change(before)) is None:
        path.unlink()
    else:
        assert after != before
        path.write_bytes(after)
    data = Data(source, cache_dir=str(tmp_path / "cache"), max_bad_records=3)
    again = prepare(source, data, 256, progress=True)
    assert "what an earlier start has left is damaged, and is made anew" in capfd.readouterr().err
    whole = prepare_here(tmp_path / "other", source, max_bad_records=3)
    assert content(again.folder) == content(whole.folder)
    assert Meta.read(again.folder).tokens == whole.tokens


def test_a_dataset_of_the_hub_goes_on_with_the_revision_that_it_began_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    datasets = pytest.importorskip("datasets")
    (tmp_path / "hub").mkdir()
    (tmp_path / "hub" / "a.jsonl").write_text("\n".join(json.dumps({"text": f"{i} " * 80}) for i in range(20)))
    load, revision = datasets.load_dataset_builder, "0a1b"

    def load_from_hub(*_: object) -> object:
        builder = load(str(tmp_path / "hub"))
        builder.hash = revision
        return builder

    monkeypatch.setattr(datasets, "load_dataset_builder", load_from_hub)
    killed_after(2, monkeypatch)
    with pytest.raises(Killed):
        prepare_here(tmp_path, "hf:a/b")
    monkeypatch.setattr(module, "encode", encode)
    revision = "2c3d"
    with pytest.raises(DataError, match=r"are of revision 0a1b; now it is 2c3d\n.*\n.*fix:  delete .*\.unfinished"):
        prepare_here(tmp_path, "hf:a/b")
    revision = "0a1b"
    again, whole = (prepare_here(folder, "hf:a/b") for folder in (tmp_path, tmp_path / "other"))
    assert content(again.folder) == content(whole.folder)


@pytest.mark.parametrize("failing", ["write", "rename"])
def test_what_fails_at_the_last_file_loses_nothing(
    failing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk is full where the folder is to be ended, or the process is killed there."""
    source = write("jsonl", tmp_path / "in")

    def full(*args: object) -> None:
        if failing == "rename":
            raise Killed
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Meta if failing == "write" else Path, failing, full)
        with pytest.raises(DataError if failing == "write" else Killed):
            prepare_here(tmp_path, source, max_bad_records=3)
    (folder,) = (tmp_path / "cache").glob("*.unfinished")
    made = read_made(folder)
    assert made is not None
    assert made.n_shards > 0
    again = prepare_here(tmp_path, source, max_bad_records=3)
    whole = prepare_here(tmp_path / "other", source, max_bad_records=3)
    assert content(again.folder) == content(whole.folder)
    assert sorted({path.suffix for path in again.folder.iterdir()}) == [".bin", ".json"]
    assert [path.name for path in again.folder.glob("*.json")] == ["meta.json"]


def test_a_restart_gives_signs_of_life_before_it_has_caught_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the watchdog of a run that waits takes it for dead: re-hashing, and what is read again, may take long."""
    (tmp_path / "shards").mkdir()
    with ShardWriter(tmp_path / "shards", "uint16") as writer:
        writer.write(np.arange(700))
        writer.keep()
        writer.publish({})
    signs: list[int] = []
    with ShardWriter(tmp_path / "shards", "uint16") as writer:
        assert writer.go_on(lambda: signs.append(0)) == {}
    assert len(signs) == 3  # shards
    monkeypatch.setattr("titanlite.data.tally._REPORT_BYTES", 100)
    source = resolve(write("jsonl", tmp_path / "in"), "data.source")
    tally = Tally("in", "data.source", 9, file=1, record=7, on_progress=lambda: signs.append(1))
    next(documents(source, "text", tally), None)
    assert signs.count(1) >= 2
