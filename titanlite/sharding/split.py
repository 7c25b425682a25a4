"""Reduce a model to one rank's part: tensor parallelism → context parallelism → experts → float8.

The ranks may be fake, for a run that is only planned.
"""

import functools
from collections.abc import Mapping
from functools import partial

import torch
from torch import nn

from titanlite.config.check_mesh import tokens_of_rank
from titanlite.config.recipe_schema import Float8Recipe, ModelDims
from titanlite.config.schema import Config, Model
from titanlite.float8.convert import Conversion, apply_float8
from titanlite.float8.receipt import float8_entry
from titanlite.models.find import build_model
from titanlite.parallel.context import balance_over_sharers, context_entry
from titanlite.parallel.expert import apply_expert_parallel
from titanlite.parallel.mesh import Mesh
from titanlite.parallel.parity import require_parity
from titanlite.parallel.tensor import LayerPlan, apply_tensor_parallel, fused_layers_entry
from titanlite.receipt import Receipt
from titanlite.sharding.layers import plan_layers
from titanlite.sharding.representative_blocks import PlannedLayers

_plans: dict[object, Mapping[str, LayerPlan]] = {}


def sharding_plan(config: Config, dims: ModelDims) -> PlannedLayers:
    """Derive the tensor-parallel plan of a run's model, cached per process; raise ShardingError if there is none."""
    training, t = config.training, config.parallelism.tensor_parallel_degree
    tokens = training.local_batch_size * training.seq_len  # whole samples; the plan is the same for parts of them
    return _derived_plan(config.model, dims, training.seq_len, tokens, t, training.mixed_precision_param)


def plan_of_any_degree(config: Config, dims: ModelDims) -> Mapping[str, LayerPlan]:
    """Return each layer's plan, the same for all possible tensor-parallel degrees; raise ShardingError without one."""
    if (config.model, dims) not in _plans:
        sharding_plan(config, dims)
    return _plans[config.model, dims]


@functools.lru_cache(maxsize=4)
def _derived_plan(model: Model, dims: ModelDims, seq_len: int, tokens: int, ranks: int, dtype: str) -> PlannedLayers:
    planned = plan_layers(build_model(model, dims, seq_len), tokens, ranks, getattr(torch, dtype), dims.widths)
    _plans[model, dims] = planned.layers
    return planned


def split_model(
    model: nn.Module,
    config: Config,
    float8: Float8Recipe | None,
    mesh: Mesh,
    plan: Mapping[str, LayerPlan],
    receipt: Receipt,
) -> Conversion | None:
    """Reduce each layer of a whole model on the meta device to this rank's part, in place, and convert it to float8.

    `config` is of the largest stage. `plan` is for tensor parallelism, by name of layer. `receipt` gets entries.

    Returns:
        The outcome of the conversion to float8, layer by layer; None without a recipe.

    Raises:
        TitanliteError: the model cannot be split or converted.
    """
    device, tokens = mesh.built_for, tokens_of_rank(config)
    if mesh.tp_group is not None:
        if config.model.file and not device.is_named:
            receipt.add(require_parity(model, plan, mesh, config))
        is_asynchronous = config.parallelism.async_tensor_parallel
        split = apply_tensor_parallel(model, plan, mesh.tp, mesh.tp_group, is_asynchronous)
        receipt.add_later(lambda: split)
        if is_asynchronous:
            receipt.add_later(partial(fused_layers_entry, model, device))
    if mesh.context is not None:
        balance_over_sharers(model, mesh.micro_batch_group)
        receipt.add_later(partial(context_entry, model, config))
    if mesh.experts is not None:
        receipt.add(apply_expert_parallel(model, mesh, tokens // mesh.tp_size))
    if float8 is None:
        return None
    of_experts = None if mesh.experts is None else mesh.expert_shards.size(-1)
    filters, shards = config.float8.filter_fqns, mesh.fsdp.size(-1)
    done = apply_float8(model, float8, filters, device, tokens, shards, of_experts)
    receipt.add(float8_entry(model, done, float8, config, device))
    return done
