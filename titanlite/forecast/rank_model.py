"""The model of a run as one of its ranks has it, on the meta device and without the other ranks.

It is made by what makes the trainer's: `build_model`, the sharding plan and the tensor-parallel layers, the experts
that ranks share out, and the float8 recipe. So what they refuse is refused here, in the same words.
"""

import functools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import Placement, Shard

from titanlite.config.check_mesh import tokens_of_rank
from titanlite.config.recipe_schema import Float8Recipe, ModelDims
from titanlite.config.schema import Config, Model
from titanlite.device import CPU
from titanlite.float8.convert import Conversion, apply_float8
from titanlite.kernels.collectives import Group
from titanlite.kernels.experts import ParallelExperts
from titanlite.models.find import build_model
from titanlite.parallel.context import balance_over_sharers
from titanlite.parallel.expert import experts_to_share
from titanlite.parallel.tensor import LayerPlan, split_layers
from titanlite.sharding.layers import plan_layers
from titanlite.sharding.representative_blocks import PlannedLayers

_plans: dict[object, Mapping[str, LayerPlan]] = {}
_groups: dict[int, dist.ProcessGroup] = {}  # torch knows a group by its name as long as somebody holds it


def sharding_plan(config: Config, dims: ModelDims) -> PlannedLayers:
    """Derive the tensor-parallel plan of a run's model, of one micro-step; once in a process.

    Args:
        config: checked.
        dims: the model's dimensions.

    Raises:
        ShardingError: there is none.
    """
    training, t = config.training, config.parallelism.tensor_parallel_degree
    tokens = training.local_batch_size * training.seq_len  # whole samples: what layers do is the same for parts of them
    return _derived_plan(config.model, dims, training.seq_len, tokens, t, training.mixed_precision_param)


@functools.lru_cache(maxsize=4)
def _derived_plan(model: Model, dims: ModelDims, seq_len: int, tokens: int, ranks: int, dtype: str) -> PlannedLayers:
    planned = plan_layers(build_model(model, dims, seq_len), tokens, ranks, getattr(torch, dtype), dims.widths)
    _plans[model, dims] = planned.layers
    return planned


class RankModel(NamedTuple):
    """The model of a run as one tensor-parallel rank has it, and what float8 has converted of it."""

    model: nn.Module
    float8: Conversion | None


def rank_model(
    config: Config, dims: ModelDims, float8: Float8Recipe | None, model: nn.Module | None = None, shards: int = 1
) -> RankModel:
    """Make the model of a run as one tensor-parallel rank has it, without the other ranks.

    Args:
        config: checked.
        dims: the model's dimensions.
        float8: arithmetic of the linear layers, or None.
        model: on the meta device, to be changed in place; None: one is built.
        shards: ranks over which FSDP splits each weight.

    Returns:
        It; its parameters have the dtype that a step computes in.

    Raises:
        TitanliteError: it cannot be built, split or converted.
    """
    training, mesh = config.training, config.parallelism
    t, tokens = mesh.tensor_parallel_degree, tokens_of_rank(config)
    made: nn.Module = model or build_model(config.model, dims, training.seq_len)
    for parameter in made.parameters():
        parameter.data = parameter.data.to(getattr(torch, training.mixed_precision_param))
    if t > 1:
        if (config.model, dims) not in _plans:  # that of other degrees says the same of each layer
            sharding_plan(config, dims)
        split_layers(made, _plans[config.model, dims], _group(t), mesh.async_tensor_parallel, _part(t))
    if mesh.expert_parallel_degree > 1:
        _share_experts(made, mesh.expert_parallel_degree)
    elif t > 1 and dims.experts is not None:
        experts_to_share(made, 1)
    if mesh.context_parallel_degree > 1:
        balance_over_sharers(made, _group(mesh.context_parallel_degree * t))
    if float8 is None:
        return RankModel(made, None)
    recipe = replace(float8, min_compute_capability=0)  # as on a device that has what the recipe needs
    of_experts = max(1, shards * t // mesh.expert_parallel_degree)
    converted = apply_float8(made, recipe, config.float8.filter_fqns, CPU, tokens, shards, of_experts)
    return RankModel(made, converted)


def _share_experts(model: nn.Module, ranks: int) -> None:
    """Leave the first rank's experts of each layer."""
    for layer in experts_to_share(model, ranks).values():
        layer.compute = ParallelExperts(_group(ranks))
        for projection in (layer.w13, layer.w2):
            own = projection.weight[: len(projection.weight) // ranks]
            projection.weight = nn.Parameter(torch.empty_like(own))


def _part(ranks: int) -> Any:
    def part(x: Tensor, placement: Placement) -> Tensor:
        shape = list(x.shape)
        if isinstance(placement, Shard):
            shape[placement.dim] //= ranks
        return torch.empty(shape, dtype=x.dtype, device="meta")

    return part


def _group(size: int) -> Group:
    """A group of ranks that exists by its name alone: on the meta device nothing is sent."""
    name = f"titanlite.forecast.{size}"
    try:
        dist.distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type]
    except RuntimeError:  # torch forgets all groups when one is destroyed
        _groups[size] = dist.ProcessGroup(0, size)  # type: ignore[call-arg]
        torch._C._distributed_c10d._register_process_group(name, _groups[size])  # type: ignore[attr-defined]
    return Group(name, size, 0)
