"""Documents found in tokens, against a walk through them token by token."""

import numpy as np

from titanlite.data.document_starts import NO_SEPARATOR, counted, document_lengths, document_starts, mask_documents


def walked(tokens: np.ndarray, separators: np.ndarray) -> list[int]:
    """Where the document of each token begins, of samples packed one after the other."""
    found, at = list[int](), 0
    for sample, separator in zip(tokens.tolist(), separators.tolist(), strict=True):
        start = at
        for token in sample:
            found.append(start)
            at += 1
            start = at if token == separator else start
    return found


def test_documents_begin_after_separators_and_with_samples() -> None:
    random = np.random.default_rng(0)
    for S in (1, 2, 7, 32):
        tokens = random.integers(0, 4, (3, 5, S))  # micro-steps, samples, tokens
        separators = np.array([0, 1, NO_SEPARATOR, 9, 0])  # 9 does not occur
        starts = document_starts(tokens, separators)
        assert starts.dtype == np.int32
        wanted = [walked(micro, separators) for micro in tokens]
        assert starts.reshape(3, -1).tolist() == wanted
        lengths = [n for micro in wanted for n in np.unique(micro, return_counts=True)[1].tolist()]
        assert document_lengths(starts).tolist() == lengths


def test_a_separator_alone_is_a_document_and_one_may_fill_a_sample() -> None:
    starts = document_starts(np.array([[0, 0, 5, 0, 5], [5, 5, 5, 5, 0], [5, 5, 5, 5, 5]]), np.zeros(3, int))
    assert starts.tolist() == [[0, 1, 2, 2, 4], [5, 5, 5, 5, 5], [10, 10, 10, 10, 10]]
    assert document_lengths(starts).tolist() == [1, 1, 2, 1, 5, 5]


def test_what_has_no_target_and_is_none_is_not_counted() -> None:
    """A separator that a sample begins with, one behind another, and padding; but not a last token that is a first."""
    ids = np.array([[5, 1, 2, 3, 9], [9, 4, 4, 4, 9], [9, 9, 4, 9, 4]])
    pair = np.stack((ids, np.append(ids.flatten()[1:], 7).reshape(ids.shape)))
    assert counted(pair[1]).all()  # without a mask
    mask_documents(pair, np.full(3, 9))
    assert counted(pair[1]).tolist() == [[True] * 5, [False, *[True] * 4], [False, False, True, True, True]]
