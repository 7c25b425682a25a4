"""Yield the batches of one rank, step by step.

A step trains on the next G samples of the order (G = `training.global_batch_size`, or what a stage has); micro-step m
of data-parallel rank r takes `local_batch_size` of them, from the (m·dp + r)·local-th on. So a step's samples are the
same for every number of ranks, and the number of samples trained on, with the stage table, is the whole state.

A thread reads the next step while this one is computed. One thread is enough: a sample is one read of the page cache,
and the ranks of a host need a few megabytes a second. Worker processes would bring signals, forks and shared memory.

Context-parallel ranks are one data-parallel rank here: all read the same samples, and each takes its share of the
tokens (`context_split.py`).
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
    """One micro-batch of one rank, packed: M = local_batch_size · seq_len, or this context-parallel rank's share."""

    tokens: Tensor  # [M] int64
    targets: Tensor  # [M] int64, the token after each in its document; IGNORE_INDEX where there is none
    sequences: Sequences  # S tokens each, with the documents in them if these are masked
    sources: Tensor | None = None  # [B] int64, place of each sequence's, or chunk's, source in `TrainBatches.names`
    is_counted: Tensor | None = None  # [M] bool, which tokens means count, as `counted` says; None: all


class TrainBatches:
    """The micro-batches of one rank in training, without end: epochs follow each other, each in its own order.

    Args:
        sources: samples of each source by name, each of `table.unit_len` tokens.
        table: the stages of the run.
        dp_rank: data-parallel rank; ranks that differ only in tensor parallelism have the same.
        step: the last step done.
        window: tokens within which samples are shuffled, at least one sample; 0: the whole source.
        separators: the id that ends documents, by source, where documents are masked and known.
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
        self.names = self.mixture.names if len(sources) > 1 else ()  # of the sources that have losses of their own
        self.step = step  # the last one whose batches were given
        self.wait_seconds = 0.0  # for which the last `next` waited for the thread
        self.lengths = np.array([unit_len])  # tokens of each document of the last `next`; of each sample without masks
        self._separators = {} if separators is None else separators
        self.is_masked = any(separator is not None for separator in self._separators.values())
        self._sources, self._table, self._window = sources, table, window // unit_len
        self._seeds = {name: seed_of(seed, name) for name in sources}
        self._rank, self._size, self._device, self._context = dp_rank, dp_size, _indexed(device), context
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="batches")
        self._ahead = self._prefetch()

    @property
    def position(self) -> int:
        """Return the samples of all steps whose batches were given; a checkpoint keeps it."""
        return self._table.samples(self.step)

    def next(self, while_waiting: Callable[[float], object] = lambda seconds: None) -> list[Batch]:
        """Return the micro-batches of the next optimizer step, on the device.

        Args:
            while_waiting: called about once a second until they are read, with the seconds since this call.

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
        """Return the micro-batches of a step without a target, for a rank that must take part and has no data."""
        asked = self._table.row(step).asked
        n_micro = asked.sequences // (asked.local_batch_size * self._size)
        sources = np.zeros(asked.local_batch_size, np.int64) if self.names else None
        shape = asked.local_batch_size, asked.seq_len
        return [padding_of(shape, self._device, self.is_masked, self._context, sources)] * n_micro

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _prefetch(self) -> "Future[tuple[_Read, np.ndarray]]":
        return self._thread.submit(self._read, self.step + 1)

    def _read(self, step: int) -> "tuple[_Read, np.ndarray]":
        """Read a step, into pinned memory if it goes to a GPU; return it and the lengths of its documents."""
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
            torch.cuda.set_device(self._device)  # per thread; else pinning would occupy GPU 0 from every rank
            read = read.each(Tensor.pin_memory)
        return read, lengths

    def _pieces(self, name: str, taken: Taken, own: np.ndarray) -> np.ndarray:
        """Read the samples of one source: [2, N, S]."""
        samples, S = self._sources[name], taken.seq_len
        units = samples.in_order(taken.unit[own], self._seeds[name], self._window)
        found = np.empty((2, len(own), S), np.int64)
        for n, (unit, piece) in enumerate(zip(units.tolist(), taken.piece[own].tolist(), strict=True)):
            found[:, n] = samples.read(unit)[:, piece * S : (piece + 1) * S]
        return found


class _Read(NamedTuple):
    """The tensors of a step of a rank; the last two stay on the host."""

    tokens: Tensor  # [micro-steps, M] int64
    targets: Tensor  # [micro-steps, M] int64
    is_counted: Tensor  # [micro-steps, M] bool
    sources: Tensor | None = None  # [micro-steps, B] int64, of each sequence, or chunk
    starts: Tensor | None = None  # [micro-steps, M] int32, where the document of each token starts
    bounds: Tensor | None = None  # [micro-steps, windows, 2, …] int32, of documents; one window without `context`
    places: Tensor | None = None  # [micro-steps, M] int32; places, chunks and counts with `context` alone
    chunks: Tensor | None = None  # [micro-steps, windows, 2, …] int64
    runs: Tensor | None = None  # [micro-steps, windows, …, 5] int64, of bounds
    counts: Tensor | None = None  # [micro-steps, windows, 2, P] int64

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
    """Pack samples, and take this rank's share of each micro-step.

    Args:
        pair: [2, micro-steps, B, S], tokens and targets.
        starts: [micro-steps, B, S], or None.
        sources: [micro-steps, B], or None.
        context: as of `TrainBatches`.
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
        of_chunks = columns[:, :: shares[0].length] // S  # the sample of each
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
    """Return the sequences of a micro-batch of N tokens for a rank, each sample one document, with their bounds."""
    return padding_of((tokens // seq_len, seq_len), device, True, context).sequences


class ValidationBatches:
    """Every sample of a held-out corpus once, over all ranks; may be iterated any number of times.

    Ranks with nothing left get padding without targets, so that all ranks take the same number of steps, and the sum of
    losses over the count of targets is that of the corpus under any layout.

    Args:
        global_batch_size: samples per global batch, of which `steps` are read, from the first sample on.
        steps: -1: the whole corpus.
        separator: the id that ends documents, if they are masked.
        context: as of `TrainBatches`.
        key: the config key of the source.

    Raises:
        DataError: the corpus has no sample, or none of those that are read has a target.
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
        end = self.n_samples * seq_len
        read = (shards.read(start, min(BLOCK_BYTES, end - start)) for start in range(0, end, BLOCK_BYTES))
        require_target(read, separator, shards.meta.source, key)
        self._samples = Samples(shards, seq_len)
        self._device, self._separator, self._context = device, separator, context
        per_turn = local_batch_size * dp_size
        turns = -(-self.n_samples // per_turn)
        self._turns = np.arange(turns * per_turn).reshape(turns, dp_size, local_batch_size)[:, dp_rank]

    def __len__(self) -> int:
        """Batches per rank, the same for all."""
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
        """Return a batch without a target, as `TrainBatches.padding`."""
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
    """Make a batch of [B, S] tokens without a target.

    Args:
        shape: B and S.
        is_masked: whether attention keeps to documents.
        context: as of `TrainBatches`.
        sources: [B] int64, or None.
        starts: [B·S] int32, where the document of each token begins, with `is_masked`; None: each sample is one.
    """
    pair = np.zeros((2, 1, *shape), np.int64)
    pair[1] = IGNORE_INDEX
    if is_masked:
        starts = documents_of_samples(shape[0] * shape[1], shape[1]) if starts is None else starts
        starts = starts.reshape(1, *shape)
    read = _read_of(pair, starts, None if sources is None else sources[None], context)
    return _only_batch(read, shape[1], context, device)


def _indexed(device: torch.device) -> torch.device:
    """Give `cuda` this thread's index; in another thread it would mean GPU 0."""
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device
