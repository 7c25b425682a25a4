"""Estimate from a run's prepared data which share of causal attention's FLOPs stays within documents."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from titanlite.config.schema import Config
from titanlite.data.corpus import Corpus
from titanlite.data.mixture import Mixture
from titanlite.data.run_samples import prepared_sources
from titanlite.data.stages import StageTable
from titanlite.observe.peak_flops import mean_attended

_SAMPLES = 256  # evenly spread over the data; the standard error of the share is at most 0.03


@dataclass(frozen=True)
class AttendedShare:
    """The lengths of documents in some samples of a run.

    Attributes:
        seq_len: S, the tokens of a sample.
        samples: number of samples that were read.
        mean: mean tokens of a document, or of its part in a sample.
        lengths: [n] tokens of each document or part. Each token of padding counts as a document of length 1.
    """

    seq_len: int
    samples: int
    mean: float
    lengths: np.ndarray

    def of(self, window: int = 0) -> float:
        """Return the share of causal attention's FLOPs within documents. `window`: of attention, in tokens; 0: none."""
        return mean_attended([window], self.lengths) / mean_attended([window], np.array([self.seq_len]))

    def starts(self, tokens: int, batches: int) -> list[np.ndarray]:
        """Return, for each of some micro-batches, the position where each token's document begins: [N] int32.

        Args:
            tokens: N, the tokens of a micro-batch; a multiple of S.
            batches: most micro-batches to return, spread over the samples. Samples too few for one are repeated.
        """
        lengths = np.tile(self.lengths, -(-tokens // int(self.lengths.sum())))
        starts = np.repeat(lengths.cumsum() - lengths, lengths)
        places = np.arange(len(starts))
        starts = np.maximum(starts, places - places % self.seq_len)
        n = len(starts) // tokens
        firsts = np.linspace(0, n, min(n, batches), endpoint=False).astype(int) * tokens  # samples are in corpus order
        return [(starts[first : first + tokens] - first).astype(np.int32) for first in firsts.tolist()]


def attended_share(config: Config, table: StageTable, shards: Mapping[str, Corpus]) -> AttendedShare | None:
    """Read document lengths in samples of each source, in proportion to its share of the run's tokens.

    The seed does not matter. `shards` are the prepared sources, by key. Return None if a source is not prepared.
    """
    sources, seq_len = prepared_sources(config, shards, table.unit_len), config.training.seq_len
    if sources is None:
        return None
    units = {name: source.samples.n for name, source in sources.items()}
    asked, total = Mixture(table, units).asked(table.steps), table.tokens(table.steps)
    samples, lengths = 0, list[int]()
    for name, source in sources.items():
        count = math.ceil(_SAMPLES * asked[name] / total)
        assert source.samples.n is not None  # noqa: S101  # known, as the source is prepared
        starts = np.linspace(0, source.samples.n * source.samples.seq_len // seq_len, count, endpoint=False).astype(int)
        for start in np.unique(starts).tolist():
            sample, first = divmod(start * seq_len, source.samples.seq_len)
            lengths += [document.length for document in source.samples.documents(sample, first, seq_len)]
            samples += 1
    padded = samples * seq_len - sum(lengths)
    return AttendedShare(seq_len, samples, sum(lengths) / len(lengths), np.array(lengths + [1] * padded))
