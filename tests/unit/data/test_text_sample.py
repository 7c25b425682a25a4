"""A sample of a source tells how many tokens all of it has, and a tokenizer that is trained on it reads any text."""

import gzip
import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from titanlite.config.schema import Data
from titanlite.data.sources import resolve
from titanlite.data.text_sample import read_sample
from titanlite.data.tokenizer import ByteTokenizer, load_tokenizer
from titanlite.data.train_tokenizer import LEAST_IDS, tokenizer_path, train_tokenizer

SEEN = 1 << 18  # bytes of a sample


def texts(files: int, documents: int) -> list[list[str]]:
    """Documents of 40 to 4,000 bytes, by file."""
    draw = random.Random(1)
    return [
        ["".join(f"{draw.randint(0, 999)} ist größer. " for _ in range(draw.randint(2, 200))) for _ in range(documents)]
        for _ in range(files)
    ]


def write(folder: Path, kind: str, of_files: list[list[str]]) -> str:
    folder.mkdir(exist_ok=True)
    for n, documents in enumerate(of_files):
        file, lines = folder / f"{n}.{kind}", "".join(json.dumps({"text": text}) + "\n" for text in documents)
        if kind == "parquet":
            import pyarrow
            import pyarrow.parquet

            pyarrow.parquet.write_table(pyarrow.table({"text": documents}), file)
        else:
            content = "".join(documents) if kind == "txt" else lines
            file.write_bytes(gzip.compress(content.encode()) if kind.endswith(".gz") else content.encode())
    return str(folder / f"*.{kind}")


@pytest.mark.parametrize("kind", ["txt", "jsonl", "jsonl.gz", "parquet", "folder of a dataset"])
def test_a_sample_tells_the_tokens_of_all(kind: str, tmp_path: Path) -> None:
    of_files = texts(20, 400)
    source = write(tmp_path / "in", "jsonl" if "folder" in kind else kind, of_files)
    n_bytes = sum(len(text.encode()) for documents in of_files for text in documents)
    tokens = n_bytes + (20 if kind == "txt" else 20 * 400)  # each document ends with its separator
    found = resolve(f"hf:{tmp_path / 'in'}" if "folder" in kind else source)
    sample = read_sample(found, Data(), SEEN)
    assert sample.share is not None
    assert sample.n_bytes == sum(len(text.encode()) for text in sample.texts)
    assert SEEN <= sample.n_bytes < (8 * SEEN if kind == "jsonl.gz" else 2 * SEEN) < n_bytes / 4
    bound = 0.1 if kind == "jsonl.gz" else 0.05  # blocks of 64 KiB are read; of text some percent by chance
    assert sample.count_tokens(ByteTokenizer()) / sample.share == pytest.approx(tokens, rel=bound)
    assert read_sample(found, Data(), SEEN) == sample
    whole = read_sample(found, Data(), 2 * n_bytes)
    assert whole.share == 1
    assert whole.count_tokens(ByteTokenizer()) == tokens


@pytest.mark.parametrize("n_rows", [100, None])
def test_rows_of_the_hub_are_counted_by_the_number_that_it_gives(
    n_rows: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets

    class Rows(list[Any]):
        def skip(self, n: int) -> list[Any]:
            return self[n:]

    class Builder:
        hash, config, info = (
            "",
            None,
            SimpleNamespace(splits=n_rows and {"train": SimpleNamespace(num_examples=n_rows)}),
        )

        def as_streaming_dataset(self, split: str) -> Rows:
            return Rows({"text": "x" * 9} for _ in range(100))

    monkeypatch.setattr(datasets, "load_dataset_builder", lambda *_: Builder())
    monkeypatch.setattr("titanlite.data.dataset_folder._OPTIONS", {})
    sample = read_sample(resolve("hf:a/b"), Data(), 180)
    assert sample.origin == "its first 20 documents"
    assert sample.count_tokens(ByteTokenizer()) == 200
    assert sample.share == (n_rows and 20 / n_rows)


def test_a_trained_tokenizer_is_one_for_every_text_and_is_kept_for_its_own(tmp_path: Path) -> None:
    source = resolve(write(tmp_path / "in", "jsonl", texts(3, 100)))
    path = tokenizer_path(source, Data(), 400, tmp_path / "made")
    train_tokenizer(source, Data(), 400, path)
    tokenizer = load_tokenizer(str(path))
    assert tokenizer.vocab_size == 400
    assert tokenizer.decode(np.array([tokenizer.separator_id])) == "<|end_of_text|>"
    for text in ("1 ist größer. ", " \n\tÿ 日本 🙂<|end_of_text|>"):
        (ids,) = tokenizer.encode_batch([text])
        assert tokenizer.decode(ids) == text
        assert tokenizer.separator_id not in ids
    (ids,) = tokenizer.encode_batch([text := "7 ist größer. 8 ist größer. "])
    assert len(ids) < len(text) / 2
    assert tokenizer_path(source, Data(), 400, path.parent) == path
    (tmp_path / "in" / "0.jsonl").write_text('{"text": "other"}\n')
    assert tokenizer_path(resolve(source.name), Data(), 400, path.parent) != path
    little = resolve(write(tmp_path / "little", "txt", [["abc"]]))
    train_tokenizer(little, Data(), 400, path)
    assert load_tokenizer(str(path)).vocab_size == LEAST_IDS
