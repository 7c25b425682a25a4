"""torch.compile, block by block: one graph serves every block, and FSDP's hooks stay outside."""

import logging

from torch import nn


def apply_compile(model: nn.Module) -> None:
    """Compile each block in place.

    Args:
        model: has `layers`.
    """
    from torch._dynamo import config  # slow to import

    # A block of a model file of one's own that computes with a number of its own has graphs of its own, in training and
    # in validation. torch would make eight of all blocks and end the run at the ninth.
    graphs = 8 + 2 * len(model.layers)  # type: ignore[arg-type]
    config.recompile_limit = max(config.recompile_limit, graphs)
    config.accumulated_recompile_limit = max(config.accumulated_recompile_limit, graphs)
    # Each rank would warn in four lines that save-lists must not meet in-place ops; our blocks have none.
    logging.getLogger("torch._higher_order_ops.wrap").addFilter(_is_news)
    for block in model.layers:  # type: ignore[union-attr]
        block.compile(fullgraph=True, dynamic=False)


def _is_news(record: logging.LogRecord) -> bool:
    return "context_fn is passed to torch.utils.checkpoint under torch.compile" not in record.getMessage()
