"""The collective matmuls on all GPUs of this machine, and on eight ranks; and the program that tests them, on none."""

import pytest
import torch

from tests.kernels.collective_gpu import run


@pytest.mark.gpu
@pytest.mark.timeout(1600)
@pytest.mark.parametrize("world", sorted({8, max(2, min(torch.cuda.device_count(), 8))}))
def test_on_gpus(world):
    shared = world > torch.cuda.device_count()
    failed = [result for result in run(world, only=f"all-{world}" if shared else "") if result.problems]
    assert not failed, "\n".join(map(str, failed))


@pytest.mark.slow
def test_over_gloo():
    results = run(2, "cpu", only="out of step", timeout_s=60)
    names = ["operators out of step all-2", "network out of step all-2"]
    assert [(result.name, result.problems) for result in results] == [(name, []) for name in names]


def test_only_must_match():
    with pytest.raises(ValueError, match="no check of 2 ranks on cpu has 'out of stap' in its name"):
        run(2, "cpu", only="out of stap")
