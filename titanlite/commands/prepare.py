"""Tokenize a run's data ahead of time.

A run tokenizes its data itself if needed. Doing it ahead of time pays off where many GPUs would sit idle meanwhile, or
where the training hosts cannot reach the source.
"""

import sys
import textwrap
from collections.abc import Sequence

from titanlite.commands.arguments import Command
from titanlite.commands.validate import epochs_of
from titanlite.config.held_out import held_out_sources
from titanlite.config.stages import least_samples, sequences_per_step, source_keys
from titanlite.data.corpus import Corpus
from titanlite.data.mixture import many_epochs
from titanlite.data.order import order_in_words
from titanlite.data.packing import PackedSamples, PackingCounts, count_packing, documents_in_words, open_samples
from titanlite.data.prepare import prepare
from titanlite.preflight.checked_run import checked_run
from titanlite.preflight.run_folder import RunFolder
from titanlite.text_table import columns

COMMAND = Command("prepare", __doc__ or "", {})


def run(argv: Sequence[str]) -> int:
    """Tokenize the sources of training, and of validation if it is enabled. Print a summary of each source."""
    # The weights that a run starts from need not be on the host that prepares its data.
    checked = checked_run(COMMAND.read(argv).flags, has_weights=False)
    config, vocab_size = checked.config, checked.dims.vocab_size
    RunFolder.of(config).require_same(config)
    trained = dict(source_keys(config).values())
    notices = [f"warning: {text}" for text in checked.warnings] + [checked.inputs.unused]
    sys.stdout.writelines(f"{notice}\n" for notice in filter(None, notices))
    units = dict[str, int | None]()
    for key, source in (trained | held_out_sources(config)).items():
        shards, epochs = prepare(source, config.data, vocab_size, progress=True, key=key), ""
        counts, packing = None, ""
        if key in trained:
            unit_len = checked.table.unit_len
            samples = open_samples(shards, config.data, unit_len, progress=True)
            samples.require(least_samples(config, sequences_per_step(config, None), unit_len), key)
            n = samples.n or 0
            if isinstance(samples, PackedSamples):
                counts = samples.counts
            elif shards.separator is not None:
                counts = count_packing(shards, unit_len, shards.separator)
            packing = _packing(shards, counts, config.data.packing)
            if window := config.data.shuffle_window:
                packing = f"\n  order        {order_in_words(window, unit_len, 0)}{packing}"
            if key not in checked.inputs.tokens:  # else `checked.warnings` has the warning
                units[next(name for name, (own, _) in source_keys(config).items() if own == key)] = n
            if not config.data.mixture:
                epochs = epochs_of(checked, n, None)
        sys.stdout.write(f"{_summary(shards, counts, epochs)}{packing}\n")
        sys.stdout.flush()
    for text in many_epochs(config, checked.table, units):
        sys.stdout.write(f"warning: {text}\n")
    return 0


def _packing(shards: Corpus, counts: PackingCounts | None, used: str) -> str:
    """Return a table of the effect of each value of `data.packing` on a source's documents. `used`: the run's value."""
    if counts is None:
        return "\n  packing      not known: data.separator_id says which id ends a document of token files"
    part = f", of the first {counts.tokens:,} tokens" if counts.tokens < shards.tokens else ""
    return (
        f"\n  packing      data.packing = {used}; both, of {counts.documents:,} documents{part}:\n"
        + textwrap.indent(columns(*counts.table()), "  ").rstrip("\n")
    )


def _summary(shards: Corpus, counts: PackingCounts | None, epochs: str) -> str:
    meta = shards.meta
    lines = [
        meta.source,
        f"  files        {shards.files}" * bool(shards.files),
        f"  documents    {documents_in_words(shards, counts)}",
        f"  tokens       {meta.tokens:,} as {meta.dtype}, by {meta.tokenizer or 'another program'}",
        f"  cut          the source has more; data.max_tokens = {meta.max_tokens:,} leaves it out"
        * bool(meta.max_tokens),
        f"  trained on   {epochs}" * bool(epochs),
        f"  unknown      {meta.n_unknown:,} of the tokens stand for text that the tokenizer does not know"
        * bool(meta.n_unknown),
        f"  bytes        {meta.input_bytes:,} read",
        f"  bad records  {meta.n_bad_records:,}",
        *(f"    {record}" for record in meta.bad_records),
        *(f"  skipped      {file}" for file in meta.skipped),
        f"  folder       {shards.folder}",
    ]
    return "\n".join(filter(None, lines))
