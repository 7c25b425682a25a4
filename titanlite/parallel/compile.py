"""torch.compile, block by block: one graph serves every block, and FSDP's hooks stay outside."""

from torch import nn


def apply_compile(model: nn.Module) -> None:
    """Compile each block in place.

    Args:
        model: has `layers`.
    """
    for block in model.layers:  # type: ignore[union-attr]
        block.compile(fullgraph=True, dynamic=False)
