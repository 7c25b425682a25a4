"""Shards of a source, made in the folder of a test."""

from dataclasses import replace
from pathlib import Path

from titanlite.config.schema import Data
from titanlite.data.corpus import Corpus
from titanlite.data.prepare import prepare


def prepare_here(folder: Path, source: object, vocab_size: int = 256, **data: object) -> Corpus:
    """Prepare a source, with these keys of `[data]`; shards lie in `folder / "cache"` unless they say otherwise."""
    config = replace(Data(source=str(source), cache_dir=str(folder / "cache")), **data)
    return prepare(config.source, config, vocab_size, progress=False)
