"""Tell FSDP's group of parameters."""

from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup


def param_group(unit: FSDPModule) -> FSDPParamGroup | None:
    """Return the parameters of a unit, which FSDP gathers together; None if it has none.

    Args:
        unit: from `fully_shard`.
    """
    return unit._get_fsdp_state()._fsdp_param_group
