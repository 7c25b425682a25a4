"""One thread per process: ranks are forked after `import torch`, and a thread pool does not survive a fork."""

import gc

import pytest
import torch
import torch.fx.config

torch.set_num_threads(1)
# Where graphs are traced, a third of the time would go to who called, and to what of torch's may be collected.
torch.fx.config.do_not_emit_stack_traces = True
gc.set_threshold(50_000, 20, 100)


def pytest_collection_finish() -> None:
    """What has been imported by now stays, and is looked through no more."""
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a GPU where there is none."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
