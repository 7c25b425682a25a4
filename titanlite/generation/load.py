"""A model with its weights in the compute dtype, for generation: whole on one process, split by tensor parallelism on
several."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from titanlite.config.recipe_schema import ModelDims
from titanlite.config.schema import Config, Parallelism
from titanlite.device import Device
from titanlite.evaluation.load import load_weights_of
from titanlite.float8.weight import local_data
from titanlite.models.experts import has_experts
from titanlite.models.find import build_model
from titanlite.parallel.initialise import fill_buffers
from titanlite.parallel.mesh import Mesh, build_mesh
from titanlite.receipt import Receipt
from titanlite.sharding.split import sharding_plan, split_model


def load_split_model(
    config: Config, dims: ModelDims, device: Device, capacity: int, checkpoint: Path | None, averaged: bool
) -> tuple[nn.Module, Mesh]:
    """Build the model of a config and load its weights; collective.

    Args:
        config: the run; its layout is not used.
        dims: the model's dimensions.
        device: of this process; the process group exists.
        capacity: positions that the model is built for.
        checkpoint: of a run; None: the folder `checkpoint.initial_load_path`.
        averaged: load the checkpoint's average of weights.

    Raises:
        TitanliteError: on every rank, if the weights are damaged or of another model, or the model cannot be split over
            the processes.
    """
    world = dist.get_world_size()
    capacity = -(-capacity // world) * world  # a plan divides the tokens of a sequence by the ranks
    layout = Parallelism(tensor_parallel_degree=world)
    config = replace(config, parallelism=layout, training=replace(config.training, seq_len=capacity))
    model = build_model(config.model, dims, capacity)
    mesh = build_mesh(layout, device, has_experts(model))
    plan = sharding_plan(config, dims).layers if mesh.tp_group is not None else {}
    split_model(model, config, None, mesh, plan, Receipt())
    names_of = dict[nn.Parameter, list[str]]()  # a tied weight has several names
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names_of.setdefault(parameter, []).append(name)
    names = list(names_of.values())
    del names_of
    model.to_empty(device=mesh.device)  # which makes a weight for each name
    for first, *others in names:
        _set(model, others, model.get_parameter(first))
    fill_buffers(model)
    load_weights_of(model, config, checkpoint, averaged)
    dtype = getattr(torch, config.training.mixed_precision_param)
    for each in names:  # one after the other, so that no more than one weight is there twice
        _set(model, each, nn.Parameter(local_data(model.get_parameter(each[0])).to(dtype), requires_grad=False))
    return model.eval(), mesh


def _set(model: nn.Module, names: Sequence[str], parameter: nn.Parameter) -> None:
    """Put a parameter in the places of these names."""
    for name in names:
        module, _, attribute = name.rpartition(".")
        model.get_submodule(module).register_parameter(attribute, parameter)
