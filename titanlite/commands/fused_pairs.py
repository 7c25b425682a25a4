"""Which collectives of a run would be fused with their matmuls on GPUs of one NVLink host, and why others are not.

Nothing is decided here. The layers are those that the trainer builds, on the meta device and one rank of a group that
moves nothing. Each says itself whether its arithmetic can be fused, and runs forward and backward; the kernels are
asked about every operator that it calls. The same layers say which maxima of float8 they reduce.
"""

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

from titanlite.commands.validate import CheckedRun
from titanlite.float8.convert import Maximum, apply_float8
from titanlite.kernels.collectives import Group
from titanlite.models.find import build_model
from titanlite.parallel.sharding.layers import plan_layers
from titanlite.parallel.sharding.plan import Kind
from titanlite.parallel.tensor import ColumnParallelLinear, ParallelLinear, apply_tensor_parallel


class Pair(NamedTuple):
    """A collective and the matmul of its layer.

    Attributes:
        kind: "all_gather" or "reduce_scatter".
        direction: of the pass.
        module: the layer.
        obstacle: why the two are not fused, as the predicate of a sentence about the layer; or None.
    """

    kind: Kind
    direction: Literal["forward", "backward"]
    module: str
    obstacle: str | None


def fused_pairs(checked: CheckedRun, shards: int) -> list[Pair]:
    """Ask every tensor-parallel linear layer of a run about its collectives.

    Args:
        checked: the run; asks for async tensor parallelism.
        shards: ranks over which FSDP splits each weight.

    Returns:
        Two of each layer: of forward, and of backward. On a machine with a GPU that has no float8, that is a reason.

    Raises:
        ConfigError: the trainer would refuse to build the layers.
    """
    training = checked.config.training
    tokens, dtype = training.local_batch_size * training.seq_len, getattr(torch, training.mixed_precision_param)
    with _split(checked, shards) as (model, _):
        known: dict[object, list[str | None]] = {}
        pairs: list[Pair] = []
        for name, layer in model.named_modules():
            if not isinstance(layer, ParallelLinear):
                continue
            kind = (type(layer), layer.weight.shape, id(layer.matmul))
            if kind not in known:
                known[kind] = [layer.unfused] * 2 if layer.unfused else _asked(layer, tokens, dtype)
            forward, backward = known[kind]
            gathers = isinstance(layer, ColumnParallelLinear)
            pairs.append(Pair("all_gather" if gathers else "reduce_scatter", "forward", name, forward))
            pairs.append(Pair("reduce_scatter" if gathers else "all_gather", "backward", name, backward))
    return pairs


def reduced_maxima(checked: CheckedRun, shards: int) -> tuple[Maximum, ...]:
    """Ask every tensor-parallel linear layer of a run which maxima it reduces in a micro-step.

    Args:
        checked: the run.
        shards: ranks over which FSDP splits each weight.

    Returns:
        Those of forward and backward, without what is computed again.

    Raises:
        ConfigError: the trainer would refuse to build the layers.
    """
    with _split(checked, shards) as (_, maxima):
        return maxima


@contextmanager
def _split(checked: CheckedRun, shards: int) -> Iterator[tuple[nn.Module, tuple[Maximum, ...]]]:
    """The model of a run as a rank has it, on the meta device and in its arithmetic; and the maxima that it reduces."""
    config, degree = checked.config, checked.config.parallelism.tensor_parallel_degree
    tokens = config.training.local_batch_size * config.training.seq_len
    with ranks_that_move_nothing(degree) as group, torch.device("meta"):
        model = build_model(config.model, checked.dimensions, config.training.seq_len)
        for parameter in model.parameters():  # as a step computes with them
            parameter.data = parameter.data.to(getattr(torch, config.training.mixed_precision_param))
        mesh, plan = init_device_mesh("cpu", (degree,), mesh_dim_names=("tp",)), plan_layers(model, tokens, degree)
        apply_tensor_parallel(model, plan, mesh, group, config.parallelism.async_tensor_parallel)
        maxima: tuple[Maximum, ...] = ()
        if checked.float8 is not None:
            # Where there is a GPU, it is this one that would emulate.
            device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
            maxima = apply_float8(model, checked.float8, config.float8.filter_fqns, device, tokens, shards).maxima
        yield model, maxima


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


def _asked(layer: ParallelLinear, tokens: int, dtype: torch.dtype) -> list[str | None]:
    """What the kernels say of the collectives of one layer, forward and backward."""
    rows = tokens // layer.group.size if isinstance(layer, ColumnParallelLinear) else tokens
    weight = layer.weight.to_local()  # type: ignore[attr-defined]
    x = torch.empty(rows, weight.shape[1], dtype=dtype, device="meta", requires_grad=True)
    with _Asking(layer.group.size) as asking:
        layer(x).sum().backward()
    return asking.answers


class _Asking(TorchDispatchMode):
    """Asks the kernels about every collective matmul that runs inside it."""

    def __init__(self, ranks: int) -> None:
        super().__init__()
        self.ranks, self.answers = ranks, list[str | None]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "titanlite" and func._schema.name.endswith(("all_gather_matmul", "matmul_reduce_scatter")):
            self.answers.append(self._obstacle(func._schema.name, args))
        return func(*args, **(kwargs or {}))

    def _obstacle(self, op: str, args: Any) -> str | None:
        if importlib.util.find_spec("triton") is None:
            return "needs kernels that cannot be asked: there is no Triton on this machine"
        if op.endswith("all_gather_matmul"):
            from titanlite.kernels.device.all_gather_matmul import obstacle

            shard, others, dim, size, _, form = args[:6]
            found = obstacle(shard, others, dim, size, self.ranks, form, args[8])
        else:
            from titanlite.kernels.device.matmul_reduce_scatter import obstacle

            lefts, rights, dim = args[:3]
            found = obstacle(lefts, rights, dim, self.ranks)
        return f"has {found}" if found else None
