"""FSDP by copy engines: gather blocks and exchange their gradients without kernels that occupy SMs."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter, ReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from titanlite.kernels.collectives import named_group, reduce_scatter
from titanlite.kernels.lowering import no_shared_memory
from titanlite.kernels.products import FSDP_GATHER
from titanlite.models.experts import MixtureOfExperts
from titanlite.parallel.mesh import Mesh
from titanlite.receipt import Entry, Skipped

if TYPE_CHECKING:
    from titanlite.kernels.device import shard_exchange


def param_group(unit: FSDPModule) -> FSDPParamGroup | None:
    """Return FSDP's group of a unit's parameters, which are gathered together; None if the unit has no parameters."""
    return unit._get_fsdp_state()._fsdp_param_group


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


class _NamedExchange:
    """The reduction for a device that is named but not present: torch's collective, which sends as many bytes."""

    def __init__(self, mesh: Mesh) -> None:
        self._group = named_group(shard_group(mesh))

    def prepare(self, size: int, dtype: torch.dtype) -> None:
        pass

    def __call__(self, x: Tensor, out: Tensor) -> None:
        reduce_scatter(x, self._group)


def exchanges(mesh: Mesh) -> tuple[Any, Any]:
    """Return two exchanges: the first all-gathers weights, the second reduce-scatters gradients."""
    if mesh.built_for.is_named:
        return None, _NamedExchange(mesh)
    from titanlite.kernels.device import shard_exchange

    return shard_exchange.AllGather(shard_group(mesh)), shard_exchange.ReduceScatter(shard_group(mesh))


class PushedReduceScatter(ReduceScatter):
    """FSDP's reduce-scatter, by copy engines, with sums in float32; `memory` allocates inputs and sums."""

    def __init__(self, exchange: "shard_exchange.ReduceScatter", memory: DefaultReduceScatter) -> None:
        self.exchange = exchange
        self._memory = memory
        self._is_sum = True

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate the input and the sum, in alternate calls."""
        self._is_sum = not self._is_sum
        return self._memory.allocate(size, dtype=torch.float32 if self._is_sum else dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Sum the ranks' inputs, and write this rank's shard of the sum to the output."""
        self.exchange(input_tensor, output_tensor)


def copy_engines_entry(model: nn.Module, is_asked: bool, why: str | None) -> Entry:
    """Return the receipt's entry: the number of blocks that copy engines gather and reduce.

    `is_asked`: the config demands copy engines. `why`: the result of `no_copy_engines`.
    """
    units = [m for m in model.layers if isinstance(m, FSDPModule)]  # type: ignore[union-attr]
    groups = [group for group in map(param_group, units) if group is not None]
    count = sum(isinstance(group._reduce_scatter_comm, PushedReduceScatter) for group in groups)
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
