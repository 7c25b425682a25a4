"""A model with its weights in the compute dtype, for generation: whole on one process, split by tensor parallelism on
several."""

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
    layout = Parallelism(tensor_parallel_degree=dist.get_world_size())
    config = replace(config, parallelism=layout, training=replace(config.training, seq_len=capacity))
    model = build_model(config.model, dims, capacity)
    mesh = build_mesh(layout, device, has_experts(model))
    plan = sharding_plan(config, dims).layers if mesh.tp_group is not None else {}
    split_model(model, config, None, mesh, plan, Receipt())
    model.to_empty(device=mesh.device)
    fill_buffers(model)
    load_weights_of(model, config, checkpoint, averaged)
    dtype, cast = getattr(torch, config.training.mixed_precision_param), dict[nn.Parameter, nn.Parameter]()
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter not in cast:  # a weight may be tied to another
                cast[parameter] = nn.Parameter(local_data(parameter).to(dtype), requires_grad=False)
            module.register_parameter(name, cast[parameter])
    return model.eval(), mesh
