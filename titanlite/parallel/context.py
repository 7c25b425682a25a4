"""Context parallelism: ranks of a group have the same samples, and each a part of their tokens.

Only attention sees other tokens, and asks for their keys itself (`kernels/context_attention.py`); so a model's layers
stay as they are. The parts are made with the batches (`data/context_split.py`). To weights these ranks are further
data-parallel ones.
"""

from torch import nn

from titanlite.config.check_mesh import tokens_of_rank
from titanlite.config.schema import Config
from titanlite.data.context_split import chunk_length
from titanlite.models.layers import CausalAttention
from titanlite.receipt import Entry


def context_entry(model: nn.Module, config: Config) -> Entry:
    """Return the receipt's entry of context parallelism.

    Args:
        model: the run's.
        config: of the run.
    """
    ranks, layers = config.parallelism.context_parallel_degree, 0
    for module in model.modules():
        layers += isinstance(module, CausalAttention)
    tokens = tokens_of_rank(config)
    applied = {
        "layers": layers,
        "tokens of a rank": tokens,
        "tokens of a chunk": chunk_length(ranks * tokens, config.training.seq_len, ranks),
        "keys travel by": "all-to-all: those of documents that a rank has tokens of",
    }
    return Entry("context_parallel", ranks, applied, count=layers, key="parallelism.context_parallel_degree")
