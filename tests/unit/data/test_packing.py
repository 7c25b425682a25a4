"""Best-fit packing against plain Python: each token once, no document cut that fits, padding counted, bins as asked."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.prepared import prepare_here
from tests.unit.data.test_shards import make_shards
from titanlite.config.schema import Config, Data, Validation
from titanlite.data import best_fit, packing
from titanlite.data.background import open_growing
from titanlite.data.best_fit import DocumentCuts, best_fit_decreasing, packed_windows
from titanlite.data.corpus import Corpus
from titanlite.data.inputs import check_inputs
from titanlite.data.packing import PackedSamples, count_packing, index_folder, open_packed
from titanlite.data.prepare import prepare
from titanlite.data.run_samples import prepared_sources
from titanlite.errors import DataError
from titanlite.kernels.ignore_index import IGNORE_INDEX

SEPARATOR = 7
LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=60)


def row_of(lengths: list[int], is_ended: bool = True) -> np.ndarray:
    """Documents of these lengths, their separators counted; each token but those has an id of its own."""
    row = np.arange(100, 100 + sum(lengths))
    row[np.cumsum(lengths) - 1] = SEPARATOR
    return row if is_ended else row[:-1]


def shards_of(folder: Path, row: np.ndarray, shard_tokens: int = 100) -> Corpus:
    shards = make_shards(folder / "s", row, "uint32", shard_tokens)
    shards.separator = SEPARATOR
    return shards


def best_fit_one_by_one(lengths: list[int], seq_len: int) -> list[int]:
    """The rooms that are left, by the definition."""
    rooms: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [room for room in rooms if room >= length]
        if fitting:
            rooms.remove(min(fitting))
        rooms.append((min(fitting) if fitting else seq_len) - length)
    return sorted(rooms)


@given(LENGTHS, st.integers(1, 40))
def test_bins_are_those_of_the_definition(lengths: list[int], seq_len: int) -> None:
    lengths = [min(length, seq_len) for length in lengths]
    bins = best_fit_decreasing(np.array(lengths), seq_len)
    rooms = seq_len - np.bincount(bins, weights=lengths).astype(int)
    assert sorted(rooms.tolist()) == best_fit_one_by_one(lengths, seq_len)


@given(LENGTHS, st.integers(1, 40), st.lists(st.integers(1, 200), max_size=4), st.booleans(), st.integers(1, 50))
def test_pieces_are_documents_cut_each_seq_len_tokens(
    lengths: list[int], seq_len: int, parts: list[int], is_ended: bool, window: int
) -> None:
    """However the source is read: in blocks that end anywhere, its last document ended or not."""
    if not is_ended:
        lengths = [*lengths[:-1], lengths[-1] + 1]
    ends, total = np.cumsum(lengths), sum(lengths)
    cuts = DocumentCuts(seq_len)
    borders = sorted({*(part for part in parts if part < total), total})
    pieces = [
        cuts.cut(ends[(ends > before) & (ends <= border)], border)
        for before, border in zip([0, *borders], borders, strict=False)
    ]
    wanted = [
        (e - n + at, min(seq_len, n - at)) for e, n in zip(ends, lengths, strict=True) for at in range(0, n, seq_len)
    ]
    assert np.concatenate(pieces).tolist() == wanted
    assert (cuts.documents, cuts.longer) == (len(lengths), sum(n > seq_len for n in lengths))
    crossing = [
        n <= seq_len and len({(e - n) // seq_len, (e - 1) // seq_len}) > 1 for e, n in zip(ends, lengths, strict=True)
    ]
    assert cuts.crossing == sum(crossing)

    windows = list(packed_windows(iter(pieces), seq_len, window))
    assert sorted(span for some, _ in windows for span in some.tolist()) == wanted  # each once
    for some, counts in windows:
        bins = np.split(some["start"], np.cumsum(counts)[:-1])
        assert all((np.diff(one) > 0).all() for one in bins)
        firsts = [int(one[0]) for one in bins]
        assert firsts == sorted(firsts)  # near to the order of the source


@settings(max_examples=40, deadline=None)
@given(LENGTHS, st.integers(2, 40), st.booleans())
def test_samples_hold_each_document_once_and_predict_within_it(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], seq_len: int, is_ended: bool
) -> None:
    row = row_of(lengths, is_ended or lengths[-1] == 1)
    shards = shards_of(tmp_path_factory.mktemp("p"), row)
    samples = open_packed(shards, Data(), seq_len, progress=False)
    pairs = [samples.read(i) for i in range(samples.n)]
    tokens, targets = np.concatenate(pairs, axis=1)
    ends = np.flatnonzero(row == SEPARATOR)

    assert sorted(tokens[tokens != SEPARATOR]) == sorted(row[row != SEPARATOR])
    n_padded = samples.n * seq_len - len(row)
    assert np.count_nonzero(tokens == SEPARATOR) == len(ends) + n_padded
    # Each token that another of its document precedes is predicted once, from that one.
    predicted = [(a, b) for a, b in pairwise(row) if a != SEPARATOR]
    assert sorted((a, b) for a, b in zip(tokens, targets, strict=True) if b != IGNORE_INDEX) == sorted(predicted)
    # No document is cut that fits.
    begins = np.concatenate(([0], ends + 1))
    begins = begins[begins < len(row)]
    for begin, end in zip(begins, [*begins[1:], len(row)], strict=True):
        if end - begin <= seq_len and row[begin] != SEPARATOR:
            at = int(np.flatnonzero(tokens == row[begin])[0])
            assert tokens[at : at + end - begin].tolist() == row[begin:end].tolist()
            assert at // seq_len == (at + end - begin - 1) // seq_len
            assert at % seq_len == 0 or tokens[at - 1] == SEPARATOR  # where a mask finds its beginning
    counts = samples.counts
    assert counts == count_packing(shards, seq_len, SEPARATOR, len(row))
    assert (counts.padded, counts.tokens, counts.bins) == (n_padded, len(row), samples.n)
    assert counts.table()[2][2] == "0"


def test_a_source_in_many_windows_and_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "_BLOCK_TOKENS", 64)
    lengths = np.random.default_rng(0).integers(1, 100, 300).tolist()
    row = row_of(lengths)
    monkeypatch.setattr(best_fit.packed_windows, "__defaults__", (20,))
    samples = open_packed(shards_of(tmp_path, row), Data(), 50, progress=False)
    firsts = [int(samples.spans(i)[0][0]) for i in range(samples.n)]
    assert np.abs(np.argsort(firsts) - np.arange(samples.n)).max() < 30  # bins move within a window only
    tokens = np.concatenate([samples.read(i)[0] for i in range(samples.n)])
    assert sorted(tokens[tokens != SEPARATOR]) == sorted(row[row != SEPARATOR])


def test_the_index_is_made_once_and_found_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shards = shards_of(tmp_path, row_of([3, 9, 4, 5]))
    first = open_packed(shards, Data(), 8, progress=False)
    assert first.folder == index_folder(shards, 8)
    monkeypatch.setattr(packing, "_write_index", None)
    again = open_packed(shards, Data(), 8, progress=False)
    assert [again.read(i).tolist() for i in range(again.n)] == [first.read(i).tolist() for i in range(first.n)]
    with pytest.raises(TypeError):  # for another length it is another one
        open_packed(shards, Data(), 6, progress=False)


@pytest.mark.parametrize("file", ["spans.bin", "offsets.bin"])
def test_a_damaged_index_is_found_before_it_is_used(tmp_path: Path, file: str) -> None:
    shards = shards_of(tmp_path, row_of([3, 9, 4, 5]))
    folder = open_packed(shards, Data(), 8, progress=False).folder
    content = bytearray((folder / file).read_bytes())
    content[-1] ^= 1
    (folder / file).write_bytes(content)
    with pytest.raises(DataError, match=r"delete .*packed-8-7; it is made again"):
        PackedSamples(shards, folder).read(0)


def test_an_index_of_other_tokens_is_refused(tmp_path: Path) -> None:
    shards = shards_of(tmp_path, row_of([3, 9]))
    folder = open_packed(shards, Data(), 8, progress=False).folder
    shards._meta = replace(shards.meta, fingerprint="another")
    with pytest.raises(DataError, match="fingerprint"):
        PackedSamples(shards, folder)


def tokens_file(folder: Path, row: np.ndarray) -> str:
    path = folder / "t.bin"
    row.astype("<u2").tofile(path)
    return str(path)


def test_token_files_are_packed_by_the_separator_that_is_given(tmp_path: Path) -> None:
    source = tokens_file(tmp_path, row_of([3, 9, 4, 5]))
    data = Data(source, cache_dir=str(tmp_path / "c"), packing="best_fit", separator_id=SEPARATOR)
    samples = open_packed(prepare(source, data, 1000, progress=False), data, 8, progress=False)
    assert (samples.counts.documents, samples.counts.longer) == (4, 1)


@pytest.mark.parametrize("packing", ["concat", "best_fit"])
def test_a_separator_that_ends_no_document_is_refused(tmp_path: Path, packing: Any) -> None:
    source = tokens_file(tmp_path, row_of([3, 9, 4, 5]))
    data = Data(source, cache_dir=str(tmp_path / "c"), separator_id=8, packing=packing)
    for refuses in (
        lambda: prepare(source, data, 1000, progress=False),
        lambda: open_growing(source, data, 1000, "data.source"),
        lambda: check_inputs(replace(Config(), data=data), 1000),
    ):
        with pytest.raises(DataError, match=r"separator_id = 8, which ends no document"):
            refuses()
    prepare(source, replace(data, separator_id=SEPARATOR), 1000, progress=False)


def test_where_a_separator_may_come_later_there_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And where a held-out file may be one document."""
    source = tokens_file(tmp_path, row_of([9, 4, 5]))
    data = Data(source, cache_dir=str(tmp_path / "c"), separator_id=SEPARATOR)
    (held_out := tmp_path / "held_out.bin").write_bytes(bytes([3, 0] * 20))
    config = replace(Config(), data=data, validation=Validation(enable=True, source=str(held_out)))

    def warnings() -> list[str]:
        return [text for text in check_inputs(config, 1000).warnings if "separator_id" in text]

    (warning,) = warnings()
    assert warning.startswith(f"data.separator_id = {SEPARATOR}, which ends no document of validation.source = ")
    monkeypatch.setattr("titanlite.data.inputs._LOOKED_AT_TOKENS", 8)  # the first ends with the ninth
    first, other = warnings()
    assert first.startswith(f"data.separator_id = {SEPARATOR}, which ends no document in the first 8 tokens of data.")
    assert "of validation.source" in other
    monkeypatch.setattr("titanlite.data.inputs._LOOKED_AT_TOKENS", 9)
    assert len(warnings()) == 1


def test_samples_are_as_long_as_those_that_were_trained(tmp_path: Path) -> None:
    """Where a stage of 32 tokens was trained and is no longer in the config, of 8."""
    source = tokens_file(tmp_path, row_of([9, 4, 5, 9, 20]))
    data = Data(source, cache_dir=str(tmp_path / "c"), separator_id=SEPARATOR)
    config = replace(Config(), data=data, training=replace(Config().training, seq_len=8))
    shards = prepare(source, data, 1000, progress=False)
    found = prepared_sources(config, {"data.source": shards}, 32)
    assert found is not None
    assert (found[""].samples.n, found[""].samples.seq_len) == (1, 32)
    check_inputs(config, 1000, sequences=5)
    check_inputs(config, 1000, sequences=4, unit_len=32)
    with pytest.raises(DataError, match="at least 65 tokens"):
        check_inputs(config, 1000, sequences=5, unit_len=32)


def test_packing_without_a_separator_is_refused(tmp_path: Path) -> None:
    source = tokens_file(tmp_path, row_of([3, 9, 4, 5]))
    with pytest.raises(DataError, match=r'packing = "best_fit"(.|\n)*separator_id = N'):
        prepare_here(tmp_path, source, 1000, packing="best_fit")


def test_the_standard_library_is_padded_by_less_than_three_percent(tmp_path: Path) -> None:
    data = Data("python_stdlib", cache_dir=str(tmp_path), packing="best_fit")
    counts = open_packed(prepare(data.source, data, 256, progress=False), data, 2048, progress=False).counts
    assert counts.documents > 500
    assert counts.whole == counts.documents - counts.longer
    assert counts.padded <= 0.03 * counts.bins * counts.seq_len
    assert counts.crossing > 50  # which `concat` cuts


def test_bins_that_are_too_few_for_a_step_are_refused_and_enough_are_taken(tmp_path: Path) -> None:
    """Documents of 6 of 10 tokens fill a bin each: more samples than their tokens would make."""
    packed = open_packed(shards_of(tmp_path, row_of([6] * 10)), Data(), 10, progress=False)
    packed.require(10, "data.source")
    with pytest.raises(DataError, match=r"makes 10 samples of 10 tokens\n.*at least 11 samples"):
        packed.require(11, "data.source")
