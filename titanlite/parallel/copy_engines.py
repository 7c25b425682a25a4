"""FSDP by copy engines: gather weights and exchange gradients without kernels that occupy SMs."""

from typing import TYPE_CHECKING, cast

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from titanlite.kernels.lowering import no_shared_memory
from titanlite.kernels.products import FSDP_GATHER
from titanlite.models.experts import MixtureOfExperts
from titanlite.parallel.mesh import Mesh
from titanlite.parallel.placed_units import PlacedGroup
from titanlite.receipt import Entry, Skipped

if TYPE_CHECKING:
    from titanlite.kernels.device import shard_exchange


def param_group(unit: FSDPModule) -> PlacedGroup | None:
    """Return the group of a unit's parameters, which are gathered together; None if the unit has no parameters."""
    return cast("PlacedGroup | None", unit._get_fsdp_state()._fsdp_param_group)


def no_copy_engines(mesh: Mesh) -> str | None:
    """Return the reason why copy engines cannot gather and reduce parameters over a mesh, or None.

    Collective: the ranks try to share memory, which a host's system may refuse. All ranks return the same reason.
    """
    if not mesh.built_for.is_gpu:
        return "there are none without GPUs"
    why = no_shared_memory(shard_group(mesh), FSDP_GATHER, n_slots=1, device=mesh.built_for)
    gathered: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, why)
    return next(filter(None, gathered), None)


def shard_group(mesh: Mesh) -> str:
    """Return the name of the group of ranks over which each parameter is sharded."""
    return mesh.fsdp.get_group(mesh.fsdp.ndim - 1).group_name


def exchanges(
    mesh: Mesh,
) -> "tuple[shard_exchange.AllGather, shard_exchange.ReduceScatter] | tuple[None, None]":
    """Return the exchanges by which copy engines gather weights and reduce gradients; None on a named device."""
    if mesh.built_for.is_named:
        return None, None
    from titanlite.kernels.device import shard_exchange

    return shard_exchange.AllGather(shard_group(mesh)), shard_exchange.ReduceScatter(shard_group(mesh))


def copy_engines_entry(model: nn.Module, is_asked: bool, why: str | None) -> Entry:
    """Return the receipt's entry: the number of blocks that copy engines gather and reduce.

    `is_asked`: the config demands copy engines. `why`: the result of `no_copy_engines`.
    """
    units = [m for m in model.layers if isinstance(m, FSDPModule)]  # type: ignore[union-attr]
    groups = [group for group in map(param_group, units) if group is not None]
    count = sum(group.arena.by_copy_engines for group in groups)
    reason = "" if count == len(groups) else why or "not applied"
    applied: dict[str, object] = {"blocks": count, "by NCCL, because": reason} if reason else {"blocks": count}
    if (n := sum(_has_sharded_experts(block) for block in model.layers)) and count:  # type: ignore[union-attr]
        applied["by NCCL"] = f"experts of {n} blocks, over ranks of their own"
    missed = (Skipped("blocks", reason),) if reason else ()
    key, asked = "parallelism.fsdp_copy_engines", "always" if is_asked else None
    return Entry("fsdp_copy_engines", asked, applied, count=count, missed=missed, key=key)


def _has_sharded_experts(block: nn.Module) -> bool:
    """Return whether the block has experts that are a separate FSDP unit, sharded over several ranks."""
    weights = [m.w13 for m in block.modules() if isinstance(m, MixtureOfExperts)]
    groups = [param_group(weight) for weight in weights if isinstance(weight, FSDPModule)]
    return any(group is not None and group.mesh_info.mesh.size(-1) > 1 for group in groups)
