"""One thread per process: ranks are forked after `import torch`, and a thread pool does not survive a fork."""

import gc

import pytest
import torch
import torch.fx

torch.set_num_threads(1)
# Half of a test's time would go to these two, where graphs are traced: who called, and what of torch's may be collected.
torch.fx.config.do_not_emit_stack_traces = True  # type: ignore[attr-defined]
gc.freeze()
gc.set_threshold(50_000, 20, 100)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a GPU where there is none."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
