"""FSDP2, in every layout: also on a single rank, so that weights are bfloat16 in compute and float32 in the optimizer.

Gradients are summed, not averaged, over the data-parallel ranks: the step divides the loss by the global number of
targets before backward.
"""

from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from titanlite.config.schema import Config
from titanlite.float8.weight import local_data
from titanlite.kernels.chunk_cat import chunk_cat
from titanlite.models.experts import MixtureOfExperts
from titanlite.models.layers import Embedding
from titanlite.parallel.copy_engines import exchanges, param_group
from titanlite.parallel.mesh import Mesh
from titanlite.parallel.placed_units import Arena, Range
from titanlite.parallel.reduction import Reduction
from titanlite.parallel.tensor import SequenceParallelEmbedding, VocabParallelEmbedding


@dataclass(frozen=True)
class FSDPUnit:
    """Modules whose weights FSDP gathers together."""

    modules: tuple[nn.Module, ...]  # the model itself stands for all weights that no other unit has
    mesh: DeviceMesh  # over which the weights are split; the last axis shards, an axis before it replicates
    reshards: bool  # whether gathered weights are freed after forward
    is_read_backward: bool = True  # whether backward needs the gathered weights
    read_by: nn.Module | None = None  # a module that reads the weights without calling `modules`; gets FSDP's hooks
    turn: int | None = None  # number in the order of forward; None: compute may be in other units before this is freed


def frees_after_forward(config: Config, shards: int) -> tuple[bool, bool]:
    """Return whether gathered weights are freed after forward: those of blocks, and those of the head.

    The head includes an embedding that is tied to it. By default weights on a single shard are not freed.
    """
    reshard = config.parallelism.fsdp_reshard_after_forward
    return reshard == "always" or (reshard == "default" and shards > 1), reshard == "always"


def fsdp_units(model: nn.Module, config: Config, mesh: Mesh) -> list[FSDPUnit]:
    """Return the units in the order in which FSDP is applied: experts, blocks, embedding, head, and the model last.

    A tied embedding and head belong to the model's unit. Another embedding is gathered only for forward, unless it is
    of a user's class, or has hooks. Experts are separate units, over their own mesh, if tensor-parallel or
    expert-parallel ranks share them, and are freed with their block.
    """
    on = mesh.fsdp
    frees_blocks, frees_ends = frees_after_forward(config, on.size(-1))
    units = _expert_units(model, mesh, frees_blocks)
    blocks = list(model.layers)  # type: ignore[arg-type]
    units += [FSDPUnit((block,), on, frees_blocks, turn=n) for n, block in enumerate(blocks)]
    embedding, head = model.tok_embeddings, (model.norm, model.output)
    if model.output.weight is not embedding.weight:  # type: ignore[union-attr]
        reads = not _looks_up(embedding)  # type: ignore[arg-type]
        units.append(FSDPUnit((embedding,), on, frees_blocks, is_read_backward=reads, turn=-1))  # type: ignore[arg-type]
        units.append(FSDPUnit(head, on, frees_ends, turn=len(blocks)))  # type: ignore[arg-type]
    return [*units, FSDPUnit((model,), on, frees_ends)]


def _expert_units(model: nn.Module, mesh: Mesh, reshards: bool) -> list[FSDPUnit]:
    """Return a unit for the experts of each block, and one for experts outside of blocks, if experts have a mesh."""
    if mesh.experts is None:
        return []
    units, seen = [], set[nn.Module]()
    for n, reader in enumerate((*model.layers, model)):  # type: ignore[misc]
        layers = [m for m in reader.modules() if isinstance(m, MixtureOfExperts) and m not in seen]
        seen.update(layers)
        if layers:
            weights = tuple(part for layer in layers for part in (layer.w13, layer.w2))
            turn = None if reader is model else n
            units.append(FSDPUnit(weights, mesh.expert_shards, reshards, read_by=reader, turn=turn))
    return units


def apply_fsdp(
    model: nn.Module, config: Config, mesh: Mesh, follow: bool = False, by_copy_engines: bool = False
) -> None:
    """Shard each unit of `fsdp_units`, in place.

    Args:
        model: not sharded yet.
        config: `training.mixed_precision_*`, `parallelism.fsdp_reshard_after_forward`.
        mesh: of the run.
        follow: whether gradients are allocated in memory that activations free, see `MemoryModel.gradients_follow`.
            Needs a single micro-step, and reductions in the dtype of the master weights.
        by_copy_engines: whether copy engines gather and reduce all units but those of experts, see `no_copy_engines`.
    """
    policy = MixedPrecisionPolicy(
        param_dtype=getattr(torch, config.training.mixed_precision_param),
        reduce_dtype=getattr(torch, config.training.mixed_precision_reduce),
        cast_forward_inputs=False,  # the rotary table is float32; activations have the dtype of the embedding
    )
    units = fsdp_units(model, config, mesh)  # before FSDP registers hooks
    for unit in units:
        modules = list(unit.modules)
        together = modules if len(modules) > 1 else modules[0]
        fully_shard(together, mesh=unit.mesh, reshard_after_forward=unit.reshards, mp_policy=policy)
        if not unit.is_read_backward:
            unit.modules[0].set_unshard_in_backward(False)  # type: ignore[operator]
        if unit.read_by is not None:  # the reader's own hooks are registered later, and run around these
            state = unit.modules[0]._get_fsdp_state()  # type: ignore[operator]
            unit.read_by.register_forward_pre_hook(state._pre_forward, prepend=True, with_kwargs=True)
            unit.read_by.register_forward_hook(state._post_forward)
    _prefetch_experts(model, units)
    reduction = Reduction(follow and mesh.dp_size > 1)
    for are_experts in (False, True):
        chosen = [unit for unit in units if (unit.read_by is not None) == are_experts]
        on, pushes = mesh.expert_shards if are_experts and chosen else mesh.fsdp, by_copy_engines and not are_experts
        arena = Arena(on.get_group(on.ndim - 1), reduction, pushes, exchanges(mesh) if pushes else (None, None))
        _place(chosen, arena)


def _place(units: list[FSDPUnit], arena: Arena) -> None:
    """Give each unit memory in which it is gathered."""
    in_turn = Range(), Range()
    for unit in units:
        if (group := param_group(unit.modules[0])) is not None:  # type: ignore[arg-type]
            takes_turns = unit.reshards and arena.group.size() > 1
            arena.add(group, Range() if unit.turn is None or not takes_turns else in_turn[unit.turn % 2])


def _prefetch_experts(model: nn.Module, units: list[FSDPUnit]) -> None:
    """Gather a block's experts while backward is in the next block; by default FSDP gathers only one unit ahead."""
    experts = {unit.read_by: unit.modules[0] for unit in units if unit.read_by is not None}
    last = model.output if isinstance(model.output, FSDPModule) else model
    for block, behind in pairwise((*model.layers, last)):  # type: ignore[misc]
        if block in experts:
            behind.set_modules_to_backward_prefetch([block, experts[block]])  # type: ignore[operator, list-item]


def _looks_up(embedding: nn.Module) -> bool:
    """Return whether an embedding only looks up rows, so that backward does not need its table."""
    ours = type(embedding) in (Embedding, SequenceParallelEmbedding, VocabParallelEmbedding)
    return ours and "forward" not in vars(embedding) and not embedding._forward_hooks


def finalize(model: nn.Module, config: Config, mesh: Mesh) -> None:
    """Prepare a model's units for the first step. Call once after `apply_fsdp`, when the weights have memory.

    Each unit is gathered and freed once, which makes FSDP move shards that need padding, and allocates the memory of
    gathered weights. On a single data-parallel rank, a hook of each gathered weight moves its gradient to the master
    weight, and FSDP reduces nothing. Gradients then lie in memory of the compute stream, and are made one by one while
    activations are freed. Reductions by copy engines prepare their memory and kernels.
    """
    dtype, done = getattr(torch, config.training.mixed_precision_reduce), set()
    for unit in model.modules():
        if not isinstance(unit, FSDPModule):
            continue
        group = param_group(unit)
        if group is None or group in done:  # a unit without weights, or another module of a unit
            continue
        done.add(group)
        unit.unshard()
        if group.mesh_info.mesh.size() == 1:
            for param in group.fsdp_params:
                if (weight := param.unsharded_param).requires_grad:
                    hook = partial(_accumulate_into_master, dtype, param.sharded_param)
                    weight.register_post_accumulate_grad_hook(hook)
        group.prepare_reduction()
        unit.reshard()


def units_of(block: nn.Module) -> list[FSDPModule]:
    """Return one module of each FSDP unit in a block, or model: the block, and experts that are a separate unit."""
    found = {m._get_fsdp_state(): m for m in block.modules() if isinstance(m, FSDPModule)}
    return list(found.values())


def memory_of_gathered(model: nn.Module) -> list[Tensor]:
    """Return the memory in which a model's weights are gathered and that is never freed, except symmetric memory."""
    arenas = {group.arena for group in filter(None, map(param_group, units_of(model)))}
    return [arena.memory for arena in arenas if arena.memory is not None and arena.exchange is None]


def dtype_of_reduction(block: nn.Module) -> str:
    """Name the dtype to which a block's gradients are rounded before the master weights receive them.

    The block must be gathered. Returns "" if it is frozen.
    """
    dtypes = set[object]()
    for group in filter(None, map(param_group, units_of(block))):
        if not (weights := [w for param in group.fsdp_params if (w := param.unsharded_param).requires_grad]):
            continue
        hooks = [hook for w in weights for hook in (w._post_accumulate_grad_hooks or {}).values()]
        if hooks:
            dtypes |= {hook.args[0] for hook in hooks} if len(hooks) == len(weights) else {"not all"}
        else:
            dtypes.add(group.dtype_of_sums)
    return ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))


def _accumulate_into_master(dtype: torch.dtype, master: nn.Parameter, weight: nn.Parameter) -> None:
    """Add a gathered weight's gradient to that of its master weight, rounded to `dtype`, as a reduction would."""
    grad, weight.grad = weight.grad, None
    assert grad is not None  # noqa: S101
    if dtype.itemsize < grad.itemsize:
        grad = grad.to(dtype)
    if master.grad is not None:
        local_data(master.grad).add_(grad)
        return
    own = torch.empty(grad.shape, dtype=master.dtype, device=grad.device)  # autograd may share `grad`'s memory
    chunk_cat([grad], 1, own.view(1, -1))
    master.grad = DTensor(own, master._spec, requires_grad=False)  # type: ignore[attr-defined]
