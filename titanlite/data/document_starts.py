"""Find the documents in samples of tokens: each ends with a separator.

A text that holds a separator is a bad record, so that the tokens themselves say where documents end, whatever a sample
is cut from; there is no index beside them.
"""

from collections.abc import Iterable

import numpy as np

from titanlite.errors import DataError
from titanlite.kernels.ignore_index import IGNORE_INDEX

NO_SEPARATOR = -1
"""The separator of a sample whose documents are not known, so that the sample counts as one."""


def document_starts(tokens: np.ndarray, separators: np.ndarray) -> np.ndarray:
    """Say where the document of each token begins.

    Args:
        tokens: [..., B, S], samples that are packed B at a time.
        separators: [B] or [..., B], the id that ends a document in each sample, or NO_SEPARATOR.

    Returns:
        [..., B, S] int32: places among the B · S tokens that are packed. A sample's first token begins a document,
        and so does each token after a separator.
    """
    B, S = tokens.shape[-2:]
    places = np.arange(B * S, dtype=np.int32).reshape(B, S)
    begins = np.ones(tokens.shape, bool)
    begins[..., 1:] = tokens[..., :-1] == separators[..., None]
    return np.maximum.accumulate(np.where(begins, places, 0), axis=-1)


def mask_documents(pair: np.ndarray, separators: np.ndarray) -> np.ndarray:
    """Remove the target of each separator in tokens and targets, [2, …, B, S]; return `document_starts`."""
    tokens, targets = pair
    targets[tokens == separators[..., None]] = IGNORE_INDEX
    return document_starts(tokens, separators)


def counted(targets: np.ndarray) -> np.ndarray:
    """Say which tokens count in means over tokens: those that have a target, or are a target of their sample.

    The rest is padding, or the last token of a document whose other tokens are not in the sample.

    Args:
        targets: [..., S], IGNORE_INDEX where a token has none.

    Returns:
        [..., S] bool.
    """
    predicts = targets != IGNORE_INDEX
    is_predicted = np.zeros_like(predicts)
    is_predicted[..., 1:] = predicts[..., :-1]
    return predicts | is_predicted


def require_target(ids: Iterable[np.ndarray], separator: int | None, source: str, key: str) -> None:
    """Raise a DataError if all `ids` of a source are separators: where documents are masked, none has a target.

    `separator` is None where documents are not masked.
    """
    if separator is None or any((some != separator).any() for some in ids):
        return
    saw = f"{source!r}, of which nothing is read but the id {separator}, which ends documents"
    fix = "give another source, or correct data.separator_id; if it only begins so, raise validation.steps"
    raise DataError.of("data", key, saw, "at least one token that has a target", fix)


def document_lengths(starts: np.ndarray) -> np.ndarray:
    """Count the tokens of each document of packed samples, [n], in order."""
    packed = starts.reshape(-1, starts.shape[-2] * starts.shape[-1])
    begins = packed == np.arange(packed.shape[1])
    return np.diff(np.append(np.flatnonzero(begins), packed.size))


def document_bounds(starts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return where documents begin as `titanlite.kernels.attention.Bounds` has it, [2, n] int32 and [1, 5] int64."""
    M = len(starts)
    begins = np.flatnonzero(starts == np.arange(M))
    at = np.full((2, room_of_run(M)), M, np.int32)
    at[:, : len(begins)] = begins
    return at, np.array([[0, 0, M, 0, bounds_of_run(len(begins))]])


def bounds_of_run(pieces: int) -> int:
    """Return how many bounds a run of pieces has: padded to a multiple of 16, and the end.

    Kernels choose anew how they divide the work for each number of bounds.
    """
    return -(-pieces // 16) * 16 + 1


def room_of_run(pieces: int) -> int:
    """Return the room for a run's bounds: the next run's begin at a multiple of 64 bytes."""
    return -(-pieces // 16) * 16 + 16


def twice_attended(lengths: np.ndarray, window: int = 0) -> int:
    """Return twice the pairs of tokens that attention forms in documents, a token with itself counted by half.

    A document of n tokens has W·(2·n − W), where a token attends to at most W, itself included; n² without a window.
    """
    W = np.minimum(window or lengths, lengths)
    return int((W * (2 * lengths - W)).sum())
