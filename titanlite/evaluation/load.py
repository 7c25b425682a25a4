"""Load a model and its weights for evaluation, sharded by FSDP, without optimizer, float8 or compiler."""

from dataclasses import replace
from pathlib import Path

from torch import nn

from titanlite.checkpoint import publish, store
from titanlite.checkpoint.collective import on_all_ranks, rank, world_size
from titanlite.checkpoint.hugging_face import load_weights
from titanlite.checkpoint.resume import AVERAGE, MODEL
from titanlite.config.recipe_schema import ModelDims
from titanlite.config.schema import Config, Parallelism
from titanlite.device import Device
from titanlite.float8.weight import as_laid_out, local_data
from titanlite.models.experts import MixtureOfExperts
from titanlite.models.find import build_model
from titanlite.parallel.fsdp import apply_fsdp, finalize
from titanlite.parallel.initialise import fill_buffers
from titanlite.parallel.mesh import Mesh, build_mesh


def load_model(
    config: Config, dims: ModelDims, device: Device, checkpoint: Path | None = None, averaged: bool = False
) -> tuple[nn.Module, Mesh]:
    """Build the model of a config, sharded over all processes, and load its weights. Collective.

    Args:
        config: config of the run; `[parallelism]` is ignored.
        dims: the model's dimensions.
        device: device of this process; the process group must exist.
        checkpoint: checkpoint of a run; None: load the folder `checkpoint.initial_load_path`.
        averaged: load the moving average of the weights from the checkpoint.

    Raises:
        CheckpointError: on every rank, if the weights are damaged or of another model.
    """
    config = replace(config, parallelism=Parallelism())
    mesh = build_mesh(config.parallelism, device)
    model = build_model(config.model, dims, config.training.seq_len)
    apply_fsdp(model, config, mesh)
    model.to_empty(device=mesh.device)
    fill_buffers(model)
    finalize(model, config, mesh)
    load_weights_of(model, config, checkpoint, averaged)
    return model, mesh


def load_weights_of(model: nn.Module, config: Config, checkpoint: Path | None, averaged: bool) -> None:
    """Fill the parameters of a model, float32 in any layout, as `load_model` says; collective."""
    named = dict(model.named_parameters())
    if checkpoint is None:
        load_weights(config.checkpoint.initial_load_path, config.model.name, model, named)
        return
    on_all_ranks(lambda: publish.verify(checkpoint, share=rank(), shares=world_size()))
    kind, left_out = (AVERAGE, MODEL) if averaged else (MODEL, AVERAGE)
    weights = {f"{kind}{name}": as_laid_out(local_data(p), p) for name, p in named.items()}
    mixtures = {name: module for name, module in model.named_modules() if isinstance(module, MixtureOfExperts)}
    weights |= {f"{MODEL}{name}.bias": layer.bias for name, layer in mixtures.items() if layer.bias is not None}
    store.read(checkpoint, weights, optional=("optimizer/", "rng/", f"{AVERAGE}updates", left_out))
