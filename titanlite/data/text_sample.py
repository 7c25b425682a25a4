"""Read a sample of a source of text, to count the source's tokens or to train a tokenizer before all of it is read.

The sample has the beginnings of files in an order that is random and always the same, or the first rows of a dataset.
Records that cannot be used are passed over: who reads the whole source reports them.
"""

import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from titanlite.config.schema import Data
from titanlite.data.documents import documents
from titanlite.data.sources import JSON_LINES, Source, SourceFile, ending, unreadable
from titanlite.data.tally import Tally
from titanlite.data.tokenizer import Tokenizer

_FILES = 16  # files, if there are as many, that a sample is at least from
_PIECE_CHARACTERS = 1 << 17  # of a text that is encoded at once: encoding takes a hundred times its memory


@dataclass(frozen=True)
class TextSample:
    """Texts of a source, and how much of it they are.

    Attributes:
        texts: documents; of a .txt file its beginning.
        share: bytes of the source's files that were read over all, or rows over all; None: not known.
        origin: the sample's size and place, in words.
    """

    texts: list[str]
    share: float | None
    origin: str

    @property
    def n_bytes(self) -> int:
        """Return the bytes of the texts in UTF-8."""
        return _n_bytes(self.texts)

    def count_tokens(self, tokenizer: Tokenizer) -> int:
        """Return the number of tokens of the texts, with those that begin and end documents.

        Raises:
            EncodingError: the tokenizer has no ids for a text.
        """
        ids = tokenizer.encode_batch([piece for text in self.texts for piece in _in_pieces(text)])
        return sum(map(len, ids)) + len(self.texts) * (1 + (tokenizer.bos_id is not None))


def read_sample(source: Source, data: Data, most: int) -> TextSample:
    """Read about `most` bytes of text of a source that is not token files.

    Raises:
        DataError: a file or the dataset cannot be read, or a package that reads it is missing.
    """
    source.require_packages()
    if source.dataset:
        tally = _tally(source, data)
        texts, done = _first_texts(source, data, tally, most)
        whole = tally.all_bytes or tally.all_rows
        origin = f"its first {len(texts):,} documents"
    else:
        files, texts, done, n_text, n_files = source.files, list[str](), 0, 0, 0
        for file in random.Random(0).sample(files, len(files)):
            found, n_read = _texts_of_file(source, file, data, min(most // min(len(files), _FILES), most - n_text))
            texts += found
            done, n_text, n_files = done + n_read, n_text + _n_bytes(found), n_files + 1
            if n_text >= most:
                break
        whole = sum(file.stat().st_size for file in files)
        part = f"{done / 1e6:,.1f} of its {whole / 1e6:,.1f} MB, the beginnings of {n_files:,} of {len(files):,} files"
        origin = f"all of its {whole / 1e6:,.1f} MB" if done == whole else part
    return TextSample(texts, min(1.0, done / whole) if whole else None, origin)


def _texts_of_file(source: Source, file: SourceFile, data: Data, most: int) -> tuple[list[str], int]:
    """Return documents from the beginning of a file, about `most` bytes of text, and the file's bytes read for them."""
    try:
        if ending(file) not in (*JSON_LINES, ".parquet"):
            with file.open("rb") as opened:
                content = opened.read(most)
            return [content.decode("utf-8-sig", "ignore")] * bool(content), len(content)
        return _first_texts(replace(source, files=(file,)), data, _tally(source, data), most)
    except OSError as e:
        raise unreadable(source.name, source.key, file, e) from e


def _first_texts(source: Source, data: Data, tally: Tally, most: int) -> tuple[list[str], int]:
    """Return the first texts of a source, and the bytes of its files, or the rows, that were read for them.

    A compressed file is read in blocks: reading ends at the begin of a block, else part of the last would be counted
    that has none of the texts.
    """
    texts, n_text, before = list[str](), 0, 0
    for document in documents(source, data.text_key, tally):
        done = _read_so_far(source, tally)
        if n_text >= most and done > before:
            return texts, before
        texts.append("".join(document.blocks))
        n_text, before = n_text + len(texts[-1].encode()), done
    return texts, _read_so_far(source, tally)


def _read_so_far(source: Source, tally: Tally) -> int:
    return tally.record if source.dataset and not tally.all_bytes else tally.n_bytes


def _n_bytes(texts: Sequence[str]) -> int:
    return sum(len(text.encode()) for text in texts)


def _tally(source: Source, data: Data) -> Tally:
    return Tally(source.name, source.key, sys.maxsize, max_record_mib=data.max_record_mib)


def _in_pieces(text: str) -> Iterator[str]:
    return (text[at : at + _PIECE_CHARACTERS] for at in range(0, len(text), _PIECE_CHARACTERS))
