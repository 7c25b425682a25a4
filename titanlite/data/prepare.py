"""Make the token shards of a source, once.

Their folder is `<data.cache_dir>/<source>-<tokenizer>-<key>/`. The key is a hash of everything that determines their
content: the paths, sizes and modification times of the files, the tokenizer, the text field. After a change a new
folder is made, and the old one is kept. (A change of a dataset on the hub is not detected: delete its folder.)
"""

import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from titanlite.config.schema import Data
from titanlite.data.cache import lock_of, make_once, unfinished_of
from titanlite.data.cache_folder import Preparation, check_cache_is_outside, max_tokens_of, unusable_cache
from titanlite.data.corpus import Corpus
from titanlite.data.encode import encode
from titanlite.data.progress import Progress
from titanlite.data.remote import telling
from titanlite.data.shard_writer import PROGRESS, ShardWriter, empty, end, read_wanted, want, wanted_of
from titanlite.data.shards import Meta, Shard
from titanlite.data.sources import Source, resolve
from titanlite.data.tally import Tally
from titanlite.data.token_files import require_separator, scan, token_dtype
from titanlite.data.tokenizer import Tokenizer, few_ids, load_tokenizer, rows_for
from titanlite.errors import DataError, Problem, describe

PUBLISH_SECONDS = 1.0
"""Time between two writes of progress.json: a restart repeats at most this much work."""
_LARGE_BYTES = 1 << 26  # size from which a notice says that a held-out source delays the first step
_ALL = 1 << 62  # the number of tokens to request if all are needed
_PAUSE_SECONDS = 0.2  # between checks of how many tokens readers have requested


def make(planned: Preparation, progress: Progress, lead: int | None = None) -> None:
    """Make the shards if they do not exist. Any number of processes may call this: one works, the others wait.

    `lead`: how many tokens may be made beyond those that readers have requested; None: no limit.

    Raises:
        DataError: the source, its records or the cache folder cannot be used.
    """
    total = None if planned.max_tokens else planned.source.n_bytes()

    def fill(unfinished: Path, report: Callable[[int], None]) -> None:
        def on_retry(line: str) -> None:  # also touches the lock file, to show that the process is alive
            progress.say(line)
            os.utime(lock_of(planned.folder))

        try:
            wanted_of(unfinished).unlink(missing_ok=True)  # requests of an earlier start; readers repeat theirs
            if planned.tokenizer is None:
                meta = scan(planned.source, planned.dtype, report)
            else:
                with telling(on_retry):
                    meta = _tokenize(planned, planned.tokenizer, unfinished, progress, report, lead)
            if planned.source.stamps() != planned.stamps:
                empty(unfinished)
                what, want = ", whose files changed during reading", "files that do not change meanwhile"
                raise planned.source.refused(what, want, "run again")
            meta.write(unfinished)
        except OSError as e:  # as a DataError, which waiting processes get, too
            raise unusable_cache(planned.data, e) from e

    def on_wait() -> None:  # request all tokens: the maker may wait for a reader's request
        if lead is None and (wanted := read_wanted(unfinished_of(planned.folder))) < _ALL:
            want(unfinished_of(planned.folder), _ALL)
            if wanted:
                progress.say(f"{planned.source.name}: a run tokenizes it in the background; now to its end")

    try:
        planned.folder.parent.mkdir(parents=True, exist_ok=True)
        make_once(planned.folder, fill, planned.terms, progress, total, on_wait)
        with suppress(OSError):  # the cache may be read-only
            end(planned.folder)
            wanted_of(unfinished_of(planned.folder)).unlink(missing_ok=True)
    except OSError as e:
        raise unusable_cache(planned.data, e) from e


def plan_preparation(source: str, data: Data, vocab_size: int, key: str) -> Preparation:
    """Return the plan for preparing a source; raise a DataError for problems that show without reading its texts."""
    found = resolve(source, key)
    check_cache_is_outside(found, data)
    check_used_whole(found, data)
    tokenizer = None
    if found.kind != "tokens":
        tokenizer = load_tokenizer(data.tokenizer, data.add_bos_token)
        check_vocabulary(tokenizer, vocab_size)
    planned = preparation_of(found, data, vocab_size, tokenizer)
    if tokenizer is None and data.separator_id is not None and key.startswith("data."):
        require_separator(found, planned.dtype, data.separator_id)
    return planned


def preparation_of(source: Source, data: Data, vocab_size: int, tokenizer: Tokenizer | None) -> Preparation:
    """Return the plan for preparing a resolved source; `tokenizer` is None for token files."""
    if tokenizer is None:
        dtype = token_dtype(source, data, vocab_size)
    else:
        dtype = "uint16" if tokenizer.vocab_size <= 1 << 16 else "uint32"
    return Preparation(source, data, vocab_size, tokenizer, dtype, source.stamps())


def prepare(source: str, data: Data, vocab_size: int, progress: bool, key: str = "data.source") -> Corpus:
    """Open the token shards of a source; make them first if they do not exist.

    Any number of processes may call this at once: one works, the others wait. All ids must be below `vocab_size`, the
    vocabulary size of the model; `key` is the config key of the source.

    Raises:
        DataError: the source, its records, the tokenizer or the cache folder cannot be used.
    """
    planned = plan_preparation(source, data, vocab_size, key)
    title = f"preparing {source}" + (f", data.max_tokens {planned.max_tokens:,}" if planned.max_tokens else "")
    notice = whole_from_hub(planned.source, data)
    n_bytes = 0 if planned.source.key.startswith("data.") else planned.source.n_bytes() or 0
    if data.prepare == "background" and n_bytes >= _LARGE_BYTES:
        notice = f"{key} = {source!r} has {n_bytes / 1e6:,.0f} MB, which are tokenized before the first step"
    make(planned, Progress(title, progress, notice))
    return Corpus(planned.folder, planned)


def whole_from_hub(source: Source, data: Data) -> str:
    """Return a notice if a source is a dataset on the hub that is read completely before the first step, else ""."""
    if source.kind != "dataset" or source.files or max_tokens_of(source, data):
        return ""
    less = "data.max_tokens limits it" if source.key == "data.source" else "a smaller config or split takes less"
    return f"{source.name} is on the hub, and all of it is tokenized before the first step, whatever its size; {less}"


def check_used_whole(source: Source, data: Data) -> None:
    """Refuse config keys that have no effect on token files, and `best_fit` for token files without a separator."""
    if source.kind != "tokens":
        return
    of, problems = f"for token files such as {source.name!r}", list[Problem]()
    if data.packing == "best_fit" and data.separator_id is None and source.key.startswith("data."):
        want = f'"concat" {of}, whose documents are not known without a separator'
        fix = 'separator_id = N, the id that ends each document, or packing = "concat"'
        problems.append(Problem("data.packing", '"best_fit"', want, fix))
    if max_tokens_of(source, data):
        want, fix = f"0 {of}, which are used whole", "max_tokens = 0, or name fewer files"
        problems.append(Problem("data.max_tokens", f"{data.max_tokens}", want, fix))
    if data.add_bos_token:
        want = f"false {of}, which are used as they are"
        problems.append(Problem("data.add_bos_token", "true", want, "add_bos_token = false"))
    if problems:
        raise DataError(describe("data", problems))


def check_vocabulary(tokenizer: Tokenizer, vocab_size: int, is_given: bool = False) -> None:
    """Refuse a tokenizer with more ids than the model's vocabulary.

    `is_given`: the size comes from loaded weights, so the fix in the message is another tokenizer.
    """
    if tokenizer.vocab_size > vocab_size:
        want = f"at least {tokenizer.vocab_size}, the vocabulary of data.tokenizer = {tokenizer.name!r}"
        fix = f"set model.vocab_size = {rows_for(tokenizer.vocab_size)}, or choose a smaller tokenizer"
        if is_given:
            fix = "name the tokenizer of the weights of checkpoint.initial_load_path in data.tokenizer"
        raise DataError.of("data", "model.vocab_size", str(vocab_size), want, fix)


def data_warnings(key: str, meta: Meta, vocab_size: int) -> list[str]:
    """Return warnings about skipped records, text unknown to the tokenizer, and ids that token files never contain."""
    warnings: list[str] = []
    if meta.n_bad_records:
        count = f"{meta.n_bad_records:,} bad record{'s' * (meta.n_bad_records > 1)} skipped (data.max_bad_records):"
        warnings.append("\n      ".join([f"{key} = {meta.source}: {count}", *named_bad_records(meta)]))
    if meta.n_unknown:
        share = f"{meta.n_unknown:,} tokens ({meta.n_unknown / meta.tokens:.2%})"
        warnings.append(f"{key} = {meta.source}: {share} stand for text that {meta.tokenizer} does not know")
    if not meta.tokenizer:
        n_ids = 1 + max(shard.max_id for shard in meta.shards)
        fix = "set model.vocab_size to that of the tokenizer that made the files"
        if few := few_ids(n_ids, f"{key} = {meta.source}", vocab_size, fix):
            warnings.append(few)
    return warnings


def named_bad_records(meta: Meta) -> list[str]:
    """Return a line for each of the first bad records, and one line with the number of all further ones."""
    unnamed = meta.n_bad_records - len(meta.bad_records)
    return [*meta.bad_records, *[f"and {unnamed:,} more"] * (unnamed > 0)]


def new_tally(source: Source, data: Data) -> Tally:
    """Return an empty tally for a source, with the limits of the config."""
    return Tally(source.name, source.key, data.max_bad_records, max_record_mib=data.max_record_mib)


def meta_of(planned: Preparation, tally: Tally, shards: tuple[Shard, ...], fingerprint: str) -> Meta:
    """Return the content of meta.json for a text source after it was read."""
    return Meta(
        source=planned.source.name,
        tokenizer=planned.tokenizer.name if planned.tokenizer else "",
        dtype=planned.dtype,
        shards=shards,
        fingerprint=fingerprint,
        documents=tally.n_documents,
        input_bytes=tally.n_bytes,
        text_bytes=tally.n_text_bytes,
        n_bad_records=tally.n_bad,
        bad_records=tuple(tally.bad),
        skipped=tuple(tally.skipped),
        max_tokens=planned.max_tokens if tally.is_cut else 0,
        n_unknown=tally.n_unknown,
    )


def _tokenize(
    planned: Preparation,
    tokenizer: Tokenizer,
    folder: Path,
    progress: Progress,
    report: Callable[[int], None],
    lead: int | None,
) -> Meta:
    """Write the shards of a text source, after the tokens that an earlier start has written, if there are any."""
    source, data = planned.source, planned.data
    tally = new_tally(source, data)
    tally.on_progress = lambda: report(tally.n_bytes)
    is_begun = (folder / PROGRESS).exists()

    def is_ahead() -> bool:
        return lead is not None and writer.tokens > read_wanted(folder) + lead

    with ShardWriter(folder, planned.dtype) as writer:
        if (kept := writer.go_on(lambda: report(0))) is not None:
            there = f"{writer.tokens:,} tokens are there from an earlier start, and it goes on from them"
            progress.say(f"{source.name}: {there}")
            tally.go_on(kept)
        elif is_begun:
            progress.say(f"{source.name}: what an earlier start has left is damaged, and is made anew")
        published = time.monotonic()
        for batch in encode(source, data.text_key, tokenizer, tally, planned.max_tokens):
            for encoded in batch:
                writer.write(encoded.ids)
                if encoded.ends:
                    writer.keep()
                elif encoded.is_bad:
                    writer.drop()
            if tally.is_between:
                if is_ahead() or time.monotonic() - published > PUBLISH_SECONDS:
                    writer.publish(tally.kept())
                    published = time.monotonic()
                while is_ahead():
                    time.sleep(_PAUSE_SECONDS)
            tally.on_progress()
        shards, fingerprint = writer.close()
    return meta_of(planned, tally, shards, fingerprint)
