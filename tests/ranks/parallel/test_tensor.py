"""Tensor parallelism: who holds what, and exactly the collectives that it says."""

import dataclasses

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tests.support.count_collectives import CountCollectives
from tests.support.ranks import run_ranks, world_group
from tests.support.short_run import assemble, checked, take_steps
from titanlite.config.recipe_schema import ModelDims
from titanlite.kernels.collectives import Group
from titanlite.models.llama3 import Llama3
from titanlite.parallel.replicated_gradients import is_replicated, reduce_replicated_gradients
from titanlite.parallel.tensor import apply_tensor_parallel
from titanlite.sharding.layers import plan_layers

SIZES = ModelDims("", 1, dim=64, n_heads=4, n_kv_heads=2, ffn_dim=256, vocab_size=32, rope_theta=1e4, norm_eps=1e-5)


def split(tied: bool = False) -> Llama3:
    with torch.device("meta"):
        model = Llama3(dataclasses.replace(SIZES, tied_embeddings=tied), 8)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    group = Group(mesh.get_group().group_name, 2, mesh.get_local_rank())
    apply_tensor_parallel(model, plan_layers(model, 16, 2).layers, mesh, group)
    return model


def test_gradients_of_replicated_parameters_are_summed(tmp_path):
    def body() -> None:
        model = split()
        model.to_empty(device="cpu")
        rank = dist.get_rank()
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, rank + 1.0)
        with CountCollectives() as seen:
            reduce_replicated_gradients(list(model.parameters()), world_group())
            reduce_replicated_gradients(
                [p for p in model.parameters() if not is_replicated(p)], world_group()
            )  # of none
        assert seen.counts == {"allreduce_": 1}
        for name, parameter in model.named_parameters():
            expected = 3.0 if name.endswith("norm.weight") else rank + 1.0
            assert (parameter.grad.to_local() == expected).all(), name

    run_ranks(body, tmp_path)


def test_collectives_of_a_step(tmp_path):
    asked = checked(tmp_path, 2, ["--parallelism.tensor_parallel_degree", "2", "--training.local_batch_size", "4"])

    def body() -> None:
        run = assemble(asked)
        with CountCollectives() as seen:
            take_steps(run, 1)
        L = run.dims.n_layers
        functional = {name: n for name, n in seen.counts.items() if "into_tensor" in name or "scatter_tensor" in name}
        assert functional == {
            "all_gather_into_tensor": 4 * L + 3,  # wqkv, w13, and in backward wo, w2; embedding, output, loss
            "reduce_scatter_tensor": 4 * L + 2,  # wo, w2, and in backward wqkv, w13; embedding, output
        }
        assert seen.counts["allreduce_"] == 4  # targets, gradients of norms, their norm, loss

    run_ranks(body, tmp_path)
