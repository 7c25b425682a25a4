"""Open the token shards of a run, the same on every rank, and read this rank's batches."""

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch.distributed as dist

from titanlite.checkpoint.collective import on_all_ranks
from titanlite.config.held_out import held_out_sources, name_of_source
from titanlite.config.schema import Config
from titanlite.config.stages import least_samples, sequences_per_step, source_keys
from titanlite.data.background import BackgroundPreparation, open_growing
from titanlite.data.batches import TrainBatches, ValidationBatches
from titanlite.data.corpus import Corpus
from titanlite.data.mixture import check_epochs
from titanlite.data.packing import PackedSamples, open_packed
from titanlite.data.prepare import data_warnings, named_bad_records, prepare
from titanlite.data.samples import SampleCounts, Samples
from titanlite.data.stages import StageTable
from titanlite.errors import DataError, Problem, describe
from titanlite.observe.console import Console
from titanlite.parallel.context import token_group
from titanlite.parallel.mesh import Mesh
from titanlite.preflight.checked_run import CheckedRun
from titanlite.receipt import Entry, Receipt, Skipped


@dataclass(frozen=True)
class Corpora:
    """The tokenized sources of a run."""

    train: Mapping[str, Corpus]  # by name of the source, "" for `data.source`
    keys: Mapping[str, str]  # config key of each source of `train`, by its name
    held_out: dict[str, Corpus]  # for validation, by config key
    growing: dict[str, Corpus]  # still being tokenized when this start began, by config key
    packed: dict[str, PackedSamples]  # by name of the source, with `data.packing`
    making: BackgroundPreparation | None = None  # tokenizes `growing`; on the first rank of a host

    @property
    def sources(self) -> dict[str, Corpus]:
        """Return all corpora by config key."""
        return {**{self.keys[name]: shards for name, shards in self.train.items()}, **self.held_out}

    @property
    def identity(self) -> dict[str, Any]:
        """Return hashes of the training data for checkpoints; "" for tokens that are still being made."""
        return {
            "corpora": {name: shards.fingerprint for name, shards in self.train.items()},
            "inputs": {name: shards.inputs for name, shards in self.train.items()},
            "tokenizer": next((shards.tokenizer for shards in self.train.values() if shards.tokenizer), ""),
        }

    def stop_waiting(self) -> None:
        """End all waits for tokens that are still to be made."""
        for shards in self.growing.values():
            shards.close()

    def close(self) -> None:
        """End the process that tokenizes in the background."""
        if self.making is not None:
            self.making.close()


class HeldOut(NamedTuple):
    """The batches of a held-out source, for validation."""

    batches: ValidationBatches
    tokens_per_byte: float | None  # of its text; None: unknown

    def numbers(self, name: str, loss: float, of: str = "") -> dict[str, float]:
        """Return the validation metrics of a mean loss, in nats per token, by key.

        Keys end with `of` ("_ema" for averaged weights) and the source's `name` ("" for `validation.source`).
        """
        end = of + (f".{name}" if name else "")
        found = {f"validation_loss{end}": loss}
        if self.tokens_per_byte is not None:
            found[f"validation_bits_per_byte{end}"] = loss / math.log(2) * self.tokens_per_byte
        return found


def open_data(asked: CheckedRun, progress: bool) -> Corpora:
    """Open the token shards of a run. Missing ones are tokenized now or, with `data.prepare = "background"`, during
    training. `progress`: show a bar.
    """
    config, vocab_size = asked.config, asked.dims.vocab_size
    train: dict[str, Corpus] = {}
    keys: dict[str, str] = {}  # config key of each source, by its name
    for name, (key, source) in source_keys(config).items():
        keys[name] = key
        if config.data.prepare == "background":
            train[name] = open_growing(source, config.data, vocab_size, key)
        else:
            train[name] = prepare(source, config.data, vocab_size, progress=progress, key=key)
    growing = {keys[name]: corpus for name, corpus in train.items() if not corpus.is_whole}
    making = None
    if growing and os.environ.get("LOCAL_RANK", "0") == "0":  # one background process per host
        making = BackgroundPreparation(growing, config.data, vocab_size)
    held_out = {  # always tokenized now
        key: prepare(source, config.data, vocab_size, progress=progress, key=key)
        for key, source in held_out_sources(config).items()
    }
    packed: dict[str, PackedSamples] = {}
    if config.data.packing == "best_fit":
        for name, corpus in train.items():
            packed[name] = open_packed(corpus, config.data, asked.table.unit_len, progress)
    return Corpora(train, keys, held_out, growing, packed, making)


def require_same_data(data: Corpora) -> None:
    """Raise DataError on all ranks if ranks have different data, as from other files or Python versions. Collective."""
    for key, corpus in data.sources.items():  # unequal validation data would make ranks wait forever
        of_ranks: list[str] = on_all_ranks(partial(getattr, corpus, "fingerprint"))
        if not all(of_ranks):  # still being tokenized
            of_ranks = on_all_ranks(partial(getattr, corpus, "inputs"))
        different = [rank for rank, other in enumerate(of_ranks) if other != of_ranks[0]]
        if different:
            seen = f"different tokens on rank {different[0]} than on rank 0"
            want = "the same files on every host"
            fix = "name files of your own; python_stdlib differs between Python versions"
            raise DataError(describe("data", [Problem(key, seen, want, fix)]))


def report_data(data: Corpora, receipt: Receipt, asked: CheckedRun, console: Console, rank: int) -> None:
    """Report each source in the receipt and on the console. Warnings from the checks are not repeated."""
    for key, source in data.sources.items():
        if source.files:
            console.notice(f"{key}: {source.files}")
        if key in data.growing:
            is_ahead = f"{source.tokens:,} tokens are there already" if source.tokens else "none of it is there yet"
            console.notice(f"{key} is tokenized in the background; {is_ahead}")
            receipt.add(data_entry(key, source, grew=True))
            continue
        if key in data.held_out and source.meta.tokens_per_byte is None:
            why = "token files do not say the bytes of their text"
            console.notice(f"{key}: the bytes of its text are not known, nor bits per byte: {why}")
        receipt.add(data_entry(key, source))
        for text in data_warnings(key, source.meta, asked.dims.vocab_size):
            if rank == 0 and text not in asked.warnings:
                console.warning(text)
    for name, samples in data.packed.items():
        counts, feature = samples.counts, f"data.packing.{name}" if name else "data.packing"
        applied = {"samples": counts.bins, "documents": counts.documents, "cut": counts.longer, "padded": counts.padded}
        receipt.add(Entry(feature, "best_fit", applied, count=counts.bins, key="data.packing"))


def data_entry(key: str, corpus: Corpus, grew: bool = False) -> Entry:
    """Return the receipt's entry of a source: its tokens, and parts that were left out.

    `grew`: the source is, or was, tokenized in the background during this start.
    """
    applied: dict[str, object] = {"prepare": "background"} if grew else {}
    if not corpus.is_whole:
        return Entry(key, corpus.source, applied | {"tokens_so_far": corpus.tokens}, count=1)
    meta = corpus.meta
    applied |= {"tokens": meta.tokens, "bad_records": meta.n_bad_records}
    if not meta.source.startswith("hf:"):  # else `skipped` lists splits, not files
        applied["skipped_files"] = len(meta.skipped)
    if meta.tokenizer:  # unknown for token files
        applied["documents"] = meta.documents
    if meta.text_bytes and key.startswith("validation"):  # bits per byte are for validation only
        applied["text_bytes"] = meta.text_bytes
    left_out = [Skipped(record, "a bad record", is_told=True) for record in named_bad_records(meta)]
    rule = "`datasets` reads its splits" if meta.source.startswith("hf:") else "python_stdlib skips what is not UTF-8"
    left_out += [Skipped(what, rule) for what in meta.skipped]
    if meta.max_tokens:
        applied["max_tokens"] = meta.max_tokens
        left_out.append(Skipped("the rest of the source", f"data.max_tokens = {meta.max_tokens}", is_told=True))
    if meta.n_unknown:
        applied["unknown"] = meta.n_unknown
    return Entry(key, meta.source, applied, count=meta.tokens, skipped=tuple(left_out))


def open_batches(
    data: Corpora, asked: CheckedRun, mesh: Mesh, table: StageTable, step: int, windows: Sequence[int]
) -> tuple[TrainBatches, dict[str, HeldOut]]:
    """Begin to read this rank's batches after `step`. `windows`: attention window of each layer, 0 for none.

    Returns:
        Training batches, which the caller closes; batches of each held-out source, by its name.

    Raises:
        DataError: a source has too few tokens.
    """
    config, training, unit_len = asked.config, asked.config.training, table.unit_len
    sources: dict[str, Samples] = {}
    counts = SampleCounts(sources)  # asks `sources`, which is filled below
    per_step = sequences_per_step(config, dist.get_world_size())
    least = least_samples(config, per_step, unit_len)

    def check_whole(name: str) -> None:
        sources[name].require(least, data.keys[name])
        check_epochs(config, table, counts)

    for name, shards in data.train.items():
        sources[name] = data.packed.get(name) or Samples(shards, unit_len, partial(check_whole, name))
        sources[name].require(least, data.keys[name])
    check_epochs(config, table, counts)
    is_masked, device = config.data.document_mask, mesh.device
    separators = {name: shards.separator if is_masked else None for name, shards in data.train.items()}
    context = token_group(mesh, windows)
    rank: dict[str, Any] = {"dp_rank": mesh.data_rank, "dp_size": mesh.data_size, "context": context}
    seed, window = training.seed, config.data.shuffle_window
    train = TrainBatches(
        sources, table, seed=seed, step=step, window=window, separators=separators, device=device, **rank
    )
    shape = {"seq_len": training.seq_len, "local_batch_size": training.local_batch_size}
    shape |= {"global_batch_size": per_step, "steps": config.validation.steps}
    held_out: dict[str, HeldOut] = {}
    for key, shards in data.held_out.items():
        separator = shards.separator if is_masked else None
        own = ValidationBatches(shards, device=device, separator=separator, key=key, **shape, **rank)
        held_out[name_of_source(key)] = HeldOut(own, shards.meta.tokens_per_byte)
    return train, held_out


def mask_entry(data: Corpora, config: Config, batches: TrainBatches) -> Entry:
    """Return the receipt's entry of the document mask. Call after the first step."""
    if not config.data.document_mask:
        return Entry("data.document_mask", False, False, count=0)
    separators = {key: shards.separator for key, shards in data.sources.items() if shards.separator is not None}
    why = "token files do not say where documents end, and data.separator_id is not given: each sample is one"
    without = [Skipped(key, why) for key in data.sources if key not in separators]
    applied: dict[str, object] = {"sources": len(separators), "separators": separators}
    lengths = batches.lengths[batches.lengths > 1]  # of documents in this rank's first step; padding has length 1
    if batches.is_masked and len(lengths):
        tokens, squares = int(lengths.sum()), int((lengths**2).sum())
        applied["documents in this rank's first step"] = len(lengths)
        applied["tokens attended to in it, in the mean"] = round((squares / tokens + 1) / 2, 1)
    return Entry("data.document_mask", True, applied, count=len(data.sources), skipped=without)
