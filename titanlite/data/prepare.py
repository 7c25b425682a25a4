"""Preparation: from a source to token shards, once.

The shards of a source lie in `<data.cache_dir>/<source>-<tokenizer>-<key>/`, where the key is a hash of everything
that decides their content: the paths, sizes and modification times of the input files, the tokenizer, the text field.
Whatever changes gives another folder, and the old one stays until somebody deletes it. (What a dataset on the hub
holds cannot be seen from here: after it has changed there, delete its folder.)
"""

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from titanlite.config.schema import Data
from titanlite.data.cache import make_once
from titanlite.data.cache_folder import (
    check_cache_is_outside,
    max_tokens_of,
    shard_folder,
    unusable_cache,
)
from titanlite.data.encode import encode
from titanlite.data.progress import Progress
from titanlite.data.shard_writer import ShardWriter
from titanlite.data.shards import Meta, TokenShards
from titanlite.data.sources import Source, resolve
from titanlite.data.tally import Tally
from titanlite.data.token_files import check_ids, scan, token_dtype
from titanlite.data.tokenizer import Tokenizer, load_tokenizer, rows_for
from titanlite.data.unfinished import empty, end
from titanlite.errors import DataError, Problem, describe

PUBLISH_SECONDS = 1.0
"""Time between two looks at which what was made is put on disk to stay: a restart repeats that much."""


def prepare(source: str, data: Data, vocab_size: int, progress: bool, key: str = "data.source") -> TokenShards:
    """Open the token shards of a source; make them first if they are not there.

    Any number of processes may call this at once: one works, the others wait.

    Args:
        source: `data.source`, or one of validation.
        data: tokenizer, text field, limit of bad records, cache folder.
        vocab_size: of the model.
        progress: show a progress bar, or lines where stderr is no terminal.
        key: the config key of the source: `data.max_tokens` limits that of `data.source` alone.

    Returns:
        The shards, of at least one token, all ids below `vocab_size`.

    Raises:
        DataError: anything about source, tokenizer, records or cache folder.
    """
    found = resolve(source, key)
    check_cache_is_outside(found, data)
    check_used_whole(found, data)
    max_tokens, tokenizer = max_tokens_of(found, data), None
    if found.kind != "tokens":
        tokenizer = load_tokenizer(data.tokenizer, data.add_bos_token)
        check_vocabulary(tokenizer, vocab_size)
    dtype = id_dtype(found, tokenizer, vocab_size)
    try:
        stamps, total = found.stamps(), None if max_tokens else found.n_bytes()
        folder = shard_folder(found, data, tokenizer, dtype, stamps)

        def make(unfinished: Path, report: Callable[[int], None]) -> None:
            if tokenizer is None:
                meta = scan(found, dtype, report)
            else:
                meta = _tokenize(found, tokenizer, data, dtype, unfinished, shown, report)
            if found.stamps() != stamps:
                saw = f"{source!r}, whose files changed during reading"
                empty(unfinished)
                raise DataError.of("data", key, saw, "files that do not change meanwhile", "run again")
            end(unfinished)
            meta.write(unfinished)

        folder.parent.mkdir(parents=True, exist_ok=True)
        terms = f"{key}, data.max_bad_records = {data.max_bad_records}, max_record_mib = {data.max_record_mib}"
        title = f"preparing {source}" + (f", data.max_tokens {max_tokens:,}" if max_tokens else "")
        shown = Progress(title, progress, whole_from_hub(found, data))
        make_once(folder, make, terms, shown, total)
    except OSError as e:
        raise unusable_cache(data, e) from e
    separator = tokenizer.separator_id if tokenizer else data.separator_id
    shards = TokenShards(folder, tokenizer.fingerprint if tokenizer else "", found.count, separator)
    check_meta(shards.meta, data, vocab_size, key)
    return shards


def id_dtype(source: Source, tokenizer: Tokenizer | None, vocab_size: int) -> str:
    """Choose the dtype of the ids in a source's shards; token files have no tokenizer."""
    if tokenizer is None:
        return token_dtype(source, vocab_size)
    return "uint16" if tokenizer.vocab_size <= 1 << 16 else "uint32"


def whole_from_hub(source: Source, data: Data) -> str:
    """Say that a source of unknown size is read to its end before a run takes its first step; "" if it is not so."""
    if source.kind != "dataset" or source.files or max_tokens_of(source, data):
        return ""
    less = "data.max_tokens limits it" if source.key == "data.source" else "a smaller config or split takes less"
    return f"{source.name} is on the hub, and all of it is tokenized before the first step, whatever its size; {less}"


def check_used_whole(source: Source, data: Data) -> None:
    """Refuse keys that do nothing to token files, and packing where they lack what it needs."""
    if source.kind != "tokens":
        return
    problems: list[Problem] = []
    if data.packing == "best_fit" and data.separator_id is None and source.key.startswith("data."):
        want = f'"concat" for token files such as {source.name!r}, whose documents are not known without a separator'
        fix = 'separator_id = N, the id that ends each document, or packing = "concat"'
        problems.append(Problem("data.packing", '"best_fit"', want, fix))
    such = f"for token files such as {source.name!r}, which are used"
    if max_tokens_of(source, data):
        fix = "max_tokens = 0, or name fewer files"
        problems.append(Problem("data.max_tokens", str(data.max_tokens), f"0 {such} whole", fix))
    if data.add_bos_token:
        problems.append(Problem("data.add_bos_token", "true", f"false {such} as they are", "add_bos_token = false"))
    if problems:
        raise DataError(describe("data", problems))


def check_vocabulary(tokenizer: Tokenizer, vocab_size: int, is_given: bool = False) -> None:
    """Refuse ids beyond those of the model, whose number `is_given` with its weights or can be set."""
    if tokenizer.vocab_size > vocab_size:
        want = f"at least {tokenizer.vocab_size}, the vocabulary of data.tokenizer = {tokenizer.name!r}"
        fix = f"set model.vocab_size = {rows_for(tokenizer.vocab_size)}, or choose a smaller tokenizer"
        if is_given:
            fix = "name the tokenizer of the weights of checkpoint.initial_load_path in data.tokenizer"
        raise DataError.of("data", "model.vocab_size", str(vocab_size), want, fix)


def check_meta(meta: Meta, data: Data, vocab_size: int, key: str) -> None:
    """Hold shards against the limits of this run: they may have been made for one with others."""
    Tally(meta.source, key, data.max_bad_records, n_bad=meta.n_bad_records, bad=list(meta.bad_records)).check()
    check_ids(meta, vocab_size, key)
    if not meta.tokens:
        raise no_text(meta.source, key, meta.bad_records)


def no_text(source: str, key: str, bad: Sequence[str]) -> DataError:
    """Make the error to raise where a source holds no text."""
    saw = f"{source!r}, which holds no text" + (f" but bad records, as {bad[0]}" if bad else "")
    return DataError.of("data", key, saw, "at least one document", "give another source")


def new_tally(source: Source, data: Data, notify: Callable[[str], object] = lambda line: None) -> Tally:
    """Return the tally of a source that is yet to be read."""
    limit, most = data.max_bad_records, data.max_record_mib
    return Tally(source.name, source.key, limit, max_record_mib=most, notify=notify)


def _tokenize(
    source: Source,
    tokenizer: Tokenizer,
    data: Data,
    dtype: str,
    folder: Path,
    progress: Progress,
    report: Callable[[int], None],
) -> Meta:
    """Write the shards of a text source, and report how far that is."""
    max_tokens, n_written, tally = max_tokens_of(source, data), 0, new_tally(source, data, progress.say)

    def on_progress() -> None:
        progress.made(tally.n_bytes, tally.n_unpacked, n_written)
        report(tally.n_bytes)

    tally.on_progress = on_progress
    with ShardWriter(folder, dtype) as writer:
        if (kept := writer.go_on()) is not None:
            progress.say(
                f"{source.name}: {writer.tokens:,} tokens are there from an earlier start; it goes on from them"
            )
            tally.go_on(kept)
        n_written, published = writer.tokens * np.dtype(dtype).itemsize, time.monotonic()
        for batch in encode(source, data.text_key, tokenizer, tally, max_tokens):
            for encoded in batch:
                writer.write(encoded.ids)
                n_written += encoded.ids.size * np.dtype(dtype).itemsize
                if encoded.ends:
                    writer.keep()
                elif encoded.is_bad:
                    writer.drop()
            if tally.is_between and time.monotonic() - published > PUBLISH_SECONDS:
                writer.publish(tally.kept())
                published = time.monotonic()
            on_progress()
        shards, fingerprint = writer.close()
    return Meta(
        source=source.name,
        tokenizer=tokenizer.name,
        dtype=dtype,
        shards=shards,
        fingerprint=fingerprint,
        documents=tally.n_documents,
        input_bytes=tally.n_bytes,
        text_bytes=tally.n_text_bytes,
        n_bad_records=tally.n_bad,
        bad_records=tuple(tally.bad),
        skipped=tuple(tally.skipped),
        max_tokens=max_tokens if tally.is_cut else 0,
        n_unknown=tally.n_unknown,
    )
