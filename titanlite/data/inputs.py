"""Check the data of a run before it starts, in a fraction of a second, without preparing it and without torch."""

import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from titanlite.config.build import show
from titanlite.config.held_out import held_out_sources
from titanlite.config.schema import Config, Data
from titanlite.config.stages import least_samples, longest_seq_len, source_keys
from titanlite.data.cache_folder import (
    Preparation,
    check_cache_is_folder,
    check_cache_is_outside,
    no_text,
    unusable_cache,
)
from titanlite.data.corpus import Corpus
from titanlite.data.document_starts import require_target
from titanlite.data.documents import check_text_key, documents
from titanlite.data.encode import encode
from titanlite.data.packing import prepared_samples
from titanlite.data.prepare import (
    check_used_whole,
    check_vocabulary,
    data_warnings,
    meta_of,
    new_tally,
    preparation_of,
)
from titanlite.data.shards import Meta, Shard, sample_count
from titanlite.data.sources import Source, resolve
from titanlite.data.token_files import first_ids, require_separator, scan
from titanlite.data.tokenizer import Tokenizer, load_tokenizer
from titanlite.durable import require_writable
from titanlite.errors import DataError
from titanlite.hub import is_hub_name

_SMALL_BYTES = 1 << 20  # size up to which `check_inputs` reads a source completely
_LOOKED_AT_TOKENS = 1 << 22  # tokens of token files that are searched for the separator


@dataclass(frozen=True)
class Inputs:
    """The sources of a run by config key, and the facts about them that are known before they are prepared."""

    sources: dict[str, Source]
    tokens: dict[str, int]  # number of tokens of each source that is prepared or quick to count
    shards: dict[str, Corpus]  # of each source that is prepared
    tokenizer: Tokenizer | None  # None: all sources are token files
    warnings: list[str]

    @property
    def unused(self) -> str:
        """Return a notice of the settings in the tokenizer's file that are not used, or ""."""
        return self.tokenizer.unused if self.tokenizer else ""

    @property
    def fingerprint(self) -> str:
        """Return the fingerprint of the tokenizer if the run trains on text, else ""."""
        return self.tokenizer.fingerprint if self.tokenizer and self.is_text else ""

    @property
    def trained(self) -> dict[str, Source]:
        """Return the sources that the run trains on, by config key."""
        return {key: source for key, source in self.sources.items() if not key.startswith("validation.")}

    @property
    def is_text(self) -> bool:
        """Return whether the run trains on text, not on token files alone."""
        return any(source.kind != "tokens" for source in self.trained.values())


def check_inputs(
    config: Config, vocab_size: int | None, sequences: int | None = None, unit_len: int | None = None
) -> Inputs:
    """Check that every source has files and that the tokenizer loads and fits the model.

    Sources that are prepared, or have at most one MiB uncompressed, are checked completely: bad records, ids, enough
    tokens for a step. Of other text sources only the field `data.text_key` is checked.

    Args:
        vocab_size: vocabulary size of the model; None: not known, and checks that need it are skipped.
        sequences: sequences of one training step; None: the number of tokens of sources is not checked.
        unit_len: tokens of the samples that sources are cut into; None: the longest seq_len of the config.

    Raises:
        DataError: a check fails; the error lists all problems.
    """
    problems = list[str]()
    found, tokenizer = _named(config, problems)
    is_text = [source.kind != "tokens" for source in found.values()]
    if tokenizer and vocab_size is not None:
        with _gathered(problems):
            check_vocabulary(tokenizer, vocab_size, bool(config.checkpoint.initial_load_path))
    with _gathered(problems):
        check_cache_is_folder(config.data)
    inputs = Inputs(found, {}, {}, tokenizer, [])
    for key, source in found.items():
        with _gathered(problems):
            check_cache_is_outside(source, config.data)
        with _gathered(problems):
            _look_at(inputs, key, config, vocab_size, sequences, unit_len or longest_seq_len(config))
    if found and all(is_text):
        for name, default in (("separator_id", None), ("token_dtype", "auto")):
            if (asked := getattr(config.data, name)) != default:
                want, fix = "token files among the sources: of text, the tokenizer decides it", f"leave {name} out"
                problems.extend(DataError.of("data", f"data.{name}", show(asked), want, fix).args)
    if problems:
        raise DataError(*problems)
    return inputs


def check_named_inputs(config: Config, wrong: Collection[str]) -> None:
    """Raise a DataError with all sources, and a tokenizer on this host, that are not there, whatever other keys say.

    `wrong`: keys whose values are refused already, and are not looked at.
    """
    problems, tokenizer = list[str](), config.data.tokenizer
    is_known = "data.tokenizer" not in wrong and not is_hub_name(tokenizer)
    data = replace(config.data, tokenizer=tokenizer if is_known else "bytes", add_bos_token=False)
    _named(replace(config, data=data), problems, wrong)
    if problems:
        raise DataError(*problems)


def _named(
    config: Config, problems: list[str], wrong: Collection[str] = ()
) -> tuple[dict[str, Source], Tokenizer | None]:
    """Return the sources by key, and the tokenizer if one is text; add what is not there to `problems`."""
    found, tokenizer = dict[str, Source](), None
    for key, name in (dict(source_keys(config).values()) | held_out_sources(config)).items():
        with _gathered(problems):
            if key not in wrong:
                found[key] = resolve(name, key)
    if not found or any(source.kind != "tokens" for source in found.values()):
        with _gathered(problems):
            tokenizer = load_tokenizer(config.data.tokenizer, config.data.add_bos_token)
    return found, tokenizer


@contextmanager
def _gathered(problems: list[str]) -> Iterator[None]:
    """Append the messages of a DataError that is raised in the block to `problems`."""
    try:
        yield
    except DataError as e:
        problems.extend(e.args)


def _look_at(
    inputs: Inputs, key: str, config: Config, vocab_size: int | None, sequences: int | None, unit_len: int
) -> None:
    """Check the source `key` as far as this is quick; add its tokens, shards and warnings to `inputs`."""
    source, data, is_held_out = inputs.sources[key], config.data, key.startswith("validation.")
    check_used_whole(source, data)
    used = None if source.kind == "tokens" else inputs.tokenizer
    # If the tokenizer does not fit the model, its prepared shards are not opened: the misfit is reported already.
    fits = vocab_size is not None and (used.vocab_size <= vocab_size if used else source.kind == "tokens")
    planned = preparation_of(source, data, vocab_size or 0, used) if used or fits else None
    if planned and fits and os.path.isdir(planned.folder):
        inputs.shards[key] = Corpus(planned.folder, planned)
    meta = inputs.shards[key].meta if key in inputs.shards else _read_if_small(source, data, planned)
    least = least_samples(config, sequences, unit_len) if sequences else None
    if meta is not None:
        inputs.tokens[key] = meta.tokens
        inputs.warnings.extend(data_warnings(key, meta, vocab_size or 0))
        if data.packing == "best_fit" and not is_held_out:
            # The number of samples is known only after packing; before, the run checks it when it starts.
            samples = prepared_samples(inputs.shards[key], data, unit_len) if key in inputs.shards else None
            if samples is not None and least is not None:
                samples.require(least, key)
        elif least is not None:
            seq_len, least = (config.training.seq_len, 1) if is_held_out else (unit_len, least)
            sample_count(source.name, meta.tokens, seq_len, least, key, meta.max_tokens)
    if planned is not None and source.kind == "tokens" and data.separator_id is not None:
        if text := require_separator(source, planned.dtype, data.separator_id, _LOOKED_AT_TOKENS):
            inputs.warnings.append(text)
        read = _validated(config, inputs.tokens.get(key, 0), sequences) if is_held_out else 0
        if data.document_mask and 0 < read <= _LOOKED_AT_TOKENS:  # more tokens are checked when the run starts
            require_target(first_ids(source, planned.dtype, read), data.separator_id, source.name, key)


def _validated(config: Config, tokens: int, sequences: int | None) -> int:
    """Return how many tokens of a held-out source validation reads; 0: not known."""
    samples, asked = max(0, tokens - 1) // config.training.seq_len, config.validation.steps
    return config.training.seq_len * (samples if asked < 0 else min(samples, asked * (sequences or 0)))


def check_cache(inputs: Inputs, data: Data) -> None:
    """Raise a DataError if shards are still to be made and this host cannot write them."""
    if len(inputs.shards) < len(inputs.sources):
        try:
            require_writable(Path(os.path.expanduser(data.cache_dir)))
        except OSError as e:
            raise unusable_cache(data, e) from e


def _read_if_small(source: Source, data: Data, planned: Preparation | None) -> Meta | None:
    """Read a small source and return its `Meta`; for larger token files, a `Meta` with their size; else None."""
    n_bytes = source.n_bytes()
    source.require_packages()
    check_text_key(source, data)
    is_small = n_bytes is not None and n_bytes <= _SMALL_BYTES and not source.needs_pyarrow
    if source.kind == "tokens" and planned is not None and n_bytes is not None:
        if is_small:
            planned.check(meta := scan(source, planned.dtype, lambda _: None))
            return meta
        all_ids = Shard("", n_bytes // np.dtype(planned.dtype).itemsize, planned.vocab_size - 1, 0, ())
        return Meta(source.name, "", planned.dtype, (all_ids,), "")
    if not is_small or source.kind == "tokens":
        return None
    tally = new_tally(source, data)
    if planned is None or planned.tokenizer is None:  # errors of the tokenizer are reported elsewhere
        for _ in documents(source, data.text_key, tally):
            pass
        tally.check()
        return None
    for _ in encode(source, data.text_key, planned.tokenizer, tally, planned.max_tokens):
        pass
    if not tally.n_tokens:
        raise no_text(source.name, source.key, tally.bad)
    return meta_of(planned, tally, (Shard("", tally.n_tokens, -1, 0, ()),), "")
