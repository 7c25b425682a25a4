"""The model of a run as one of its tensor-parallel ranks has it, without the others: on the meta device.

It is assembled by the functions that the trainer calls, in its order, so that what they refuse is refused here, in
the same words.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from titanlite.activation_checkpoint.apply import apply_activation_checkpoint
from titanlite.float8.convert import Maximum, apply_float8
from titanlite.kernels.collectives import Group
from titanlite.models.find import build_model
from titanlite.parallel.tensor import LayerPlan, ParallelLinear, apply_tensor_parallel
from titanlite.preflight.checked_run import CheckedRun


@contextmanager
def as_a_rank_has_it(
    checked: CheckedRun, layers: Mapping[str, LayerPlan], shards: int
) -> Iterator[tuple[nn.Module, tuple[Maximum, ...]]]:
    """Assemble a model but for FSDP and the compiler; its parameters have the dtype that a step computes in.

    Args:
        checked: the run.
        layers: of its model, from `plan_layers`.
        shards: ranks over which FSDP splits each weight.

    Returns:
        The model, and the maxima of float8 that it reduces over the tensor-parallel ranks in a micro-step, without what
        is computed again.

    Raises:
        TitanliteError: the trainer would refuse to assemble it.
    """
    config, degree = checked.config, checked.config.parallelism.tensor_parallel_degree
    tokens = config.training.local_batch_size * config.training.seq_len
    with ranks_that_move_nothing(degree) as group, torch.device("meta"):
        model = build_model(config.model, checked.dims, config.training.seq_len)
        for parameter in model.parameters():
            parameter.data = parameter.data.to(getattr(torch, config.training.mixed_precision_param))
        mesh = init_device_mesh("cpu", (degree,), mesh_dim_names=("tp",))
        apply_tensor_parallel(model, layers, mesh, group, config.parallelism.async_tensor_parallel)
        maxima: tuple[Maximum, ...] = ()
        if checked.float8 is not None:
            # Where there is a GPU, it is this one that would emulate.
            device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
            maxima = apply_float8(model, checked.float8, config.float8.filter_fqns, device, tokens, shards).maxima
        if checked.save_list is not None:
            apply_activation_checkpoint(model, checked.save_list)
        yield model, maxima


def gathered_in_float8(model: nn.Module) -> set[str]:
    """Name the layers whose tokens are gathered inside a product in float8.

    Args:
        model: as `as_a_rank_has_it` makes it.
    """
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, ParallelLinear)}
    return {name for name, layer in layers.items() if layer.fused is not None and layer.matmul is not F.linear}


@contextmanager
def ranks_that_move_nothing(size: int) -> Iterator[Group]:
    """A process group of torch's own, of which this process is rank 0 and the only one.

    Args:
        size: ranks. Collectives return at once, with the shapes that they should have.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    try:
        yield Group(dist.group.WORLD.group_name, size, 0)  # type: ignore[union-attr]
    finally:
        dist.destroy_process_group()
