"""The operations that surround the matmuls of a transformer, one stem each.

A file holds the definition in plain torch, which runs on every device and which `torch.compile` fuses. Blocks call
these functions, so that an operation can get device code of its own without a change of any model.

`drop_in` has the collective matmuls under torch's names; they can be imported from here, and are loaded when asked for.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from titanlite.async_tp.drop_in import (
        fused_all_gather_matmul,
        fused_all_gather_scaled_matmul,
        fused_matmul_reduce_scatter,
        fused_scaled_matmul_reduce_scatter,
    )

__all__ = (
    "fused_all_gather_matmul",
    "fused_all_gather_scaled_matmul",
    "fused_matmul_reduce_scatter",
    "fused_scaled_matmul_reduce_scatter",
)


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from titanlite.async_tp import drop_in

    return getattr(drop_in, name)
