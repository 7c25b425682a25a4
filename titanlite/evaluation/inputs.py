"""Check the tasks of a run and their tokenizer, and choose the steps between evaluations. Does not import torch."""

import math

from titanlite.config.held_out import samples_of
from titanlite.config.problems import Origin
from titanlite.config.schema import Config
from titanlite.config.stages import sequences_per_step
from titanlite.data.inputs import Inputs
from titanlite.data.prepare import check_vocabulary
from titanlite.data.tokenizer import Tokenizer, load_tokenizer
from titanlite.errors import DataError
from titanlite.evaluation.prompts import SAMPLE_KEYS, encode_prompts
from titanlite.evaluation.tasks import KEY, load_tasks

_LEAST = 1000  # least steps between evaluations, if the config gives none
_SHARE = 0.02  # most evaluated tokens per trained token; a forward pass takes 1/3 of a step, or 1/2 without compiler


def check_evaluation(config: Config, inputs: Inputs | None, vocab_size: int | None, origin: Origin) -> None:
    """Check the tasks and the samples of a run before it starts, except tasks on the hub.

    `inputs` is None if the sources are wrong. `vocab_size` is None if it is unknown.

    Raises:
        DataError: a task cannot be read, a sample is too long, or there is no tokenizer for them.
    """
    samples = samples_of(config)
    if not config.evaluation.tasks and not samples:
        return
    load_tasks(config.evaluation.tasks, with_hub=False)
    if inputs is None:
        return
    key = KEY if config.evaluation.tasks else SAMPLE_KEYS[0]
    if inputs.tokenizer is None and "data.tokenizer" not in origin.places:
        want = "data.tokenizer as well: token files do not say which tokenizer made their ids"
        fix = 'tokenizer = "tokenizer.json" in [data]: the one that made the token files'
        raise DataError.of("evaluation", key, "", want, fix)
    tokenizer = tokenizer_of(config, inputs)
    if inputs.tokenizer is None and vocab_size is not None:
        check_vocabulary(tokenizer, vocab_size)
    encode_prompts(samples, tokenizer, config.validation.sample_tokens, config.training.seq_len, *SAMPLE_KEYS)


def tokenizer_of(config: Config, inputs: Inputs) -> Tokenizer:
    """Return the tokenizer of a run; load it if all sources are token files."""
    return inputs.tokenizer or load_tokenizer(config.data.tokenizer, config.data.add_bos_token)


def interval(config: Config, world_size: int, tokens: int) -> int:
    """Return the steps between evaluations: `evaluation.freq`, or a number at which evaluation takes little time.

    `world_size` matters only if `training.global_batch_size` is not given. `tokens`: number of tokens, padding
    included, in one evaluation.
    """
    if config.evaluation.freq is not None:
        return config.evaluation.freq
    per_step = max(1, sequences_per_step(config, world_size)) * config.training.seq_len
    return max(_LEAST, math.ceil(tokens / (_SHARE * per_step) / 500) * 500)
