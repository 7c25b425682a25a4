"""FSDP2, in every layout: also on a single rank, so that weights are bfloat16 in compute and float32 in the optimizer.

Gradients are summed, not averaged, over the data-parallel ranks: the step divides the loss by the global number of
targets before backward.
"""

import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter
from torch.distributed.tensor import DTensor

from titanlite.config.schema import Config
from titanlite.float8.weight import local_data
from titanlite.kernels.chunk_cat import chunk_cat
from titanlite.models.experts import MixtureOfExperts
from titanlite.models.layers import Embedding
from titanlite.parallel.copy_engines import PushedReduceScatter, exchanges, param_group
from titanlite.parallel.mesh import Mesh
from titanlite.parallel.placed_units import Arena, Range
from titanlite.parallel.tensor import SequenceParallelEmbedding, VocabParallelEmbedding

if TYPE_CHECKING:
    from titanlite.kernels.device import shard_exchange


@dataclass(frozen=True)
class FSDPUnit:
    """Modules whose weights FSDP gathers together."""

    modules: tuple[nn.Module, ...]  # the model itself stands for all weights that no other unit has
    mesh: DeviceMesh  # over which the weights are split; the last axis shards, an axis before it replicates
    reshards: bool  # whether gathered weights are freed after forward
    is_read_backward: bool = True  # whether backward needs the gathered weights
    read_by: nn.Module | None = None  # a module that reads the weights without calling `modules`; gets FSDP's hooks
    is_block: bool = False  # whether the unit is one of `model.layers`, whose gradients copy engines may exchange
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
    units += [FSDPUnit((block,), on, frees_blocks, is_block=True, turn=n) for n, block in enumerate(blocks)]
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
        by_copy_engines: whether copy engines gather and reduce blocks, see `no_copy_engines`.
    """
    policy = MixedPrecisionPolicy(
        param_dtype=getattr(torch, config.training.mixed_precision_param),
        reduce_dtype=getattr(torch, config.training.mixed_precision_reduce),
        cast_forward_inputs=False,  # the rotary table is float32; activations have the dtype of the embedding
    )
    # Copy engines send gradients as they are, and sum in float32.
    pushed = replace(policy, reduce_dtype=policy.param_dtype) if by_copy_engines else policy
    units = fsdp_units(model, config, mesh)  # before FSDP registers hooks
    for unit in units:
        how, modules = pushed if unit.is_block else policy, list(unit.modules)
        together = modules if len(modules) > 1 else modules[0]
        fully_shard(together, mesh=unit.mesh, reshard_after_forward=unit.reshards, mp_policy=how)
        if not unit.is_read_backward:
            unit.modules[0].set_unshard_in_backward(False)  # type: ignore[operator]
        if unit.read_by is not None:  # the reader's own hooks are registered later, and run around these
            state = unit.modules[0]._get_fsdp_state()  # type: ignore[operator]
            unit.read_by.register_forward_pre_hook(state._pre_forward, prepend=True, with_kwargs=True)
            unit.read_by.register_forward_hook(state._post_forward)
    _prefetch_experts(model, units)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # gloo cannot divide while it reduces, hence the plain sum.
            module.set_force_sum_reduction_for_comms(True)
            module.set_gradient_divide_factor(1.0)
            if (group := param_group(module)) is None:
                continue
            if follow and mesh.dp_size > 1:
                group._reduce_scatter_comm = _ReduceScatter()
    gather = None
    if by_copy_engines:
        gather, reduces = exchanges(mesh)
        memory = _ReduceScatter() if follow else DefaultReduceScatter()
        reduce = PushedReduceScatter(reduces, memory)
        for block in model.layers:  # type: ignore[union-attr]
            block.set_custom_reduce_scatter(reduce)
    _place(units, gather)


def _place(units: list[FSDPUnit], exchange: "shard_exchange.AllGather | None") -> None:
    """Give units memory in which they are gathered; experts with a mesh of their own in memory of their own."""
    for is_expert in (False, True):
        chosen = [unit for unit in units if (unit.read_by is not None) == is_expert]
        if not chosen:
            continue
        mesh = chosen[0].mesh
        arena = Arena(mesh.get_group(mesh.ndim - 1), None if is_expert else exchange)
        in_turn = Range(), Range()
        for unit in chosen:
            if (group := param_group(unit.modules[0])) is not None:  # type: ignore[arg-type]
                takes_turns = unit.reshards and mesh.size(-1) > 1
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


class _ReduceScatter(DefaultReduceScatter):
    """FSDP's reduce-scatter, whose sum, the gradient, is in memory of the compute stream, where activations were freed.

    This is safe without `record_stream`: the reducing streams have waited for the compute stream when the sum is
    allocated, and the compute stream waits for them before the optimizer's step, after which the sum is freed. It would
    not be safe for a sum that is cast, or added to a gradient: that is freed before it is read.
    """

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate the input or, when called on FSDP's stream, the sum."""
        is_cuda, settings = device.type == "cuda", cast(Any, torch.utils.deterministic)
        # Deterministic mode would fill the memory on this stream, while FSDP's stream writes the sum.
        fills, settings.fill_uninitialized_memory = settings.fill_uninitialized_memory, False
        with torch.cuda.stream(torch.cuda.default_stream(device)) if is_cuda else nullcontext():
            memory = torch.empty(*size, dtype=dtype, device=device)
        settings.fill_uninitialized_memory = fills
        return memory


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
        unit.reshard()
        if isinstance(reduce := group._reduce_scatter_comm, PushedReduceScatter):
            trained = [param for param in group.fsdp_params if param.sharded_param.requires_grad]
            elements = sum(param.padded_sharded_param_size.numel() for param in trained)
            in_dtype = getattr(torch, config.training.mixed_precision_param)
            if trained:
                reduce.exchange.prepare(elements * mesh.fsdp.size(-1), in_dtype)


def units_of(block: nn.Module) -> list[FSDPModule]:
    """Return one module of each FSDP unit in a block: the block, and experts that are a separate unit."""
    found = {m._get_fsdp_state(): m for m in block.modules() if isinstance(m, FSDPModule)}
    return list(found.values())


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
        elif isinstance(group._reduce_scatter_comm, PushedReduceScatter):
            dtypes.add(torch.float32)
        else:  # FSDP keeps None where the reduction has the dtype of the gradients
            dtypes.add(group._reduce_dtype or group.fsdp_params[0].param_dtype or group._orig_dtype)
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


def _fsdp_chunk_cat(tensors: list[Tensor], dim: int, num_chunks: int, out: Tensor) -> None:
    """Replace torch's `fsdp::chunk_cat`, for every use of FSDP in this process."""
    if dim == 0 and len(out) == num_chunks and out.is_contiguous() and out.is_floating_point():
        chunk_cat(tensors, num_chunks, out)
    else:  # never for our models
        torch._chunk_cat(tensors, dim, num_chunks, out=out)


_FSDP_OPERATORS = torch.library.Library("fsdp", "IMPL")  # the replacement lives as long as this object
with warnings.catch_warnings():  # torch's C++ warns once in a process
    warnings.filterwarnings("ignore", message=r"(?s).*Overriding a previously registered kernel", category=UserWarning)
    _FSDP_OPERATORS.impl("chunk_cat", _fsdp_chunk_cat, "CUDA", allow_override=True)
