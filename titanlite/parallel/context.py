"""Context parallelism: ranks of a group have the same samples, and each a part of their tokens.

Only attention sees other tokens, and asks for their keys itself (`kernels/context_attention.py`); so a model's layers
stay as they are. The parts are made with the batches (`data/context_split.py`). To weights these ranks are further
data-parallel ones.
"""

from collections.abc import Sequence

from torch import nn

from titanlite.config.check_mesh import tokens_of_rank
from titanlite.config.schema import Config
from titanlite.data.context_split import ContextGroup, chunk_length
from titanlite.models.experts import MixtureOfExperts
from titanlite.observe.peak_flops import windows_of
from titanlite.parallel.mesh import Mesh
from titanlite.receipt import Entry


def token_group(mesh: Mesh, windows: Sequence[int]) -> ContextGroup | None:
    """Return the ranks that share the tokens of a sequence out; None if each has whole sequences.

    Args:
        mesh: of the run.
        windows: of the layers of the model; 0: none.
    """
    group = mesh.context_group
    return group and ContextGroup(group.name, group.size, group.rank, tuple(sorted({0, *windows})))


def apply_context_parallel(model: nn.Module, mesh: Mesh, config: Config) -> Entry:
    """Let routers balance the tokens of all ranks that have some of a micro-batch, and return the receipt's entry.

    Args:
        model: the run's, after tensor parallelism.
        mesh: of the run.
        config: of the run.
    """
    for module in model.modules():
        if isinstance(module, MixtureOfExperts):
            module.group = mesh.micro_batch_group
    ranks, layers = config.parallelism.context_parallel_degree, len(windows_of(model))
    tokens = tokens_of_rank(config)
    applied = {
        "layers": layers,
        "tokens of a rank": tokens,
        "tokens of a chunk": chunk_length(ranks * tokens, config.training.seq_len, ranks),
        "keys travel by": "all-to-all: those of documents that a rank has tokens of",
    }
    return Entry("context_parallel", ranks, applied, count=layers, key="parallelism.context_parallel_degree")
