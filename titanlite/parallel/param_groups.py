"""Tell FSDP's groups of parameters."""

from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup


def param_groups(unit: FSDPModule) -> list[FSDPParamGroup]:
    """Return the parameters of a unit by the ranks that split them: those of experts may have ranks of their own.

    Args:
        unit: from `fully_shard`; one without weights has none.
    """
    state = unit._get_fsdp_state()
    if not hasattr(state, "_fsdp_param_groups"):  # before torch 2.13: all have the same ranks
        return [] if state._fsdp_param_group is None else [state._fsdp_param_group]
    return state._fsdp_param_groups
