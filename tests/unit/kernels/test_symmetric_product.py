"""Products whose result is symmetric: the definition; the device code, compiled."""

from pathlib import Path

import pytest
import torch

from tests.support.compile_only import check_resources, compiling
from tests.support.needs import DEVICES, slow
from titanlite.kernels.device.symmetric_product import launch_symmetric_product
from titanlite.kernels.symmetric_product import symmetric_product


def test_definition():
    x = torch.randn(2, 5, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    d = x @ x.mT
    torch.testing.assert_close(symmetric_product(x), d)
    torch.testing.assert_close(symmetric_product(x, alpha=2.0), 2 * d)
    torch.testing.assert_close(symmetric_product(x, added=d, alpha=2.0, beta=-3.0), -d)
    torch.testing.assert_close(
        symmetric_product(d, d @ d, diagonal=5.0), d @ d @ d + 5 * torch.eye(5, dtype=torch.float64)
    )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(2, 300, 72), (1, 128, 4096), (3, 40, 200), *slow(((1, 1024, 1000),)), (1, 5, 7)])
def test_16_bits(shape: tuple[int, int, int], dtype: torch.dtype, device: str) -> None:
    """Rounded once, to half a unit; sums of products to float32, each relative to the sum of their sizes."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=generator).to(dtype)
    d = torch.randn(shape[0], shape[1], shape[1], generator=generator)
    d = (d + d.mT).to(dtype)
    numbers = {"alpha": 1.5, "beta": -2.5, "diagonal": 3.0}
    for factor, added in ((None, None), (None, d), (x / 2, d)):
        wide, more = (None if t is None else t.double() for t in (added, factor))
        truth = symmetric_product(x.double(), more, added=wide, **numbers)
        magnitudes = [None if t is None else t.abs() for t in (wide, more)]
        sizes = symmetric_product(
            x.double().abs(), magnitudes[1], added=magnitudes[0], **{k: abs(n) for k, n in numbers.items()}
        )
        for _ in range(2):  # a kernel is compiled, made known, and launched by that
            there = [None if t is None else t.to(device) for t in (factor, added)]
            ours = symmetric_product(x.to(device), there[0], added=there[1], **numbers).cpu()
            # The definition rounds the product by itself, and the diagonal; it takes rows that TMA cannot read.
            roundings = 1 if device == "cuda" and shape[2] % 8 == 0 else 3
            unit = torch.finfo(dtype).eps / 2
            assert ((ours.double() - truth).abs() <= sizes * (roundings * unit + (shape[2] + 4) * 2**-24)).all()


@pytest.mark.parametrize("adds", [False, True])
def test_code_for_sm_90_multiplies_by_warp_groups(adds: bool, tmp_path: Path) -> None:
    x = torch.zeros(1, 1024, 4096, dtype=torch.bfloat16)
    with compiling() as compiled:
        launch_symmetric_product(
            x, x, torch.zeros(1, 1024, 1024, dtype=torch.bfloat16) if adds else None, 1.0, 0.5, 2.0
        )
    check_resources(compiled, tmp_path)
    ptx = compiled["_symmetric_product"].asm["ptx"]
    assert "wgmma.mma_async" in ptx
    assert "cp.async.bulk.tensor" in ptx
