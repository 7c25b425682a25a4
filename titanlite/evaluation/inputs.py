"""Decide with which tokenizer, and how often, the tasks of a run are evaluated. No torch here."""

import math

from titanlite.config.check import sequences_per_step
from titanlite.config.problems import Origin
from titanlite.config.schema import Config
from titanlite.data.inputs import Inputs
from titanlite.data.prepare import check_vocabulary
from titanlite.data.tokenizer import Tokenizer, load_tokenizer
from titanlite.errors import DataError
from titanlite.evaluation.tasks import KEY, check_tasks

_LEAST = 1000  # steps between evaluations, if nothing is given
_SHARE = 0.02  # of the tokens trained on. Forward is a third of a step, and takes half as long again without a compiler


def check_evaluation(config: Config, inputs: Inputs | None, vocab_size: int | None, origin: Origin) -> None:
    """Check the tasks of a run before it starts, but for those on the hub.

    Args:
        config: the run.
        inputs: its sources; None if something is wrong with them.
        vocab_size: of the model; None if it is not known.
        origin: where each key was given.

    Raises:
        DataError: a task cannot be read, or there is no tokenizer for it.
    """
    if not config.evaluation.tasks:
        return
    check_tasks(config.evaluation.tasks)
    if inputs is None or inputs.tokenizer is not None:
        return
    if "data.tokenizer" not in origin.places:
        want = "data.tokenizer as well: token files do not say which tokenizer made their ids"
        fix = 'tokenizer = "tokenizer.json" in [data]: the one that made the token files'
        raise DataError.of("evaluation", KEY, "", want, fix)
    tokenizer = load_tokenizer(config.data.tokenizer, config.data.add_bos_token)
    if vocab_size is not None:
        check_vocabulary(tokenizer, vocab_size)


def tokenizer_of(config: Config, inputs: Inputs) -> Tokenizer:
    """Return the tokenizer of a run, which for token files is not loaded yet."""
    return inputs.tokenizer or load_tokenizer(config.data.tokenizer, config.data.add_bos_token)


def interval(config: Config, world_size: int, tokens: int) -> int:
    """Return the steps between evaluations, as given, or such that they take little of the time.

    Equal under every layout, if `training.global_batch_size` is given.

    Args:
        config: the run.
        world_size: number of processes.
        tokens: that an evaluation reads, padding of rows included.
    """
    if config.evaluation.freq is not None:
        return config.evaluation.freq
    per_step = (sequences_per_step(config, world_size) or 1) * config.training.seq_len
    return max(_LEAST, math.ceil(tokens / (_SHARE * per_step) / 500) * 500)
