"""Matrices that are multiplied and converted: the definition; the device code, compiled.

Each number is computed alike everywhere, so bit for bit.
"""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.support.compile_only import accesses, check_resources, compiling
from tests.support.needs import DEVICES
from titanlite.kernels.device.scaled_copy import launch_scaled_copy
from titanlite.kernels.scaled_copy import scaled_copy

SHAPES = [(1, 70, 530), (3, 530, 70), (3, 64, 256), (2, 1, 7), (1, 7, 1)]
TRANSPOSED = [(False, False), (False, True), (True, False), (True, True)]
BF16, F16 = torch.bfloat16, torch.float16
BACK = BF16
UNIT, EPS = 2.0**12, 1e-7


class Slice:
    """Matrices within flat memory, behind and before others."""

    def __init__(self, shape: tuple[int, int, int], dtype: torch.dtype, device: str, first: int, transposed: bool):
        b, r, c = shape
        self.inside = slice(first, first + b * r * c)
        self.flat = torch.randn(first + b * r * c + 100, generator=torch.Generator().manual_seed(0)).to(device, dtype)
        self.before = self.flat.clone()
        memory = self.flat[self.inside]
        self.matrices = memory.view(b, c, r).mT if transposed else memory.view(shape)

    def others_are_untouched(self) -> bool:
        self.before[self.inside] = self.flat[self.inside]
        return torch.equal(self.before, self.flat)


def norms(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True, dtype=torch.float32)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("transposed", TRANSPOSED)
@pytest.mark.parametrize("shape", SHAPES)
def test_there_and_back(shape: tuple[int, int, int], transposed: tuple[bool, bool], device: str) -> None:
    for first in (0, 16, 16, 3):  # a kernel is compiled, made known, and launched by that; memory is aligned or not
        x = Slice(shape, BF16, device, first, transposed[0])
        x.matrices[-1] *= 1e-3
        norm = norms(x.matrices)
        out, wanted = Slice(shape, F16, device, first, transposed[1]), x.matrices.float() * (UNIT / norm)
        assert scaled_copy(x.matrices, out.matrices, UNIT, norm, EPS) is out.matrices
        assert torch.equal(out.matrices, wanted.half())
        back = Slice(shape, BACK, device, first, transposed[0])
        scaled_copy(out.matrices, back.matrices, 1 / UNIT)
        assert torch.equal(back.matrices, (out.matrices.float() / UNIT).to(BACK))
        assert out.others_are_untouched()
        assert back.others_are_untouched()


@pytest.mark.parametrize("device", DEVICES)
def test_in_place(device: str) -> None:
    for first in (0, 16):
        x = Slice((3, 70, 530), F16, device, first, False)
        wanted = (x.matrices.float() * 0.3).half()
        assert torch.equal(scaled_copy(x.matrices, x.matrices, 0.3), wanted)
        assert x.others_are_untouched()


@pytest.mark.parametrize("device", DEVICES)
def test_norms_of_zero_and_of_what_is_no_number(device: str) -> None:
    x = torch.ones(4, 3, 5, device=device, dtype=BF16) * torch.tensor([0, 1, 2, 4], device=device)[:, None, None]
    norm = torch.tensor([0, 0.25, torch.nan, torch.inf], device=device)[:, None, None]
    out = scaled_copy(x.to(BF16), x.new_empty(x.shape, dtype=F16), 2.0, norm, 0.5)
    wanted = torch.tensor([0, 4, torch.nan, 0], device=device)[:, None, None].expand(x.shape)
    assert torch.equal(out.float().nan_to_num(7), wanted.nan_to_num(7))


@pytest.mark.parametrize("device", DEVICES)
def test_small_numbers_keep_their_bits(device: str) -> None:
    """float16 has few for what is below 6e-5; bfloat16 has as many as for all others."""
    x = torch.linspace(2**-14, 0.25, 4096, device=device).half().view(1, 64, 64)
    assert torch.equal(scaled_copy(x, torch.empty_like(x, dtype=BF16), 1 / UNIT), (x.double() / UNIT).bfloat16())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_wide_numbers_stay_wide(dtype: torch.dtype) -> None:
    x = torch.randn(2, 3, 5, dtype=dtype)
    norm = torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True)
    assert torch.equal(scaled_copy(x.mT, torch.empty_like(x.mT), UNIT, norm, EPS), (x * (UNIT / norm)).mT)


@pytest.mark.gpu
@pytest.mark.parametrize("transposed", [False, True])
def test_more_elements_than_int32_has(transposed: bool) -> None:
    x = torch.zeros(2, 40_000, 60_000, device="cuda", dtype=BF16)
    x[:, -70:] = torch.randn(2, 70, 60_000, device="cuda").bfloat16()
    out = torch.empty(2, 60_000, 40_000, device="cuda", dtype=F16).mT if transposed else torch.empty_like(x, dtype=F16)
    scaled_copy(x, out, 0.5)
    assert torch.equal(out[:, -70:], (x[:, -70:] / 2).half())
    assert not out[:, :-70].any()


@pytest.mark.parametrize("transposed", TRANSPOSED)
@pytest.mark.parametrize("back", [False, True])
def test_code_for_sm_90_moves_16_bytes_at_once(back: bool, transposed: tuple[bool, bool], tmp_path: Path) -> None:
    dtypes = (F16, BF16) if back else (BF16, F16)
    x, out = (
        torch.zeros(2, 256, 1024, dtype=dtype).mT if turned else torch.zeros(2, 1024, 256, dtype=dtype)
        for dtype, turned in zip(dtypes, transposed, strict=True)
    )
    with compiling() as compiled:
        launch_scaled_copy(x, out, UNIT, None if back else torch.ones(2, 1, 1), EPS)
    check_resources(compiled, tmp_path)
    found = accesses(compiled["_scaled_copy"])
    assert found == {("ld", 4): 4, ("st", 4): 4} | ({} if back else {("ld", 1): 1})  # the norm
