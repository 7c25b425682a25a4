"""Train a tokenizer on a sample of a source: byte-level BPE with a token that ends documents.

Words are split as GPT-2's tokenizer splits them. Every text has tokens, since all 256 bytes are among them.
"""

import hashlib
from pathlib import Path

from titanlite.config.schema import Data
from titanlite.data.cache_folder import slug
from titanlite.data.sources import Source
from titanlite.data.text_sample import read_sample
from titanlite.data.tokenizer import SEPARATORS
from titanlite.durable import write_durably
from titanlite.redact import redact_urls

LEAST_IDS = 257
"""The bytes, and the token that ends documents."""
_SAMPLE_BYTES = 1 << 27  # of text; more hardly changes the most frequent pieces of words


def tokenizer_path(source: Source, data: Data, n_ids: int, folder: Path) -> Path:
    """Return the file in `folder` for a tokenizer of `n_ids` ids that is trained on a source as it is now."""
    identity = f"{source.kind} {source.name} {data.text_key} {source.stamps()} {_SAMPLE_BYTES}"
    key = hashlib.blake2b(identity.encode(), digest_size=4).hexdigest()
    return folder / f"{slug(redact_urls(source.name))}-{n_ids}-{key}.json"


def train_tokenizer(source: Source, data: Data, n_ids: int, path: Path) -> str:
    """Train a tokenizer of at most `n_ids` ids, and write it to `path` as a tokenizer.json. Return the sample in words.

    Fewer ids are made if the sample has no more pieces that occur twice.

    Raises:
        DataError: the source cannot be read.
        OSError: the file cannot be written.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    sample = read_sample(source, data, _SAMPLE_BYTES)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=n_ids,
        min_frequency=2,
        special_tokens=[SEPARATORS[0]],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(sample.texts, trainer)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_durably(path, tokenizer.to_str(pretty=True))
    return sample.origin
