"""Products of float8 with scales by block: the definition, the layout of scales, and on a GPU one against the other."""

import math
from typing import cast

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.support.numbers import normal
from tests.support.sqnr import sqnr
from titanlite.device import CPU, Device, device_of
from titanlite.kernels.block_scaled_matmul import (
    as_cublas_has_it,
    block_scaled_matmul,
    block_scaling_unsupported_reason,
    dequantise,
)

PAIRS = [((1, 128), (128, 128)), ((128, 128), (1, 128)), ((1, 128), (1, 128))]
SHAPES = [(256, 384, 128), (128, 128, 256), (256, 512, 256), (384, 1152, 640)]  # R, C, S; of blocks along C, 4 or not


def operand(R: int, C: int, blocks: tuple[int, int], seed: int, device: str = "cpu") -> tuple[Tensor, Tensor]:
    """Random bytes, and units of very different sizes."""
    qdata = normal(R, C, seed=seed, dtype=torch.float8_e4m3fn, device=device)
    return qdata, torch.exp(2 * normal(R // blocks[0], C // blocks[1], seed=seed + 2)).to(device)


def numbers(qdata: Tensor, scale_inv: Tensor, blocks: tuple[int, int]) -> Tensor:
    """What they stand for, in float64, written another way than the definition."""
    return qdata.double() * scale_inv.double().repeat_interleave(blocks[0], 0).repeat_interleave(blocks[1], 1)


@pytest.mark.parametrize(("R", "C", "S"), SHAPES)
@pytest.mark.parametrize(("left_of", "right_of"), PAIRS)
def test_definition(left_of, right_of, R: int, C: int, S: int) -> None:
    left, right = operand(R, C, left_of, 0), operand(S, C, right_of, 1)
    truth = numbers(*left, left_of) @ numbers(*right, right_of).t()
    # Of float32's 24 bits, a sum of C products loses at most log2(C) more than a rounding's half: 11 bits of 24.
    assert sqnr(block_scaled_matmul(*left, *right, torch.float32), truth) > 20 * math.log10(2) * 13
    assert torch.equal(dequantise(*left).double(), numbers(*left, left_of).float().double())
    rounded = block_scaled_matmul(*left, *right, torch.bfloat16)
    assert torch.equal(rounded, block_scaled_matmul(*left, *right, torch.float32).bfloat16())


@pytest.mark.parametrize(("R", "C", "S"), SHAPES)
@pytest.mark.parametrize(("left_of", "right_of"), PAIRS)
@pytest.mark.parametrize("transposed", [False, True])  # as maxima of a transposed matrix come
def test_scales_are_laid_out_as_torch_wants_them(transposed: bool, left_of, right_of, R: int, C: int, S: int) -> None:
    """torch checks sizes and strides of fake tensors as cuBLASLt's caller would those of real ones."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    left, right = operand(R, C, left_of, 0, device), operand(S, C, right_of, 1, device)
    if transposed:
        left, right = ((qdata, scale_inv.t().contiguous().t()) for qdata, scale_inv in (left, right))
    given = [as_cublas_has_it(*left), as_cublas_has_it(*right)]

    right_t = right[0].t()

    def shape_of_result(scales: list[Tensor]) -> torch.Size:
        with FakeTensorMode() as mode:
            a, b, *scale_invs = [cast("Tensor", mode.from_tensor(t)) for t in (left[0], right_t, *scales)]
            kinds = [kind.value for _, kind in given]
            how = ([scale_invs[0]], kinds[:1], [], [scale_invs[1]], kinds[1:], [])
            out = torch._scaled_mm_v2(a, b, *how, None, torch.bfloat16)
            return out.shape

    assert shape_of_result([scale for scale, _ in given]) == (R, S)
    # Of fake tensors on CPUs, torch 2.12 and 2.13 alone look at the scales.
    if R > 128 and (device == "cuda" or (2, 12) <= torch.__version__ < (2, 14)):
        with pytest.raises(RuntimeError, match="blockwise scaling"):
            shape_of_result([scale.contiguous() for scale, _ in given])
    for (laid_out, _), (qdata, scale_inv) in zip(given, (left, right), strict=True):
        got = laid_out if scale_inv.shape[0] == qdata.shape[0] else laid_out.t()[:, : scale_inv.shape[1]]
        assert torch.equal(got, scale_inv)


@pytest.mark.parametrize(
    ("capability", "cuda", "why"),
    [
        (None, "12.9", "the device is no GPU"),
        ((10, 0), "12.9", "this GPU has 10.0"),
        ((9, 0), "12.8", "built with 12.8"),
        ((9, 0), "13.0", None),
    ],
)
def test_which_gpus_have_it(capability, cuda, why, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", cuda)
    said = block_scaling_unsupported_reason(Device(CPU.of_tensors, "", capability))
    assert said is None if why is None else why in str(said)


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(("R", "C", "S"), [*SHAPES, (4096, 14336, 4096)])
@pytest.mark.parametrize(("left_of", "right_of"), PAIRS)
def test_tensor_cores_against_the_definition(left_of, right_of, R: int, C: int, S: int, compiled: bool) -> None:
    if why := block_scaling_unsupported_reason(device_of(torch.device("cuda"))):
        pytest.skip(why)
    left, right = operand(R, C, left_of, 0, "cuda"), operand(S, C, right_of, 1, "cuda")
    truth = numbers(*left, left_of) @ numbers(*right, right_of).t()
    torch.compiler.reset()  # an operator is compiled inside a function of torch's, and torch counts all of that one's
    function = torch.compile(block_scaled_matmul, fullgraph=True) if compiled else block_scaled_matmul
    # Within 128 products tensor cores keep 13 bits of mantissa: 78 dB as simulated. A rounding to bfloat16 is 55 dB.
    # A layout that is off by one block would be at 0 dB.
    assert sqnr(function(*left, *right, torch.float32), truth) > 60
    assert sqnr(function(*left, *right, torch.bfloat16), truth) > 50
