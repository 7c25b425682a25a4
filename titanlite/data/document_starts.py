"""Find the documents in samples of tokens: each document ends with a separator id.

A text that contains the separator is refused as a bad record. So the tokens alone show where documents end, however
samples are cut, and no index of documents is needed.
"""

from collections.abc import Iterable

import numpy as np

from titanlite.errors import DataError
from titanlite.kernels.ignore_index import IGNORE_INDEX

NO_SEPARATOR = -1
"""The separator of a sample whose documents are not known, so that the sample counts as one document."""


def document_starts(tokens: np.ndarray, separators: np.ndarray) -> np.ndarray:
    """Return where the document of each token begins.

    Args:
        tokens: [..., B, S], ids of B samples of S tokens that are joined to B · S tokens.
        separators: [B] or [..., B], the id that ends a document in each sample, or NO_SEPARATOR.

    Returns:
        [..., B, S] int32, the position of the document's first token among the B · S tokens. The first token of a
        sample begins a document, and so does each token after a separator.
    """
    B, S = tokens.shape[-2:]
    places = np.arange(B * S, dtype=np.int32).reshape(B, S)
    begins = np.ones(tokens.shape, bool)
    begins[..., 1:] = tokens[..., :-1] == separators[..., None]
    return np.maximum.accumulate(np.where(begins, places, 0), axis=-1)


def mask_documents(pair: np.ndarray, separators: np.ndarray) -> np.ndarray:
    """Remove, in place, each separator's target in tokens and targets, [2, …, B, S]; return where documents begin."""
    tokens, targets = pair
    targets[tokens == separators[..., None]] = IGNORE_INDEX
    return document_starts(tokens, separators)


def counted(targets: np.ndarray) -> np.ndarray:
    """Return which tokens count in means over tokens: tokens with a target, and targets of other tokens of the sample.

    All other tokens are padding, or the last token of a document whose earlier tokens are not in the sample.

    Args:
        targets: [..., S], IGNORE_INDEX where a token has no target.

    Returns:
        [..., S] bool.
    """
    predicts = targets != IGNORE_INDEX
    is_predicted = np.zeros_like(predicts)
    is_predicted[..., 1:] = predicts[..., :-1]
    return predicts | is_predicted


def require_target(ids: Iterable[np.ndarray], separator: int | None, source: str, key: str) -> None:
    """Raise a DataError if all `ids` of a source are separators: with masked documents no token would have a target.

    `separator` is None if documents are not masked; nothing is checked then.
    """
    if separator is None or any((some != separator).any() for some in ids):
        return
    saw = f"{source!r}, of which nothing is read but the id {separator}, which ends documents"
    fix = "give another source, or correct data.separator_id; if it only begins so, raise validation.steps"
    raise DataError.of("data", key, saw, "at least one token that has a target", fix)


def document_lengths(starts: np.ndarray) -> np.ndarray:
    """Return the number of tokens of each document, [documents]; `starts` is the result of `document_starts`."""
    packed = starts.reshape(-1, starts.shape[-2] * starts.shape[-1])
    begins = packed == np.arange(packed.shape[1])
    return np.diff(np.append(np.flatnonzero(begins), packed.size))


def document_bounds(starts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return `titanlite.kernels.attention.Bounds` as arrays, [2, n] int32 and [1, 5] int64; `starts` is [M] int32."""
    M = len(starts)
    begins = np.flatnonzero(starts == np.arange(M))
    at = np.full((2, room_of_run(M)), M, np.int32)
    at[:, : len(begins)] = begins
    return at, np.array([[0, 0, M, 0, bounds_of_run(len(begins))]])


def bounds_of_run(pieces: int) -> int:
    """Return how many bounds a run has: `pieces` rounded up to a multiple of 16, plus 1 for the end.

    Rounding keeps the number of different values small: for each one, kernels choose anew how to divide their work.
    """
    return -(-pieces // 16) * 16 + 1


def room_of_run(pieces: int) -> int:
    """Return how many int32 to reserve for a run's bounds, so that the next run begins at a multiple of 64 bytes."""
    return -(-pieces // 16) * 16 + 16


def twice_attended(lengths: np.ndarray, window: int = 0) -> int:
    """Return twice the number of pairs (query, key) in documents of `lengths` tokens; a token with itself counts half.

    A document of n tokens has W·(2·n − W) if a token attends to at most W tokens, itself included; n² without a window.
    """
    W = np.minimum(window or lengths, lengths)
    return int((W * (2 * lengths - W)).sum())
