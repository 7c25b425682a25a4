"""Yield the batches of one rank, step by step.

A step trains on the next G samples of the order (G = `training.global_batch_size`, or the batch size of a stage). In
micro-step m, rank r of dp data-parallel ranks takes L = `local_batch_size` of them, starting at number (m·dp + r)·L. So
a step trains on the same samples for every number of ranks. To resume, the number of samples trained on and the stage
table are enough.

A thread reads the samples of the next step while the current step is computed. One thread is enough: a sample is one
read of the page cache, and the ranks of a host need a few megabytes a second. Worker processes would require code for
signals, forks and shared memory.

The ranks of a context-parallel group count as one data-parallel rank: all read the same samples, and each takes its
share of the tokens (`context_split.py`).
"""

import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from titanlite.data.context_split import ContextGroup, documents_of_samples, share_of_rank
from titanlite.data.corpus import Corpus
from titanlite.data.document_starts import (
    NO_SEPARATOR,
    counted,
    document_bounds,
    document_lengths,
    mask_documents,
    require_target,
)
from titanlite.data.mixture import Mixture, Taken, seed_of
from titanlite.data.samples import SampleCounts, Samples
from titanlite.data.shards import BLOCK_BYTES, sample_count
from titanlite.data.stages import StageTable
from titanlite.kernels.attention import Bounds
from titanlite.kernels.context_attention import KeyChunks
from titanlite.kernels.cross_entropy import IGNORE_INDEX
from titanlite.models.layers import Sequences

_WAIT_SECONDS = 1.0


@dataclass(frozen=True)
class Batch:
    """One micro-batch of one rank, M tokens: local_batch_size · seq_len, or a context-parallel rank's share of them."""

    tokens: Tensor  # [M] int64
    targets: Tensor  # [M] int64, the next token of the same document; IGNORE_INDEX if there is none
    sequences: Sequences  # samples of S tokens each; with the bounds of documents if documents are masked
    sources: Tensor | None = None  # [B] int64, source of each sample, or with `context` chunk; see `Mixture.names`
    is_counted: Tensor | None = None  # [M] bool, tokens that means over tokens include (see `counted`); None: all


class TrainBatches:
    """The endless micro-batches of one rank in training: epochs follow each other, each in its own order.

    Args:
        sources: the samples of each source, by its name; each sample has `table.unit_len` tokens.
        table: the stages of the run.
        dp_rank: data-parallel rank; ranks that differ only in tensor parallelism have the same one.
        step: the last step that was trained.
        window: samples are shuffled within windows of so many tokens, at least one sample; 0: within the whole source.
        separators: if documents are masked, the id that ends documents, by source name; None: not known.
        context: the context-parallel ranks; None: this rank has all tokens.
    """

    def __init__(
        self,
        sources: Mapping[str, Samples],
        table: StageTable,
        *,
        seed: int,
        dp_rank: int,
        dp_size: int,
        device: torch.device,
        step: int = 0,
        window: int = 0,
        separators: Mapping[str, int | None] | None = None,
        context: ContextGroup | None = None,
    ) -> None:
        unit_len = table.unit_len
        self.mixture = Mixture(table, SampleCounts(sources))
        self.names = self.mixture.names if len(sources) > 1 else ()  # sources whose losses are logged apart
        self.step = step  # the last step whose batches were returned
        self.wait_seconds = 0.0  # time that the last `next` waited for the reading thread
        self.lengths = np.array([unit_len])  # tokens of each document (unmasked: sample) in the last step
        self._separators = {} if separators is None else separators
        self.is_masked = any(separator is not None for separator in self._separators.values())
        self._sources, self._table, self._window = sources, table, window // unit_len
        self._seeds = {name: seed_of(seed, name) for name in sources}
        self._rank, self._size, self._device, self._context = dp_rank, dp_size, _indexed(device), context
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="batches")
        self._ahead = self._prefetch()

    @property
    def position(self) -> int:
        """Return the number of samples in all steps whose batches were returned; a checkpoint stores it."""
        return self._table.samples(self.step)

    def next(self, while_waiting: Callable[[float], object] = lambda seconds: None) -> list[Batch]:
        """Return the micro-batches of the next optimizer step, on the device.

        Args:
            while_waiting: called about once a second until the batches are read, with the seconds since the call.

        Raises:
            DataError: a shard has changed, or cannot be read any more.
        """
        started = time.monotonic()
        while wait([self._ahead], _WAIT_SECONDS).not_done:
            while_waiting(time.monotonic() - started)
        read, self.lengths = self._ahead.result()
        self.wait_seconds = time.monotonic() - started
        self.step += 1
        seq_len = self._table.row(self.step).asked.seq_len
        self._ahead = self._prefetch()
        on_device = read.each(lambda tensor: tensor.to(self._device, non_blocking=True))
        return [on_device.batch(n, seq_len, self._context) for n in range(len(on_device.tokens))]

    def padding(self, step: int) -> list[Batch]:
        """Return the micro-batches of `step` without any target, for a rank that must take part but has no data."""
        asked = self._table.row(step).asked
        n_micro = asked.sequences // (asked.local_batch_size * self._size)
        sources = np.zeros(asked.local_batch_size, np.int64) if self.names else None
        shape = asked.local_batch_size, asked.seq_len
        return [padding_of(shape, self._device, self.is_masked, self._context, sources)] * n_micro

    def close(self) -> None:
        """End the thread that reads batches."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _prefetch(self) -> "Future[tuple[_Read, np.ndarray]]":
        return self._thread.submit(self._read, self.step + 1)

    def _read(self, step: int) -> "tuple[_Read, np.ndarray]":
        """Read this rank's samples of a step, for a GPU into pinned memory; also return the lengths of documents."""
        row = self._table.row(step)
        places = np.arange(row.asked.sequences).reshape(-1, self._size, row.asked.local_batch_size)[:, self._rank]
        taken = self.mixture.taken(row, self._table.samples(step - 1) + places.ravel())
        pair = np.empty((2, places.size, taken.seq_len), np.int64)
        separators = np.full(places.size, NO_SEPARATOR)
        for n, name in enumerate(self.mixture.names):
            own = np.flatnonzero(taken.source == n)
            if own.size:
                pair[:, own] = self._pieces(name, taken, own)
                separators[own] = NO_SEPARATOR if (separator := self._separators.get(name)) is None else separator
        pair, separators = pair.reshape(2, *places.shape, -1), separators.reshape(places.shape)
        starts = mask_documents(pair, separators) if self.is_masked else None
        lengths = np.full(places.size, taken.seq_len) if starts is None else document_lengths(starts)
        sources = taken.source.reshape(places.shape) if self.names else None
        read = _read_of(pair, starts, sources, self._context)
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # set for each thread: without it, pinning uses memory of GPU 0
            read = read.each(Tensor.pin_memory)
        return read, lengths

    def _pieces(self, name: str, taken: Taken, own: np.ndarray) -> np.ndarray:
        """Return tokens and targets of the samples of source `name`, at the indices `own` of `taken`, [2, N, S]."""
        samples, S = self._sources[name], taken.seq_len
        units = samples.in_order(taken.unit[own], self._seeds[name], self._window)
        found = np.empty((2, len(own), S), np.int64)
        for n, (unit, piece) in enumerate(zip(units.tolist(), taken.piece[own].tolist(), strict=True)):
            found[:, n] = samples.read(unit)[:, piece * S : (piece + 1) * S]
        return found


class _Read(NamedTuple):
    """The tensors of `Batch` for all micro-steps of a step, on one rank; `runs` and `counts` stay on the host."""

    tokens: Tensor  # [micro-steps, M] int64
    targets: Tensor  # [micro-steps, M] int64
    is_counted: Tensor  # [micro-steps, M] bool
    sources: Tensor | None = None  # [micro-steps, B] int64, as in `Batch`
    starts: Tensor | None = None  # [micro-steps, M] int32, where the document of each token starts
    bounds: Tensor | None = None  # [micro-steps, windows, 2, …] int32, `Bounds.at`; one window without `context`
    places: Tensor | None = None  # [micro-steps, M] int32, `Share.columns`; None without `context`
    chunks: Tensor | None = None  # [micro-steps, windows, 2, …] int64, as in `Share`; None without `context`
    runs: Tensor | None = None  # [micro-steps, windows, …, 5] int64, `Bounds.runs`
    counts: Tensor | None = None  # [micro-steps, windows, 2, P] int64, as in `Share`; None without `context`

    def each(self, change: Callable[[Tensor], Tensor]) -> "_Read":
        changed = (None if tensor is None else change(tensor) for tensor in self[:-2])
        return self._make((*changed, *self[-2:]))

    def batch(self, n: int, seq_len: int, context: ContextGroup | None) -> Batch:
        of = self._make(None if tensor is None else tensor[n] for tensor in self)
        sequences = Sequences(seq_len)
        if of.starts is not None and of.bounds is not None and of.runs is not None:
            if of.places is None or of.chunks is None or of.counts is None or context is None:
                sequences = Sequences(seq_len, of.starts, {0: Bounds(of.bounds[0], of.runs[0])})
            else:
                bounds = dict(zip(context.windows, map(Bounds, of.bounds, of.runs), strict=True))
                exchanges = dict(zip(context.windows, map(KeyChunks, of.chunks, of.counts), strict=True))
                sequences = Sequences(seq_len, of.starts, bounds, of.places, exchanges, context.name)
        return Batch(of.tokens, of.targets, sequences, of.sources, of.is_counted)


def _read_of(
    pair: np.ndarray, starts: np.ndarray | None, sources: np.ndarray | None, context: ContextGroup | None
) -> _Read:
    """Join the B samples of each micro-step, and take this context-parallel rank's share of their tokens.

    Args:
        pair: [2, micro-steps, B, S], tokens and targets.
        starts: [micro-steps, B, S], where the document of each token begins; None: documents are not masked.
        sources: [micro-steps, B], source of each sample, or None.
        context: as in `TrainBatches`.
    """
    S, packed = pair.shape[-1], pair.reshape(*pair.shape[:2], -1)
    is_counted = counted(pair[1]).reshape(packed.shape[1:])
    flat = None if starts is None else starts.reshape(packed.shape[1:])
    found: dict[str, np.ndarray | None]
    if context is None:
        found = {"tokens": packed[0], "targets": packed[1], "is_counted": is_counted, "sources": sources}
        if flat is not None:
            bounds, runs = zip(*map(document_bounds, flat), strict=True)
            found |= {"starts": flat, "bounds": np.stack(bounds)[:, None], "runs": np.stack(runs)[:, None]}
    else:
        if flat is None:
            flat = np.broadcast_to(documents_of_samples(packed.shape[-1], S), packed.shape[1:])
        shares = [share_of_rank(own, S, context) for own in flat]
        columns = np.stack([own.columns for own in shares])
        of_chunks = columns[:, :: shares[0].length] // S  # the sample in which each chunk lies
        of_tokens = {"tokens": packed[0], "targets": packed[1], "is_counted": is_counted, "starts": flat}
        found = {name: np.take_along_axis(of, columns, 1) for name, of in of_tokens.items()}
        found |= {
            "sources": None if sources is None else np.take_along_axis(sources, of_chunks, 1),
            "places": columns.astype(np.int32),
        }
        for name in ("bounds", "runs", "chunks", "counts"):
            found[name] = np.stack([getattr(own, name) for own in shares])
    return _Read(**{name: torch.from_numpy(of) for name, of in found.items() if of is not None})


def _only_batch(read: _Read, seq_len: int, context: ContextGroup | None, device: torch.device) -> Batch:
    return read.each(lambda tensor: tensor.to(device)).batch(0, seq_len, context)


def sequences_of_samples(tokens: int, seq_len: int, context: ContextGroup | None, device: torch.device) -> Sequences:
    """Return this rank's `Sequences` for a micro-batch of `tokens` tokens in which each sample is one document."""
    return padding_of((tokens // seq_len, seq_len), device, True, context).sequences


class ValidationBatches:
    """The batches of one rank over a held-out corpus; all ranks together read each sample once.

    It can be iterated repeatedly. Ranks without samples left get padding without targets, so that all ranks take the
    same number of steps. The sum of losses divided by the number of targets is the same for every number of ranks.

    Args:
        global_batch_size: samples per global batch.
        steps: global batches to read from the start of the corpus; -1: the whole corpus.
        separator: the id that ends documents; None: documents are not masked.
        context: as in `TrainBatches`.
        key: the config key of the source.

    Raises:
        DataError: the corpus has no sample, or the samples to read have no target.
    """

    def __init__(
        self,
        shards: Corpus,
        *,
        seq_len: int,
        global_batch_size: int,
        local_batch_size: int,
        steps: int,
        dp_rank: int,
        dp_size: int,
        device: torch.device,
        separator: int | None = None,
        context: ContextGroup | None = None,
        key: str = "validation.source",
    ) -> None:
        available = sample_count(shards.meta.source, shards.tokens, seq_len, key=key)
        self.n_samples = available if steps < 0 else min(available, steps * global_batch_size)
        self.fingerprint = f"{self.n_samples} samples, separator {separator}, of {shards.fingerprint}"
        """Says on what a loss over these batches is measured."""
        end = self.n_samples * seq_len
        read = (shards.read(start, min(BLOCK_BYTES, end - start)) for start in range(0, end, BLOCK_BYTES))
        require_target(read, separator, shards.meta.source, key)
        self._samples = Samples(shards, seq_len)
        self._device, self._separator, self._context = device, separator, context
        per_turn = local_batch_size * dp_size
        turns = -(-self.n_samples // per_turn)
        self._turns = np.arange(turns * per_turn).reshape(turns, dp_size, local_batch_size)[:, dp_rank]

    def __len__(self) -> int:
        """Return the number of batches per rank, which is equal on all ranks."""
        return len(self._turns)

    def __iter__(self) -> Iterator[Batch]:
        seq_len = self._samples.seq_len
        for samples in self._turns:
            pair = np.zeros((2, len(samples), seq_len), np.int64)
            pair[1] = IGNORE_INDEX
            for i, sample in enumerate(samples[samples < self.n_samples]):
                pair[:, i] = self._samples.read(int(sample))
            separator = self._separator
            starts = None if separator is None else mask_documents(pair, np.full(len(samples), separator))
            read = _read_of(pair[:, None], None if starts is None else starts[None], None, self._context)
            yield _only_batch(read, seq_len, self._context, self._device)

    def padding(self) -> Batch:
        """Return a batch without any target, for a rank that must take part in a step without data."""
        shape = self._turns.shape[1], self._samples.seq_len
        return padding_of(shape, self._device, self._separator is not None, self._context)


def padding_of(
    shape: tuple[int, int],
    device: torch.device,
    is_masked: bool,
    context: ContextGroup | None,
    sources: np.ndarray | None = None,
    starts: np.ndarray | None = None,
) -> Batch:
    """Make a batch of [B, S] tokens of which none has a target.

    Args:
        shape: B and S.
        is_masked: whether attention stays within documents.
        context: as in `TrainBatches`.
        sources: [B] int64, the source of each sample, or None.
        starts: [B·S] int32, where the document of each token begins, if `is_masked`; None: each sample is a document.
    """
    pair = np.zeros((2, 1, *shape), np.int64)
    pair[1] = IGNORE_INDEX
    if is_masked:
        starts = documents_of_samples(shape[0] * shape[1], shape[1]) if starts is None else starts
        starts = starts.reshape(1, *shape)
    read = _read_of(pair, starts, None if sources is None else sources[None], context)
    return _only_batch(read, shape[1], context, device)


def _indexed(device: torch.device) -> torch.device:
    """Add the index of this thread's current GPU to a plain `cuda`, which means GPU 0 in any other thread."""
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device
