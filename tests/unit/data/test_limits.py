"""Records without bound, and files that unpack to any length: memory stays bounded, and what happens is said."""

import gzip
import json
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from tests.support.prepared import prepare_here
from tests.unit.data.test_sources import write_parquet
from titanlite.data.documents import documents
from titanlite.data.sources import resolve
from titanlite.data.tally import Tally
from titanlite.data.tokenizer import ByteTokenizer
from titanlite.errors import DataError

MIB = 1 << 20
LARGE = json.dumps({"text": "x" * (32 * MIB)})  # of 32 KB packed
SAID = "larger than data.max_record_mib = 1"


def write(path: Path, *lines: str) -> Path:
    content = "".join(f"{line}\n" for line in lines).encode()
    if path.suffix == ".zst":
        with pyarrow.CompressedOutputStream(str(path), "zstd") as file:
            file.write(content)
    else:
        path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


def read(file: Path, limit: int, max_record_mib: int = 1) -> tuple[list[str], Tally, int]:
    """The texts, the tally, and the bytes that Python held at most."""
    tally = Tally(str(file), "data.source", limit, max_record_mib=max_record_mib)
    source = resolve(str(file))
    tracemalloc.start()
    texts = ["".join(d.blocks) for d in documents(source, "text", tally)]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return texts, tally, peak


@contextmanager
def counted_memory() -> Iterator[Any]:
    """Let pyarrow take its memory from a pool that counts it."""
    before = pyarrow.default_memory_pool()
    pool = pyarrow.proxy_memory_pool(before)
    pyarrow.set_memory_pool(pool)
    try:
        yield pool
    finally:
        pyarrow.set_memory_pool(before)


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst"])
def test_a_line_that_is_too_large_is_a_bad_record_that_takes_no_memory(tmp_path: Path, name: str) -> None:
    one, two = (json.dumps({"text": text}) for text in ("one", "two"))
    file = write(tmp_path / name, one, LARGE, two)
    texts, tally, peak = read(file, limit=1)
    assert (texts, tally.bad, tally.n_bytes) == (["one", "two"], [f"{file}:2: {SAID}"], file.stat().st_size)
    assert peak < 16 * MIB  # blocks of 4 MiB of what is passed over: the last, and the next twice while it is joined
    texts, tally, _ = read(file, limit=0)
    assert (texts, tally.bad) == (["one"], [f"{file}:2: {SAID}"])
    assert [len(text) for text in read(file, limit=0, max_record_mib=33)[0]] == [3, 32 * MIB, 3]
    with pytest.raises(DataError, match=f"1 bad record so far:\n.*{name}:2: {SAID}\n"):
        prepare_here(tmp_path, file, max_record_mib=1)


def test_a_line_at_the_limit(tmp_path: Path) -> None:
    fits = json.dumps({"text": "x" * (MIB - len(json.dumps({"text": ""})))})
    file = write(tmp_path / "a.jsonl", fits, fits[:-1] + " }", fits)
    file.write_bytes(file.read_bytes()[:-1])  # no line end behind the last
    texts, tally, _ = read(file, limit=1)
    assert (len(texts), tally.bad) == (2, [f"{file}:2: {SAID}"])


def test_a_large_text_of_a_parquet_file_is_a_bad_record(tmp_path: Path) -> None:
    file = tmp_path / "a.parquet"
    write_parquet(file, nested=[{"text": "", "more": 1}] * 3, text=["one", "x" * (32 * MIB), "two"])
    texts, tally, peak = read(file, limit=1)
    assert (texts, tally.bad) == (["one", "two"], [f"{file}:2: {SAID}"])
    assert peak < 4 * MIB
    texts, tally, _ = read(file, limit=0)
    assert texts == ["one"]


def test_a_text_that_many_rows_of_a_parquet_file_have_is_unpacked_for_one_at_a_time(tmp_path: Path) -> None:
    file = tmp_path / "a.parquet"
    write_parquet(file, text=pyarrow.DictionaryArray.from_arrays([0] * 1000, ["x" * MIB]))
    assert file.stat().st_size < 100_000
    with counted_memory() as pool:
        tally = Tally(str(file), "data.source", 0)
        assert sum(1 for _ in documents(resolve(str(file)), "text", tally)) == 1000
    assert pool.max_memory() < 32 * MIB  # a batch of 256 texts would have 256


@pytest.mark.parametrize("n_different", [40_000, 1000])
def test_short_texts_of_a_parquet_file_are_copied_but_once(tmp_path: Path, n_different: int) -> None:
    file = tmp_path / "a.parquet"
    texts = [f"{n % n_different:08}" * 6 for n in range(40_000)]  # more than the 1 MiB that a dictionary has, or less
    write_parquet(file, text=texts)
    with counted_memory() as pool:
        assert read(file, limit=0)[0] == texts
    assert pool.total_bytes_allocated() < 10 * sum(map(len, texts))  # a copy in each batch would be hundreds


def test_large_distinct_texts_of_a_parquet_file_are_unpacked_a_few_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "a.parquet"
    monkeypatch.setattr("titanlite.data.parquet._BATCH_BYTES", 4 * MIB)
    table = pyarrow.table({"text": [f"{n:03}" + "x" * MIB for n in range(100)]})
    parquet.write_table(table, file, use_dictionary=False, data_page_size=MIB, write_batch_size=1)
    with counted_memory() as pool:
        tally = Tally(str(file), "data.source", 0)
        assert sum(1 for _ in documents(resolve(str(file)), "text", tally)) == 100
    assert pool.max_memory() < 50 * MIB


@pytest.mark.parametrize("large", ["x" * (MIB + 1), "é" * (MIB // 2 + 1)])
def test_a_large_row_of_a_dataset_is_a_bad_record(tmp_path: Path, large: str) -> None:
    pytest.importorskip("datasets")
    (tmp_path / "a.csv").write_text(f"text\none\n{large}\ntwo\n")
    tally = Tally("a", "data.source", 1, max_record_mib=1)
    texts = ["".join(d.blocks) for d in documents(resolve(f"hf:{tmp_path}"), "text", tally)]
    assert texts == ["one", "two"]
    assert tally.bad == [f"hf:{tmp_path}:2: {SAID}"]


@pytest.mark.parametrize("letter", ["x", "é"])
def test_a_text_file_that_cannot_be_cut_is_a_bad_record_when_it_is_too_large(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, letter: str
) -> None:
    large = letter * (MIB // len(letter.encode()) + 1)
    monkeypatch.setattr("titanlite.data.documents._BLOCK_BYTES", MIB)
    (tmp_path / "a.txt").write_text("a line\n" * 300_000)  # larger, and read in pieces
    (tmp_path / "b.txt").write_text("a word " + large)
    (tmp_path / "c.txt").write_text("last")
    source = tmp_path / "*.txt"
    said = rf"1 bad record so far:\n.*b\.txt: {SAID}, without a place to cut it\n"
    with pytest.raises(DataError, match=said) as caught:
        prepare_here(tmp_path, source, max_record_mib=1)
    fix = "fix:  raise data.max_record_mib, if there is memory for it, or cut the text into .jsonl records"
    assert str(caught.value).splitlines()[-1].strip() == fix
    (tmp_path / "d.txt").write_bytes(b"\xff")
    with pytest.raises(DataError, match=f"2 bad records.*(?s:.)*{fix}; and correct these .*data.max_bad_records"):
        prepare_here(tmp_path, source, max_record_mib=1)
    (tmp_path / "d.txt").unlink()
    shards = prepare_here(tmp_path, source, max_record_mib=1, max_bad_records=1)
    assert bytes(shards.read(0, shards.tokens).tolist()) == b"a line\n" * 300_000 + b"\0last\0"
    whole = prepare_here(tmp_path, source, max_bad_records=1)
    assert whole.tokens == shards.tokens + len(f"a word {large}\0".encode())


def test_what_is_too_large_behind_the_end_that_max_tokens_sets_does_not_count(tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl.gz", json.dumps({"text": "one"}), json.dumps({"text": "two"}), LARGE)
    meta = prepare_here(tmp_path, file, max_tokens=4, max_record_mib=1).meta
    assert (meta.tokens, meta.max_tokens, meta.n_bad_records) == (4, 4, 0)


def test_many_small_texts_are_not_gathered_without_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    n_at_once, original = list[int](), ByteTokenizer.encode_batch
    monkeypatch.setattr(
        ByteTokenizer, "encode_batch", lambda self, texts: (n_at_once.append(len(texts)), original(self, texts))[1]
    )
    write(tmp_path / "a.jsonl", *['{"text": "a"}'] * 50_000)
    prepare_here(tmp_path, tmp_path / "a.jsonl")
    assert sum(n_at_once) == 50_000
    assert max(n_at_once) < 25_000
