"""Find what a run trains on, sample by sample, without training and without torch, so that users can inspect data."""

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from titanlite.config.schema import Config
from titanlite.config.stages import source_keys
from titanlite.data.corpus import Corpus
from titanlite.data.document_starts import mask_documents
from titanlite.data.mixture import Mixture, seed_of
from titanlite.data.packing import open_samples, prepared_samples
from titanlite.data.prepare import prepare
from titanlite.data.samples import SampleDocument, Samples
from titanlite.data.stages import StageTable
from titanlite.errors import DataError


@dataclass(frozen=True)
class OpenSource:
    """A source that the run trains on, with its shards and samples open."""

    name: str  # in `data.mixture`; "" for `data.source`
    asked: str  # the source as the config writes it
    shards: Corpus
    samples: Samples  # as long as the longest seq_len of all stages


def open_sources(config: Config, vocab_size: int, progress: bool, unit_len: int) -> dict[str, OpenSource]:
    """Prepare and open the training sources of a run, by name, cut into samples of `unit_len` tokens."""
    found: dict[str, OpenSource] = {}
    for name, (key, asked) in source_keys(config).items():
        shards = prepare(asked, config.data, vocab_size, progress, key)
        found[name] = OpenSource(name, asked, shards, open_samples(shards, config.data, unit_len, progress))
    return found


def prepared_sources(config: Config, shards: Mapping[str, Corpus], unit_len: int) -> dict[str, OpenSource] | None:
    """Open the training sources of a run, by name; return None if one would have to be prepared or packed first."""
    found: dict[str, OpenSource] = {}
    for name, (key, asked) in source_keys(config).items():
        own = shards.get(key)
        samples = own and prepared_samples(own, config.data, unit_len)
        if own is None or samples is None:
            return None
        found[name] = OpenSource(name, asked, own, samples)
    return found


@dataclass(frozen=True)
class TrainedSample:
    """A sample that training reads: a sample of a source, or a piece of one."""

    index: int  # position in training, from 0 on
    step: int  # the step that trains on it, from 1 on
    source: OpenSource
    epoch: int  # epoch of the source, from 1 on
    sample: int  # number of the sample in the source
    first: int  # where the piece begins in that sample; 0 unless a stage has a shorter seq_len
    seq_len: int
    is_masked: bool  # attention and targets stay within a document

    @cached_property
    def tokens(self) -> np.ndarray:
        """Tokens and targets as training uses them, [2, S] int64."""
        pair = self.source.samples.read(self.sample)[:, self.first : self.first + self.seq_len]
        separator = self.source.shards.separator
        if self.is_masked and separator is not None:
            mask_documents(pair[:, None], np.array([separator]))
        return pair

    @cached_property
    def documents(self) -> list[SampleDocument]:
        """The documents in the sample, in order."""
        return self.source.samples.documents(self.sample, self.first, self.seq_len)

    @property
    def attends_within(self) -> list[int]:
        """Number of tokens of each document if documents are masked, else of the whole sample."""
        return [document.length for document in self.documents] if self.is_masked else [self.seq_len]


class RunSamples:
    """The samples of a run in the order of training."""

    def __init__(self, config: Config, table: StageTable, sources: Mapping[str, OpenSource]) -> None:
        self.table, self.sources, self._config = table, sources, config
        self.window = config.data.shuffle_window  # tokens of a window of shuffling; 0: no window
        units = {name: source.samples.n for name, source in sources.items()}
        self.mixture = Mixture(table, units)

    def of_step(self, step: int) -> range:
        """Return the indices of the samples of a step."""
        return range(self.table.samples(step - 1), self.table.samples(step))

    def at(self, index: int) -> TrainedSample:
        """Return the training sample `index`, counted from 0.

        Raises:
            DataError: the source of the sample is no longer in the config.
        """
        row = self.table.rows[bisect_right([row.from_sample for row in self.table.rows], index) - 1]
        step = row.from_step + (index - row.from_sample) // row.asked.sequences + 1
        taken = self.mixture.taken(row, np.array([index]))
        name, unit = self.mixture.names[int(taken.source[0])], int(taken.unit[0])
        if name not in self.sources:
            saw = f"no such source, and sample {index} is of it"
            want = "the sources that were trained on, to look at them"
            fix = f'[[data.mixture]] with name = "{name}" and weight = 0.0'
            raise DataError.of("data", f"data.mixture.{name}", saw, want, fix)
        source, data, seed = self.sources[name], self._config.data, seed_of(self._config.training.seed, name)
        n, window = source.samples.n, data.shuffle_window // source.samples.seq_len
        assert n is not None  # noqa: S101  # known, as the source is prepared
        sample = int(source.samples.in_order(np.array([unit]), seed, window)[0])
        first = int(taken.piece[0]) * taken.seq_len
        return TrainedSample(index, step, source, unit // n + 1, sample, first, taken.seq_len, data.document_mask)
