"""Read samples made of uncut documents: the bins of `data.packing = "best_fit"`, found by an index of the shards.

The index for samples of S tokens is the folder `<shards>.packed-<S>-<separator>`. Its `spans.bin` has the start in the
corpus (int64) and the length (int32) of each piece, bin by bin. Its `offsets.bin` has the number of the first piece of
each bin, and at the end the number of all pieces (int64). Its `meta.json` has counts and hashes. The index is about one
hundredth of the tokens. It is made once, like shards (`cache.py`), and each block is checked against its hash once.

A sample is a bin: its pieces, then separators as padding up to S tokens, of which each is a document without a target.
The last token of a document has no target either. If a document continues after a piece, the piece's last token has the
next token of the document as its target. So an epoch predicts every token of a document except the first exactly once.
"""

import dataclasses
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from titanlite.config.schema import Data
from titanlite.data.best_fit import SPAN, DocumentCuts, packed_windows
from titanlite.data.cache import make_once
from titanlite.data.cache_folder import unusable_cache
from titanlite.data.corpus import Corpus
from titanlite.data.progress import Progress
from titanlite.data.samples import Samples
from titanlite.data.shards import HashedFile, block_hashes, damaged
from titanlite.durable import write_durably
from titanlite.errors import DataError
from titanlite.json_file import read_json, with_hash, without_hash
from titanlite.kernels.ignore_index import IGNORE_INDEX

_VERSION = 1
COUNTED_TOKENS = 1 << 30
"""Tokens of a source that are read to count its documents and bins: two seconds on one core."""
_BLOCK_TOKENS = 1 << 22  # tokens that are searched for separators at once
_OFFSET = np.dtype("<i8")
_INDEX = "what was written with its meta.json", "index of packed samples"


@dataclass(frozen=True)
class PackingCounts:
    """Counts of the documents of a source, and of the samples of S tokens made from them."""

    seq_len: int  # S
    tokens: int
    documents: int  # includes the last one, even if no separator ends it
    longer: int  # documents of more than S tokens
    crossing: int  # documents of at most S tokens that `concat` cuts
    whole: int  # documents that `best_fit` does not cut
    bins: int  # samples that `best_fit` makes

    @property
    def padded(self) -> int:
        """Return the tokens of padding in the bins of `best_fit`."""
        return self.bins * self.seq_len - self.tokens

    def table(self) -> list[list[str]]:
        """Return the rows of a table that compares `concat` and `best_fit`, the heading first."""
        n_concat, dropped = divmod(max(0, self.tokens - 1), self.seq_len)
        share = f"{self.padded / max(1, self.bins * self.seq_len):.2%}"
        return [
            ["", "concat", "best_fit"],
            [f"samples of {self.seq_len:,} tokens", f"{n_concat:,}", f"{self.bins:,}"],
            ["documents cut that fit", f"{self.crossing:,}", f"{self.documents - self.longer - self.whole:,}"],
            ["documents cut that are longer", f"{self.longer:,}", f"{self.longer:,}"],
            ["tokens padded", "0", f"{self.padded:,}"],
            ["share of padding", "0.00%", share],
            ["tokens dropped", f"{dropped:,}", "0"],
        ]


class PackedSamples(Samples):
    """The samples of a source that `best_fit` has packed: each is a bin of documents or pieces of documents.

    Raises:
        DataError: the index in `folder` was made from other shards, or is damaged.
    """

    def __init__(self, shards: Corpus, folder: Path) -> None:
        self.folder = folder
        try:
            meta = without_hash(read_json(folder / "meta.json"))
            if (meta["version"], meta["fingerprint"]) != (_VERSION, shards.fingerprint):
                raise ValueError(f"version {meta['version']}, of tokens with the fingerprint {meta['fingerprint']}")
            self.counts = PackingCounts(**meta["counts"])
            self.separator = int(meta["separator"])
            self._spans, self._offsets = (
                HashedFile(folder / name, dtype, meta["hashes"][name])
                for name, dtype in (("spans.bin", SPAN), ("offsets.bin", _OFFSET))
            )
        except (OSError, ValueError, TypeError, KeyError) as e:
            raise damaged(folder, f"{type(e).__name__}: {e}", *_INDEX) from e
        super().__init__(shards, self.counts.seq_len)

    @property
    def n(self) -> int:
        """Return the number of bins."""
        return self.counts.bins

    def require(self, least: int, key: str) -> None:
        """Raise a DataError if there are fewer than `least` bins; `key` is the config key of the source."""
        if self.n < least:
            saw = f"{self.shards.meta.source!r}, of which best_fit makes {self.n:,} samples of {self.seq_len} tokens"
            fix = "give more text, or a smaller training.seq_len or batch"
            raise DataError.of("data", key, saw, f"at least {least:,} samples, those of a step", fix)

    def spans(self, sample: int) -> list[tuple[int, int]]:
        """Return (start, length) of a sample's pieces; raise a DataError if the index has changed or cannot be read."""
        try:
            first, last = self._offsets.read(sample, 2).tolist()
            return self._spans.read(first, last - first).tolist()
        except (OSError, ValueError) as e:
            raise damaged(self.folder, f"{type(e).__name__}: {e}", *_INDEX) from e

    def read(self, sample: int) -> np.ndarray:
        """Return the tokens and targets of a bin, [2, S] int64."""
        tokens, targets = pair = np.empty((2, self.seq_len), np.int64)
        tokens[:], targets[:] = self.separator, IGNORE_INDEX
        at = 0
        for start, length in self.spans(sample):
            row = self.shards.read(start, min(length + 1, self.shards.tokens - start))
            tokens[at : at + length] = row[:length]
            targets[at : at + len(row) - 1] = row[1:]
            at += length
        targets[tokens == self.separator] = IGNORE_INDEX
        return pair


def index_folder(shards: Corpus, seq_len: int) -> Path:
    """Return the folder of the packing index of `shards`, which may not exist yet."""
    return shards.folder.with_name(f"{shards.folder.name}.packed-{seq_len}-{shards.separator}")


def open_packed(shards: Corpus, data: Data, seq_len: int, progress: bool) -> PackedSamples:
    """Open the packing index of `shards`; make it first if it does not exist.

    Any number of processes may call this at once: one works, the others wait.

    Raises:
        DataError: a shard has changed, or the cache cannot be written.
    """
    folder, separator = index_folder(shards, seq_len), shards.separator
    assert separator is not None  # noqa: S101  # by `check_used_whole`, token files have a separator
    itemsize = np.dtype(shards.meta.dtype).itemsize

    def make(unfinished: Path, report: Callable[[int], None]) -> None:
        counts = _write_index(unfinished, shards, seq_len, separator, lambda tokens: report(tokens * itemsize))
        hashes = {name: block_hashes(unfinished / name) for name in ("spans.bin", "offsets.bin")}
        of_shards = {"version": _VERSION, "fingerprint": shards.fingerprint, "separator": separator}
        content = {**of_shards, "counts": dataclasses.asdict(counts), "hashes": hashes}
        write_durably(unfinished / "meta.json", with_hash(content, indent=1))

    shown = Progress(f"packing {shards.meta.source} for samples of {seq_len:,} tokens", progress)
    try:
        make_once(folder, make, "packing", shown, shards.tokens * itemsize)
    except OSError as e:
        raise unusable_cache(data, e) from e
    return PackedSamples(shards, folder)


def open_samples(shards: Corpus, data: Data, seq_len: int, progress: bool) -> Samples:
    """Open the samples of a training source, packed if `data.packing` is "best_fit"."""
    return open_packed(shards, data, seq_len, progress) if data.packing == "best_fit" else Samples(shards, seq_len)


def prepared_samples(shards: Corpus, data: Data, seq_len: int) -> Samples | None:
    """Open the samples of a source as `open_samples` does, or return None if they would have to be packed first."""
    is_there = data.packing == "concat" or index_folder(shards, seq_len).is_dir()
    return open_samples(shards, data, seq_len, progress=False) if is_there else None


def documents_in_words(shards: Corpus, counts: PackingCounts | None) -> str:
    """Return the number of documents of a source as text, from its meta.json or else from `counts`."""
    if shards.meta.documents or counts is None:
        return f"{shards.meta.documents:,}" if shards.meta.documents else "not known"
    part = f" in the first {counts.tokens:,} tokens" if counts.tokens < shards.tokens else ""
    return f"{counts.documents:,}{part}"


def count_packing(
    shards: Corpus,
    seq_len: int,
    separator: int,
    limit: int = COUNTED_TOKENS,
    store: Callable[[np.ndarray, np.ndarray], object] = lambda pieces, each: None,
    report: Callable[[int], object] = lambda tokens: None,
) -> PackingCounts:
    """Pack the first `limit` tokens of a source, and return the counts of documents and bins.

    `store` is called with each pair of arrays of `packed_windows`, `report` with the number of tokens read so far.
    """
    bins, cuts, tokens = 0, DocumentCuts(seq_len), min(limit, shards.tokens)
    for pieces, each in packed_windows(_pieces_of(shards, separator, cuts, tokens, report), seq_len):
        store(pieces, each)
        bins += len(each)
    whole = cuts.documents - cuts.longer  # no document of at most S tokens is cut
    return PackingCounts(seq_len, tokens, cuts.documents, cuts.longer, cuts.crossing, whole, bins)


def _write_index(
    folder: Path, shards: Corpus, seq_len: int, separator: int, report: Callable[[int], None]
) -> PackingCounts:
    with (folder / "spans.bin").open("wb") as spans, (folder / "offsets.bin").open("wb") as offsets:
        offsets.write(np.zeros(1, _OFFSET).tobytes())

        def store(pieces: np.ndarray, each: np.ndarray) -> None:
            first = spans.tell() // SPAN.itemsize
            spans.write(pieces.tobytes())
            offsets.write((first + np.cumsum(each)).astype(_OFFSET).tobytes())

        counts = count_packing(shards, seq_len, separator, shards.tokens, store, report)
        for file in (spans, offsets):
            file.flush()
            os.fsync(file.fileno())
    return counts


def _pieces_of(
    shards: Corpus, separator: int, cuts: DocumentCuts, tokens: int, report: Callable[[int], object]
) -> Iterator[np.ndarray]:
    """Yield the pieces of the first `tokens` tokens of a source; a document that continues after them is cut off."""
    for start in range(0, tokens, _BLOCK_TOKENS):
        until = min(start + _BLOCK_TOKENS, tokens)
        ends = np.flatnonzero(shards.read(start, until - start) == separator) + start + 1
        if until == tokens and (not len(ends) or ends[-1] < tokens):
            ends = np.append(ends, tokens)
        yield cuts.cut(ends, until)
        report(until)
