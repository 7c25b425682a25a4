"""Products whose result is symmetric: the definition; the device code, compiled and by Triton's interpreter."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support.compile_only import check_resources, compiling
from tests.support.needs import DEVICES
from titanlite.kernels.device.symmetric_product import launch_symmetric_product
from titanlite.kernels.symmetric_product import symmetric_product


def test_definition():
    x = torch.randn(2, 5, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    d = x @ x.mT
    torch.testing.assert_close(symmetric_product(x), d)
    torch.testing.assert_close(symmetric_product(x, alpha=2.0), 2 * d)
    torch.testing.assert_close(symmetric_product(x, d, 2.0, -3.0), -d)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", [(2, 300, 72), (1, 128, 4096), (3, 40, 200), (1, 1024, 1000), (1, 5, 7)])
def test_bfloat16(shape: tuple[int, int, int], device: str) -> None:
    """Rounded once, to half a unit; sums of products to float32, each relative to the sum of their sizes."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=generator).bfloat16()
    d = torch.randn(shape[0], shape[1], shape[1], generator=generator)
    d = (d + d.mT).bfloat16()
    for added in (None, d):
        wide = None if added is None else added.double()
        truth = symmetric_product(x.double(), wide, 1.5, -2.5)
        sizes = symmetric_product(x.double().abs(), None if wide is None else wide.abs(), 1.5, 2.5)
        for _ in range(2):  # a kernel is compiled, made known, and launched by that
            there = None if added is None else added.to(device)
            ours = symmetric_product(x.to(device), there, 1.5, -2.5).cpu()
            roundings = 1 if device == "cuda" else 2  # the definition rounds the product by itself
            assert ((ours.double() - truth).abs() <= sizes * (roundings * 2**-8 + (shape[2] + 4) * 2**-24)).all()


@pytest.mark.slow
def test_values_of_device_code():
    """Triton's interpreter has to be asked for before Triton is imported."""
    run = [sys.executable, "-W", "ignore", "-m", "tests.support.interpreted_products"]
    done = subprocess.run(run, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("adds", [False, True])
def test_code_for_sm_90_multiplies_by_warp_groups(adds: bool, tmp_path: Path) -> None:
    x = torch.zeros(1, 1024, 4096, dtype=torch.bfloat16)
    with compiling() as compiled:
        launch_symmetric_product(x, torch.zeros(1, 1024, 1024, dtype=torch.bfloat16) if adds else None, 1.0, 0.5)
    check_resources(compiled, tmp_path)
    ptx = compiled["_symmetric_product"].asm["ptx"]
    assert "wgmma.mma_async" in ptx
    assert "cp.async.bulk.tensor" in ptx
