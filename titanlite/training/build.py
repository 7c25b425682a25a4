"""Build a run, up to its optimizer: a flat list of calls, always in this order.

    the model of a rank under activation checkpointing (`assemble.py`) → freeze → compile → FSDP → materialise and
    initialise → optimizer

Each feature adds to the receipt. The weights are fresh; `training/train.py` then restores a checkpoint, if any.
"""

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from titanlite.activation_checkpoint.apply import SaveListUse
from titanlite.checkpoint.rng import seed_all
from titanlite.config.recipe_schema import FROZEN, ModelDims, SaveList
from titanlite.config.schema import Config
from titanlite.device import Device
from titanlite.errors import RecipeError
from titanlite.float8.convert import precompute_scales
from titanlite.forecast.memory import Memory, MemoryModel
from titanlite.kernels.cross_entropy import CrossEntropy
from titanlite.models.matrices import matrices_of
from titanlite.optimizers.sharded import ShardedOptimizer
from titanlite.optimizers.weight_average import WeightAverage
from titanlite.parallel.compile import apply_compile
from titanlite.parallel.copy_engines import copy_engines_entry
from titanlite.parallel.fsdp import apply_fsdp, finalize
from titanlite.parallel.initialise import fill_buffers, initialise
from titanlite.parallel.kept_state import state_of
from titanlite.preflight.checked_run import CheckedRun
from titanlite.training.assemble import Assembly, assemble
from titanlite.training.routers import Routers, routers_of


@dataclass(kw_only=True)
class Run(Assembly):
    """Everything that a step needs: an assembly with weights."""

    save_list: SaveList
    save_list_use: SaveListUse
    predicted: Memory | None  # peak of memory; None: it cannot be predicted
    parameters: list[nn.Parameter]
    loss: Callable[..., Tensor]
    optimizer: ShardedOptimizer
    kept_state: dict[str, object]  # buffers and numeric attributes of checkpointed blocks, before a step
    routers: Routers | None  # None without experts
    average: WeightAverage | None  # None without `optimizer.ema_decay`

    @property
    def config(self) -> Config:
        """Return the config of the run."""
        return self.asked.config

    @property
    def dims(self) -> ModelDims:
        """Return the dimensions of the model."""
        return self.asked.dims


def build(asked: CheckedRun, device: Device, blocks: Sequence[int] | None = None) -> Run:
    """Build a run with fresh weights. Arguments are as in `assemble`.

    On a named device weights have no values, and nothing is compiled.
    """
    config, dims = asked.config, asked.dims
    if config.training.deterministic and not device.is_named:  # the call loads the compiler, even with False
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it torch refuses every matmul on a GPU
        torch.use_deterministic_algorithms(True)
    made = assemble(asked, device, blocks)
    model, mesh, memory, receipt, save_list = made.model, made.mesh, made.memory, made.receipt, made.save_list
    assert save_list is not None and made.save_list_use is not None  # noqa: S101, PT018  # also on a named device
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(made.settings[name].rule != FROZEN)
    if config.compile.enable and not device.is_named:
        apply_compile(model)
    predicted = None if device.is_named else _peak(memory, save_list)
    apply_fsdp(model, config, mesh, memory.gradients_follow, memory.copy_engines)
    is_insisted, obstacle = config.parallelism.fsdp_copy_engines == "always", made.no_copy_engines
    if (is_insisted or device.is_gpu) and (memory.copy_engines or obstacle):
        receipt.add_later(partial(copy_engines_entry, model, is_insisted, obstacle))

    matrices, decay = matrices_of(model), config.optimizer.ema_decay
    with device.tensors():
        model.to_empty(device=mesh.device)
        if not device.is_named:
            fill_buffers(model)
            initialise(model, config.training.seed)
            # Seed the generators, e.g. for dropout: tensor-parallel ranks draw the same numbers.
            seed_all((config.training.seed * 1_000_003 + mesh.dp_rank) % 2**32)  # a CPU's generator takes 32 bits
        finalize(model, config, mesh)  # before the optimizer is made, as `finalize` may move shards
        named = dict(model.named_parameters())
        parameters = list(named.values())
        precompute_scales(parameters, mesh.fsdp)
        settings = {name: made.settings[name] for name in named}
        optimizer = ShardedOptimizer(named, config.optimizer, asked.optimizer, settings, mesh, matrices)
        average = WeightAverage(named, optimizer.locals, decay, mesh) if decay else None
    receipt.add(optimizer.entry())
    return Run(
        **vars(made),
        predicted=predicted,
        parameters=parameters,
        loss=CrossEntropy(mesh.tp_group, softcap=dims.logit_softcap, z_loss=config.training.z_loss),
        optimizer=optimizer,
        kept_state={} if device.is_named else state_of(model, made.save_list_use.checkpointed),
        routers=routers_of(model),
        average=average,
    )


def _peak(memory: MemoryModel, save_list: SaveList) -> Memory | None:
    """Predict peak memory; None if a save-list keeps operations without naming them, or the model cannot be traced."""
    with suppress(RecipeError):
        return memory.peak_under(save_list)
    return None
