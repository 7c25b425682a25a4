"""Initial weights: what each layer starts from, and that every rank keeps the part that is its own."""

import dataclasses

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from tests.support.ranks import run_ranks
from titanlite.config.recipe_schema import ModelDims
from titanlite.models.layers import LayerNorm, Linear
from titanlite.models.llama3 import Llama3
from titanlite.parallel.initialise import initialise, local_slice

SIZES = ModelDims("", 1, dim=64, n_heads=4, n_kv_heads=2, ffn_dim=128, vocab_size=32, rope_theta=1e4, norm_eps=1e-5)


def test_a_tied_weight_is_drawn_as_the_embedding():
    """Once: whether the head shares it does not change it."""
    models = [Llama3(dataclasses.replace(SIZES, tied_embeddings=tied), 8) for tied in (False, True)]
    for model in models:
        initialise(model, seed=0)
    apart, tied = (model.tok_embeddings.weight for model in models)
    assert torch.equal(tied, apart)


def test_biases_are_zero():
    model = nn.ModuleDict({"norm": LayerNorm(8, 1e-5), "layer": Linear(8, {"layer": 4}, std=0.02, bias=True)})
    initialise(model, seed=0)
    assert not model["norm"].bias.any()
    assert not model["layer"].bias.any()
    assert (model["norm"].weight == 1).all()
    assert model["layer"].weight.all()


def test_a_slice_is_what_the_layout_says(tmp_path):
    """FSDP over tensor parallelism, along one dim and along two; of six rows ranks have one or two, of three one none;
    and FSDP alone."""

    def body() -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        for rows, dim in ((16, 0), (6, 0), (3, 0), (6, 1), (6, None)):
            full = torch.arange(rows * 4.0).reshape(rows, 4)
            split = distribute_tensor(full, mesh["tp"], [Replicate() if dim is None else Shard(dim)])
            holder = nn.Module()
            holder.weight = nn.Parameter(split)
            fully_shard(holder, mesh=mesh["dp"])
            assert isinstance(holder.weight, DTensor)
            assert torch.equal(local_slice(full, holder.weight), holder.weight.to_local())

    run_ranks(body, tmp_path, 4)
