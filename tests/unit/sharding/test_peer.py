"""The derived plan of Llama 3 against torchtitan's, written by hand: the same shards, the same numbers moved.

torchtitan names a style of `torch.distributed.tensor.parallel` for each module (`tests/support/dtensor_llama.py`), and
DTensor finds the collectives as it runs.
"""

from collections import Counter

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.distributed.tensor.placement_types import Placement
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.dtensor_llama import Block, Norm, parallel
from tests.support.fake_ranks import ranks_that_move_nothing
from tests.support.sharding.execute import planned
from titanlite.config.recipe_schema import ModelDims
from titanlite.models.llama3 import Llama3
from titanlite.sharding.derive import plan_model

SIZES = ModelDims("", 2, dim=64, n_heads=8, n_kv_heads=4, ffn_dim=512, vocab_size=32, rope_theta=1e4, norm_eps=1e-5)
TP, B, S = 4, 2, 8
JOINED = {"wq": "wqkv", "wk": "wqkv", "wv": "wqkv", "w1": "w13", "w3": "w13"}


class Peer(nn.Module):
    """Llama with the peer's modules and shapes, [B, S, D]; rotary embedding moves nothing and is left out."""

    def __init__(self) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(SIZES.vocab_size, SIZES.dim)
        self.layers = nn.ModuleList(Block(SIZES.dim) for _ in range(SIZES.n_layers))
        self.norm, self.output = Norm(SIZES.dim), nn.Linear(SIZES.dim, SIZES.vocab_size, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.output(self.norm(x))


def by_the_peers_plan(model: Peer) -> Peer:
    mesh = init_device_mesh("cpu", (TP,))
    embedding = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))
    output = ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False)
    ends = {"tok_embeddings": embedding, "norm": SequenceParallel(), "output": output}
    parallelize_module(model, mesh, ends)
    for block in model.layers:
        parallel(block)  # type: ignore[arg-type]
    return model


class Moved(TorchDispatchMode):
    """Collectives by kind and by the numbers of the whole tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counter[tuple[str, int]]()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(t is DTensor for t in types):
            return NotImplemented  # what DTensor makes of it comes by here, too
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if func.namespace == "_c10d_functional" and name not in ("wait_tensor", "_wrap_tensor_autograd"):
            whole = args[0] if name == "reduce_scatter_tensor" else out
            self.counts[name.removesuffix("_tensor").removesuffix("_into"), whole.numel()] += 1
        return out


def test_the_plan_is_the_peers() -> None:
    with torch.device("meta"):
        ours = Llama3(SIZES, S)
        tokens = torch.empty(B * S, dtype=torch.long)
    plan = plan_model(ours, [tokens], TP, Llama3.sharding)
    with ranks_that_move_nothing(TP):
        peer = by_the_peers_plan(Peer())
        with Moved() as forward:
            logits = peer(torch.zeros(B, S, dtype=torch.long))
        assert isinstance(logits, DTensor)
        assert logits.placements == (Shard(2),)
        with Moved() as backward:
            logits.to_local().sum().backward()
            # A norm's weight is whole, each rank has its tokens' part of the gradient; DTensor sums it when it is read.
            partial = [p.grad.full_tensor() for n, p in peer.named_parameters() if "norm" in n]  # type: ignore[union-attr]
    placed: dict[str, set[Placement]] = {}
    for name, parameter in peer.named_parameters():
        *path, layer, own = name.split(".")
        placed.setdefault(".".join([*path, JOINED.get(layer, layer), own]), set()).add(parameter.placements[0])
    assert placed == {n: {t.placement} for n, t in plan.tensors.items() if n.endswith(".weight")}
    for seen, direction in ((forward, "forward"), (backward, "backward")):
        wanted = {(kind, numel): n for (kind, of, numel), n in planned(plan).items() if of == direction}
        assert seen.counts == wanted, direction
    assert len(partial) == 2 * SIZES.n_layers + 1
