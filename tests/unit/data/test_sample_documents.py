"""The documents of a sample, against plain Python, in both ways to pack and in pieces of a sample."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.data.test_packing import SEPARATOR, row_of, shards_of
from titanlite.config.schema import Data
from titanlite.data.document_starts import twice_attended
from titanlite.data.packing import open_packed
from titanlite.data.samples import SampleDocument, Samples


def documents_by_token(row: np.ndarray, places: list[int]) -> list[SampleDocument]:
    """Go through tokens one by one; `places` is where each is in the source."""
    found: list[list[int]] = []
    for at, place in enumerate(places):
        is_new = not found or place == 0 or row[places[at - 1]] == SEPARATOR or places[at - 1] != place - 1
        if is_new:
            found.append([])
        found[-1].append(at)
    return [
        SampleDocument(
            at=of[0],
            length=len(of),
            start=places[of[0]],
            begins=places[of[0]] == 0 or row[places[of[0]] - 1] == SEPARATOR,
            ends=row[places[of[-1]]] == SEPARATOR,
        )
        for of in found
    ]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 30), min_size=2, max_size=30), st.sampled_from((4, 8, 12)), st.sampled_from((1, 2, 4)))
def test_documents_are_those_of_the_tokens(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], seq_len: int, pieces: int
) -> None:
    row = row_of(lengths)
    shards = shards_of(tmp_path_factory.mktemp("d"), row)
    for samples in (Samples(shards, seq_len), open_packed(shards, Data(), seq_len, progress=False)):
        for sample in range(samples.n):
            places = [start + n for start, length in samples.spans(sample) for n in range(length)]
            assert samples.documents(sample) == documents_by_token(row, places)
            size = seq_len // pieces
            for first in range(0, seq_len, size):
                found = samples.documents(sample, first, size)
                assert found == documents_by_token(row, places[first : first + size])
                tokens = samples.read(sample)[0][first : first + size]
                for document in found:
                    there = tokens[document.at : document.at + document.length]
                    assert there.tolist() == row[document.start : document.start + document.length].tolist()


def test_without_a_separator_a_sample_is_one_part(tmp_path: Path) -> None:
    shards = shards_of(tmp_path, row_of([3, 3, 3]))
    shards.separator = None
    assert Samples(shards, 4).documents(1) == [SampleDocument(0, 4, 4, False, False)]


@given(st.lists(st.integers(1, 20), min_size=1, max_size=5), st.integers(0, 25))
def test_attended_pairs_are_counted(lengths: list[int], window: int) -> None:
    """Each query sees its last W keys, and half a pair is taken off for each of W tokens."""
    twice = 0
    for n in lengths:
        W = min(window or n, n)
        twice += 2 * sum(min(q + 1, W) for q in range(n)) - W
    assert twice_attended(np.array(lengths), window) == twice
