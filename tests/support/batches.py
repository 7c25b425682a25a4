"""The batches of one source of concatenated tokens, as `data.source` alone gives them."""

from typing import Any

import torch

from titanlite.config.schema import Config, Training
from titanlite.data.batches import TrainBatches
from titanlite.data.context_split import ContextGroup
from titanlite.data.corpus import Corpus
from titanlite.data.samples import Samples
from titanlite.data.stages import stage_table


def batches_of_source(
    shards: Corpus,
    *,
    seq_len: int,
    seed: int,
    global_batch_size: int,
    local_batch_size: int,
    dp_rank: int,
    dp_size: int,
    device: torch.device,
    step: int = 0,
    context: ContextGroup | None = None,
    separator: int | None = None,
) -> TrainBatches:
    """Begin to read them; close them."""
    shape = {"seq_len": seq_len, "global_batch_size": global_batch_size, "local_batch_size": local_batch_size}
    table = stage_table(Config(training=Training(**shape)), None)
    sources = {"": Samples(shards, seq_len)}
    where: dict[str, Any] = {"dp_rank": dp_rank, "dp_size": dp_size, "step": step, "context": context}
    return TrainBatches(sources, table, seed=seed, device=device, separators={"": separator}, **where)
