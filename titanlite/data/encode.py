"""Encode documents to token ids, a few MB of text at a time.

Small documents are encoded many at once, on all cores. A large document is cut into pieces first, as encoding a text
takes over a hundred times its memory, and only one core. The pieces give the same tokens as the uncut text, as cuts are
made only at seams: places where the surrounding text has the same tokens in one piece and in two. A tokenizer that puts
a mark before each text, as those made from SentencePiece often do, has no seams and encodes documents uncut.
"""

import re
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import NamedTuple

import numpy as np

from titanlite.data.documents import Document, documents
from titanlite.data.sources import Source
from titanlite.data.tally import Tally
from titanlite.data.tokenizer import EncodingError, Tokenizer

_BATCH_CHARACTERS = 1 << 22  # characters that are encoded at once
_LEAST_CHARACTERS = 200  # that a shorter text counts for, which limits the number of texts in a batch
_PIECE_CHARACTERS = 1 << 17  # least size of a piece; a batch has several pieces for each core
_AROUND_CHARACTERS = 500  # on each side of a place, encoded to test whether the place is a seam
_TRIALS = 16  # places that are tested before the piece is made longer
_PLACES = re.compile(r"(?<=\w)(?=\s)|(?<=\n)(?=\S)")


class Encoded(NamedTuple):
    """Token ids of a document, or of a piece of it."""

    ids: np.ndarray  # [N]
    ends: bool  # the ids end the document; the last one is the separator
    is_bad: bool = False  # the document cannot be used: drop its pieces so far; no more follow


class _Piece(NamedTuple):
    place: str  # where its document is from
    text: str
    ends: bool
    n_bad: int  # number of bad records before its document
    bad: str = ""  # the reason why its document cannot be used


def encode(
    source: Source, text_key: str, tokenizer: Tokenizer, tally: Tally, max_tokens: int = 0
) -> Iterator[list[Encoded]]:
    """Encode the documents of a source of text, in order.

    Args:
        text_key: the field of a record that has its text.
        tally: counts documents and tokens, and as bad the documents that cannot be encoded or contain a separator.
        max_tokens: the document or piece that reaches this number of tokens is the last. 0: encode the whole source.

    Yields:
        The documents and pieces that were encoded at once. A document may continue in the next list.

    Raises:
        DataError: a file cannot be used, or too many records are bad.
    """
    is_bad, n_tokens, n_unknown, n_text = False, 0, 0, 0  # of the current document so far
    batches = _text_batches(_pieces(documents(source, text_key, tally), tokenizer, tally))
    for batch in batches:
        encoded: list[Encoded] = []
        n_read = tally.n_bad
        for n, (piece, ids) in enumerate(zip(batch, _ids([p.text for p in batch], tokenizer), strict=True), 1):
            ends, bad = piece.ends, piece.bad or (ids if isinstance(ids, str) else "")
            if isinstance(ids, str) or bad or (ids == tokenizer.separator_id).any():
                if not is_bad:
                    what = "NUL" if tokenizer.name == "bytes" else f"id {tokenizer.separator_id}"
                    tally.add_bad(piece.place, bad or f"holds {what}, which separates documents")
                    encoded.append(Encoded(np.empty(0, np.uint32), ends=False, is_bad=True))
                is_bad, n_tokens, n_unknown, n_text = True, 0, 0, 0
            elif not is_bad:
                if tokenizer.bos_id is not None and not n_tokens:
                    ids = np.insert(ids, 0, tokenizer.bos_id)
                ends = ends or 0 < max_tokens <= tally.n_tokens + n_tokens + len(ids)
                ended = np.append(ids, ids.dtype.type(tokenizer.separator_id)) if ends else ids
                encoded.append(Encoded(ended, ends))
                n_tokens, n_text = n_tokens + len(ended), n_text + len(piece.text.encode())
                if tokenizer.unknown_id is not None:
                    n_unknown += int(np.count_nonzero(ids == tokenizer.unknown_id))
            if ends:
                tally.n_documents, tally.n_tokens = tally.n_documents + (not is_bad), tally.n_tokens + n_tokens
                tally.n_unknown, tally.n_text_bytes = tally.n_unknown + n_unknown, tally.n_text_bytes + n_text
                is_bad, n_tokens, n_unknown, n_text = False, 0, 0, 0
                if 0 < max_tokens <= tally.n_tokens:
                    # Bad records that were read ahead do not count.
                    tally.is_cut = tally.take_back(piece.n_bad, n_read) or n < len(batch) or _is_more(batches, tally)
                    tally.check()
                    yield encoded
                    return
        tally.check()
        tally.is_between = batch[-1].ends
        yield encoded
    tally.check()


def _ids(texts: list[str], tokenizer: Tokenizer) -> Iterator[np.ndarray | str]:
    """Yield the ids of each text, or the reason why it cannot be encoded."""
    encoded: list[np.ndarray] | list[str] = []
    try:
        encoded = tokenizer.encode_batch(texts)
    except EncodingError as e:
        encoded = [str(e)] if len(texts) == 1 else []
    yield from encoded
    if not encoded:
        half = len(texts) // 2
        for part in (texts[:half], texts[half:]):
            yield from _ids(part, tokenizer)


def _is_more(batches: Iterator[list[_Piece]], tally: Tally) -> bool:
    n_bad = tally.n_bad
    found = next(batches, None) is not None
    return tally.take_back(n_bad, tally.n_bad) or found


def _text_batches(pieces: Iterable[_Piece]) -> Iterator[list[_Piece]]:
    batch: list[_Piece] = []
    n_characters, is_inside = 0, False  # is_inside: the batch begins within a document, and ends with it
    for piece in pieces:
        batch.append(piece)
        n_characters += max(len(piece.text), _LEAST_CHARACTERS)
        if n_characters >= _BATCH_CHARACTERS or (is_inside and piece.ends):
            yield batch
            batch, n_characters, is_inside = [], 0, not piece.ends
    if batch:
        yield batch


def _pieces(texts: Iterable[Document], tokenizer: Tokenizer, tally: Tally) -> Iterator[_Piece]:
    for document in texts:
        n_bad = tally.n_bad
        text, at, n_bytes = "", _PIECE_CHARACTERS, 0  # text not yielded yet, first place for a seam, bytes of the text
        for block in document.blocks:
            text += block  # grows in place: copying the text for each block would take quadratic time
            n_bytes += len(block.encode())
            start = 0
            while at + _PIECE_CHARACTERS <= len(text):
                seam = _seam(text, at, tokenizer)
                if seam is not None:
                    piece = text[start:seam]
                    yield _Piece(document.place, piece, False, n_bad)
                    start = at = seam
                    n_bytes -= len(piece.encode())
                at += _PIECE_CHARACTERS
            text, at = text[start:], at - start
            if n_bytes > tally.max_record_mib << 20:
                yield _Piece(document.place, "", True, n_bad, f"{tally.too_large()}, without a place to cut it")
                break
        else:
            yield _Piece(document.place, text, True, n_bad)


def _seam(text: str, start: int, tokenizer: Tokenizer) -> int | None:
    """Return a place from `start` on where a text can be cut without a change of its tokens; None: not found."""
    for place in islice(_PLACES.finditer(text, start, start + _PIECE_CHARACTERS // 2), _TRIALS):
        cut = place.start()
        left, right = text[cut - min(cut, _AROUND_CHARACTERS) : cut], text[cut : cut + _AROUND_CHARACTERS]
        try:
            whole, *parts = tokenizer.encode_batch([left + right, left, right])
        except EncodingError:  # the tokenizer has no token for a part of a word at these ends
            continue
        if np.array_equal(whole, np.concatenate(parts)):
            return cut
    return None
