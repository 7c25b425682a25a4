"""torch.compile, block by block: one graph serves every block, and FSDP's hooks stay outside."""

import logging

from torch import nn


def apply_compile(model: nn.Module) -> None:
    """Compile each block in place.

    Args:
        model: has `layers`.
    """
    # Each rank would warn in four lines that save-lists must not meet in-place ops; our blocks have none.
    logging.getLogger("torch._higher_order_ops.wrap").addFilter(_is_news)
    for block in model.layers:  # type: ignore[union-attr]
        block.compile(fullgraph=True, dynamic=False)


def _is_news(record: logging.LogRecord) -> bool:
    return "context_fn is passed to torch.utils.checkpoint under torch.compile" not in record.getMessage()
