"""Yield the batches of one rank, step by step.

A step trains on the next G positions of the global order (G = `training.global_batch_size`); micro-step m of
data-parallel rank r takes `local_batch_size` of them, from the (m·dp + r)·local-th on. So a step's samples are the same
for every number of ranks, and the number of samples trained on is the whole state.

A thread reads the next step while this one is computed. One thread is enough: a sample is one read of the page cache,
and the ranks of a host need a few megabytes a second. Worker processes would bring signals, forks and shared memory.
"""

import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from titanlite.data.document_starts import document_lengths, document_starts
from titanlite.data.samples import ConcatenatedSamples, Samples
from titanlite.data.shards import TokenShards, sample_count
from titanlite.data.windows import units_at
from titanlite.kernels.cross_entropy import IGNORE_INDEX
from titanlite.models.layers import Sequences


@dataclass(frozen=True)
class Batch:
    """One micro-batch of one rank, packed: sequences one after the other, M = local_batch_size · seq_len."""

    tokens: Tensor  # [M] int64
    targets: Tensor  # [M] int64, the token after each in its document; IGNORE_INDEX where there is none
    sequences: Sequences  # S tokens each, with the documents in them if these are masked


class TrainBatches:
    """The micro-batches of one rank in training, without end: epochs follow each other, each in its own order.

    Args:
        shards: the corpus.
        seq_len: tokens per sample (S).
        seed: of the order.
        global_batch_size: samples per step over all ranks, a multiple of local_batch_size · dp_size.
        local_batch_size: samples per micro-batch.
        dp_rank: data-parallel rank; ranks that differ only in tensor parallelism have the same.
        dp_size: number of data-parallel ranks.
        device: where the batches are to be.
        position: in the global order, of the first sample: as many as were trained on before.
        window: tokens within which samples are shuffled, at least seq_len; 0: the whole corpus.
        packed: the samples, where they are not those of the concatenated documents.
        separator: id that ends each document, if documents are masked.

    Raises:
        DataError: the corpus has fewer samples than one global batch.
    """

    def __init__(
        self,
        shards: TokenShards,
        *,
        seq_len: int,
        seed: int,
        global_batch_size: int,
        local_batch_size: int,
        dp_rank: int,
        dp_size: int,
        device: torch.device,
        position: int = 0,
        window: int = 0,
        packed: Samples | None = None,
        separator: int | None = None,
    ) -> None:
        meta = shards.meta
        if packed is not None and packed.n >= global_batch_size:
            self.n_samples = packed.n
        else:  # fewer than concatenated there never are
            self.n_samples = sample_count(
                meta.source, shards.tokens, seq_len, at_least=global_batch_size, max_tokens=meta.max_tokens
            )
        self.position = position  # of the next step; save it to resume
        self.wait_seconds = 0.0  # that the last `next` waited for the thread
        self.lengths = np.array([seq_len])  # of each document of the last `next`; of each sample if none are masked
        self.is_masked = separator is not None
        self._samples: Samples = packed or ConcatenatedSamples(shards, seq_len)
        self._seed, self._window, self._device = seed, window // seq_len, _indexed(device)
        self._separator = separator
        self.global_batch_size = global_batch_size
        places = np.arange(global_batch_size).reshape(-1, dp_size, local_batch_size)
        self._places = places[:, dp_rank]  # [micro-steps, local], within the global batch
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="batches")
        self._ahead = self._prefetch()

    def next(self) -> list[Batch]:
        """The micro-batches of the next optimizer step.

        Returns:
            global_batch_size / (local_batch_size · dp_size) batches, on the device.

        Raises:
            DataError: a shard has changed, or cannot be read any more.
        """
        started = time.monotonic()
        pair, starts, self.lengths = self._ahead.result()
        self.wait_seconds = time.monotonic() - started
        self.position += self.global_batch_size
        self._ahead = self._prefetch()
        pair, seq_len = pair.to(self._device, non_blocking=True), self._samples.seq_len
        of_micros = [None] * pair.shape[1] if starts is None else starts.to(self._device, non_blocking=True)
        micros = zip(*pair, of_micros, strict=True)
        return [Batch(tokens, targets, Sequences(seq_len, starts)) for tokens, targets, starts in micros]

    def padding(self) -> list[Batch]:
        """Return as many micro-batches without a target, for a rank that must take part in a step and has no data."""
        n_micro, local = self._places.shape
        return [_padding(local, self._samples.seq_len, self._device, self._separator is not None)] * n_micro

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _prefetch(self) -> "Future[tuple[Tensor, Tensor | None, np.ndarray]]":
        return self._thread.submit(self._read, self.position)

    def _read(self, position: int) -> tuple[Tensor, Tensor | None, np.ndarray]:
        """Tokens and targets of one step, [2, micro-steps, M], where their documents start, [micro-steps, M], and the
        lengths of these; in pinned memory what goes to a GPU."""
        positions = position + self._places
        samples = units_at(positions.ravel(), self.n_samples, self._seed, self._window)
        pair = _tokens_and_targets(self._samples, samples).reshape(2, *positions.shape, -1)
        starts = _mask_documents(pair, self._separator)
        lengths = np.full(positions.size, pair.shape[-1]) if starts is None else document_lengths(starts)
        packed = [torch.from_numpy(t).flatten(-2) for t in (pair, *([] if starts is None else [starts]))]
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # per thread; else pinning would occupy GPU 0 from every rank
            packed = [t.pin_memory() for t in packed]
        return packed[0], packed[1] if len(packed) > 1 else None, lengths


class ValidationBatches:
    """Every sample of a held-out corpus once, over all ranks; as often iterated as wanted.

    Ranks with nothing left get padding whose targets do not count, so that all ranks take the same number of steps, and
    the sum of losses over the count of targets is that of the corpus under any layout.

    Args:
        shards: the corpus.
        seq_len: tokens per sample (S).
        global_batch_size: samples per global batch; matters if `steps` does.
        local_batch_size: samples per micro-batch.
        steps: global batches to read, from the first sample on. -1: the whole corpus.
        dp_rank: data-parallel rank.
        dp_size: number of data-parallel ranks.
        device: where the batches are to be.
        separator: id that ends each document, if documents are masked.
        key: the config key of the source, for the message.

    Raises:
        DataError: the corpus has not one sample.
    """

    def __init__(
        self,
        shards: TokenShards,
        *,
        seq_len: int,
        global_batch_size: int,
        local_batch_size: int,
        steps: int,
        dp_rank: int,
        dp_size: int,
        device: torch.device,
        separator: int | None = None,
        key: str = "validation.source",
    ) -> None:
        available = sample_count(shards.meta.source, shards.tokens, seq_len, key=key)
        self.n_samples = available if steps < 0 else min(available, steps * global_batch_size)
        self._samples: Samples = ConcatenatedSamples(shards, seq_len)
        self._device, self._separator = device, separator
        per_turn = local_batch_size * dp_size
        turns = -(-self.n_samples // per_turn)
        self._turns = np.arange(turns * per_turn).reshape(turns, dp_size, local_batch_size)[:, dp_rank]

    def __len__(self) -> int:
        """Batches per rank, the same for all."""
        return len(self._turns)

    def __iter__(self) -> Iterator[Batch]:
        seq_len = self._samples.seq_len
        for samples in self._turns:
            has = samples[samples < self.n_samples]
            pair = np.zeros((2, len(samples), seq_len), np.int64)
            pair[:, : len(has)] = _tokens_and_targets(self._samples, has)
            pair[1, len(has) :] = IGNORE_INDEX
            starts = _mask_documents(pair, self._separator)
            tokens, targets = torch.from_numpy(pair).flatten(-2).to(self._device)
            of_samples = None if starts is None else torch.from_numpy(starts).flatten().to(self._device)
            yield Batch(tokens, targets, Sequences(seq_len, of_samples))

    def padding(self) -> Batch:
        """Return a batch without a target, as `TrainBatches.padding`."""
        return _padding(self._turns.shape[1], self._samples.seq_len, self._device, self._separator is not None)


def _padding(samples: int, seq_len: int, device: torch.device, is_masked: bool) -> Batch:
    tokens = torch.zeros(samples * seq_len, dtype=torch.int64, device=device)
    places = torch.arange(len(tokens), dtype=torch.int32, device=device)
    starts = places - places % seq_len if is_masked else None
    return Batch(tokens, torch.full_like(tokens, IGNORE_INDEX), Sequences(seq_len, starts))


def _mask_documents(pair: np.ndarray, separator: int | None) -> np.ndarray | None:
    """Leave the target of each separator out, in tokens and targets [2, …, B, S], and say where documents start."""
    if separator is None:
        return None
    tokens, targets = pair
    separators = np.full(tokens.shape[:-1], separator)
    targets[tokens == separators[..., None]] = IGNORE_INDEX
    return document_starts(tokens, separators)


def _tokens_and_targets(source: Samples, samples: np.ndarray) -> np.ndarray:
    """Tokens and targets of samples: [2, N, S] int64."""
    pair = np.empty((2, len(samples), source.seq_len), np.int64)
    for i, sample in enumerate(samples):
        pair[:, i] = source.read(int(sample))
    return pair


def _indexed(device: torch.device) -> torch.device:
    """`cuda` as this thread means it; another thread's current device is GPU 0."""
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device
