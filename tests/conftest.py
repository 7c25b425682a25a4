"""One thread per process: ranks are forked after `import torch`, and a thread pool does not survive a fork."""

import pytest
import torch

torch.set_num_threads(1)

LONGEST = ("training", "parallel", "sharding", "float8", "models", "kernels")
"""Folders whose files take longest: they start first, so that workers end together."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Order files by how long they take, and skip what needs a GPU where there is none."""
    order = {name: i for i, name in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(item.path.parent.name, len(order)))
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
