"""Tables of what a run trains on: its sources and stages, and the documents of a sample."""

from collections import Counter
from collections.abc import Sequence

import numpy as np

from titanlite.config.schema import Config
from titanlite.data.document_starts import twice_attended
from titanlite.data.order import order_in_words
from titanlite.data.packing import PackedSamples, PackingCounts, count_packing, documents_in_words
from titanlite.data.run_samples import OpenSource, RunSamples, TrainedSample
from titanlite.data.stages import weights_in_words
from titanlite.data.tokenizer import Tokenizer
from titanlite.kernels.ignore_index import IGNORE_INDEX
from titanlite.text_table import columns
from titanlite.training.schedule import learning_rate

_SHOWN, _LOOKED_AT = 34, 80  # characters shown of each end of a document, and tokens decoded for an end

_PARTS = {(True, True): "whole", (True, False): "beginning", (False, True): "end", (False, False): "middle"}


def run_tables(run: RunSamples, config: Config) -> str:
    """Return the tables of a run's stages and sources."""
    table, mixture, steps = run.table, run.mixture, run.table.steps
    rows = [["stage from step", "from tokens", "seq_len", "sequences a step", "learning rate", "weights"]]
    for row in table.rows:
        asked = row.asked
        numbers = (row.from_step + 1, row.from_tokens, asked.seq_len, asked.sequences)
        rate = f"{learning_rate(row.from_step + 1, config, table):.3g}"  # in the stage's first step
        rows.append([*(f"{number:,}" for number in numbers), rate, weights_in_words(asked)])
    total = table.tokens(steps)
    asked, taken, epochs, skipped = (
        of(steps) for of in (mixture.asked, mixture.tokens, mixture.epochs, mixture.skipped)
    )
    sources = [
        ["source", "tokens", "documents", "bad records", "asked", "taken", "trained on", "epochs", "tokens skipped"]
    ]
    for name in mixture.names:
        source, tokens, documents, bad, through = run.sources.get(name), "", "", "", ""
        if source is not None:  # else it was trained on before, and the config no longer names it
            tokens, through = f"{source.shards.tokens:,}", f"{epochs[name]:.3g}"
            bad = f"{source.shards.meta.n_bad_records:,}"
            documents = documents_in_words(source.shards, _packing_counts(source))
        shares = (f"{float(share) / total:.3%}" for share in (asked[name], taken[name]))
        label = name or run.sources[name].asked
        sources.append([label, tokens, documents, bad, *shares, f"{taken[name]:,}", through, f"{skipped[name]:,}"])
    named = "".join(f"{name} is {source.asked}\n" for name, source in run.sources.items() if name)
    if run.window:
        named += f"{order_in_words(run.window, table.unit_len, table.row(1).asked.tokens_per_step)}\n"
    return (
        f"{steps:,} steps, {table.samples(steps):,} samples, {total:,} tokens\n\n{columns(*rows)}\n{columns(*sources)}"
        + (f"\n{named}" if named else "")
    )


def _packing_counts(source: OpenSource) -> PackingCounts | None:
    """Count a source's documents. None: it is not packed, and its metadata has their number or it has no separator."""
    if isinstance(source.samples, PackedSamples):
        return source.samples.counts
    shards = source.shards
    if shards.meta.documents or shards.separator is None:
        return None
    return count_packing(shards, source.samples.seq_len, shards.separator)


def sample_text(sample: TrainedSample, tokenizer: Tokenizer | None) -> str:
    """Return where a sample is from, and a table of its documents. Without a tokenizer, their text is shown as ids."""
    source, tokens, targets = sample.source, *sample.tokens
    name = f"{source.name} ({source.asked})" if source.name else source.asked
    head = f"sample {sample.index:,}, of step {sample.step:,}: {name}, epoch {sample.epoch}, sample {sample.sample:,}"
    if sample.seq_len < source.samples.seq_len:
        head += f", tokens {sample.first:,} to {sample.first + sample.seq_len:,} of it"
    if source.shards.separator is None:
        why = "its documents are not known: data.separator_id is not given"
        return f"{head}\n  {why}\n  {_both_ends(tokens, tokenizer)}\n"
    rows = [["place", "tokens", "in the source", "document", "text"]]
    for document in sample.documents:
        text = _both_ends(tokens[document.at : document.at + document.length], tokenizer)
        numbers = (document.at, document.length, document.start)
        part = _PARTS[document.begins, document.ends]
        rows.append([*(f"{number:,}" for number in numbers), part, text])
    return f"{head}\n{columns(*rows)}{_count_line(sample, targets)}"


def step_text(samples: Sequence[TrainedSample], tokenizer: Tokenizer | None) -> str:
    """Return the text of each sample of a step (`sample_text`), and a line with the totals of the step."""
    given = Counter(sample.source.name or sample.source.asked for sample in samples)
    shares = ", ".join(f"{name} {count:,}" for name, count in given.items())
    targets = sum(int((sample.tokens[1] != IGNORE_INDEX).sum()) for sample in samples)
    documents = sum(len(sample.documents) for sample in samples)
    tokens = sum(sample.seq_len for sample in samples)
    last = f"step {samples[0].step:,}: {len(samples):,} samples ({shares}), {documents:,} documents, "
    last += f"{targets:,} targets of {tokens:,} tokens\n"
    return "\n".join([*(sample_text(sample, tokenizer) for sample in samples), last])


def share_of_causal(sample: TrainedSample) -> float:
    """Return how many pairs of tokens a sample's attention forms, as a share of the pairs of plain causal attention."""
    return twice_attended(np.array(sample.attends_within)) / sample.seq_len**2


def _count_line(sample: TrainedSample, targets: np.ndarray) -> str:
    padded = sample.seq_len - sum(document.length for document in sample.documents)
    counted = int((targets != IGNORE_INDEX).sum())
    ended = sample.seq_len - counted - padded
    lines = [f"{counted:,} targets"]
    if ended:
        lines[0] += f"; none behind the last token of {ended:,} document{'s' * (ended != 1)}"
    if padded:
        lines[0] += f"; {padded:,} token{'s' * (padded != 1)} of padding"
    within = "within documents" if sample.is_masked else "across documents (data.document_mask = false)"
    lines.append(f"attention {within}: {share_of_causal(sample):.1%} of plain causal attention")
    return "".join(f"  {line}\n" for line in lines)


def _both_ends(tokens: np.ndarray, tokenizer: Tokenizer | None) -> str:
    """Return the text of `tokens` on one line, without its middle if it is long. Without a tokenizer, return ids."""
    if tokenizer is None:
        ids = [str(token) for token in tokens.tolist()]
        return f"[{' '.join(ids if len(ids) <= 12 else [*ids[:6], '…', *ids[-4:]])}]"
    if len(tokens) > 2 * _LOOKED_AT:
        first, last = tokenizer.decode(tokens[:_LOOKED_AT]), tokenizer.decode(tokens[-_LOOKED_AT:])
    else:
        first = last = tokenizer.decode(tokens)
        if len(first) <= 2 * _SHOWN:
            return repr(first)
    return f"{first[:_SHOWN]!r} … {last[-_SHOWN:]!r}"
