"""torch.compile, block by block: one graph serves every block, and FSDP's hooks are outside of the graph."""

import logging

from torch import nn

from titanlite.receipt import Entry, Skipped


def apply_compile(model: nn.Module) -> None:
    """Compile each block of `model.layers` in place."""
    from torch._dynamo import config  # slow to import

    # torch recompiles a frame at most 8 times, then raises. Blocks of a user's file that compute with different numbers
    # need a graph each, in training and in validation.
    graphs = 8 + 2 * len(model.layers)  # type: ignore[arg-type]
    config.recompile_limit = max(config.recompile_limit, graphs)
    config.accumulated_recompile_limit = max(config.accumulated_recompile_limit, graphs)
    # Each rank would warn that save-lists are wrong for code with in-place operations; titanlite's blocks have none.
    logging.getLogger("torch._higher_order_ops.wrap").addFilter(_is_news)
    for block in model.layers:  # type: ignore[union-attr]
        block.compile(fullgraph=True, dynamic=False)


def compile_entry(model: nn.Module, requested: bool) -> Entry:
    """Return the receipt's entry, after a step: its count of graphs shows if the environment disables the compiler."""
    if not requested:
        return Entry("compile", False, "off", count=0)
    from torch._dynamo.utils import counters  # slow to import

    plain = [i for i, block in enumerate(model.layers) if block._compiled_call_impl is None]  # type: ignore[arg-type]
    missed = tuple(Skipped(f"layers.{i}", "is not compiled") for i in plain)
    applied = {"blocks": len(model.layers) - len(plain), "graphs": counters["stats"]["unique_graphs"]}  # type: ignore[arg-type]
    count = applied["blocks"] if applied["graphs"] else 0
    return Entry("compile", True, applied, count=count, missed=missed, key="compile.enable")


def _is_news(record: logging.LogRecord) -> bool:
    return "context_fn is passed to torch.utils.checkpoint under torch.compile" not in record.getMessage()
