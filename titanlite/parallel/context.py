"""Context parallelism: the ranks of a group have the same samples, and each rank a part of the tokens.

Attention gathers the other ranks' keys (`kernels/context_attention.py`); all other layers are unchanged. The tokens are
split where batches are made (`data/context_split.py`). For weights and gradients these ranks are data-parallel.
"""

from collections.abc import Sequence

from torch import nn

from titanlite.config.check_mesh import tokens_of_rank
from titanlite.config.schema import Config
from titanlite.data.context_split import ContextGroup, chunk_length, documents_of_samples, load_of_split
from titanlite.kernels.collectives import Group
from titanlite.kernels.context_attention import exchanged
from titanlite.models.experts import MixtureOfExperts
from titanlite.observe.peak_flops import windows_of
from titanlite.parallel.mesh import Mesh
from titanlite.receipt import Entry


def token_group(mesh: Mesh, windows: Sequence[int]) -> ContextGroup | None:
    """Return the ranks that share a sequence's tokens, or None. `windows`: the layers' attention windows."""
    group = mesh.context_group
    return group and ContextGroup(group.name, group.size, group.rank, tuple(sorted({0, *windows})))


def balance_over_sharers(model: nn.Module, sharers: Group | None) -> None:
    """Make routers balance the tokens of all ranks that share a micro-batch; None: no ranks share one."""
    for module in model.modules():
        if isinstance(module, MixtureOfExperts):
            module.group = sharers


def context_entry(model: nn.Module, config: Config) -> Entry:
    """Return the receipt's entry of context parallelism; to be called after a step."""
    ranks, layers = config.parallelism.context_parallel_degree, len(windows_of(model))
    tokens, seq_len = tokens_of_rank(config), config.training.seq_len
    load = load_of_split(documents_of_samples(ranks * tokens, seq_len), seq_len, ranks, ())
    applied = {
        "layers": layers,
        "tokens of a rank": tokens,
        "tokens of a chunk": chunk_length(ranks * tokens, seq_len, ranks),
        "most attention of a rank over the mean": round(load.attention, 3),
        "keys travel by": "all-to-all: those of documents that a rank has tokens of",
    }
    if not set(windows_of(model)) <= exchanged.keys():
        layers = 0  # a user's model has not passed its sequences on to attention
    return Entry("context_parallel", ranks, applied, count=layers, key="parallelism.context_parallel_degree")
