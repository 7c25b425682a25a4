"""Casts that turn a matrix: torchao's bits, wherever they run."""

import re
import subprocess
import sys

import pytest
import torch
from torch import Tensor

from tests.support.needs import DEVICES
from tests.support.numbers import normal
from titanlite.float8.cast import cast
from titanlite.kernels import float8_scales
from titanlite.kernels.block_scaled_matmul import dequantise
from titanlite.kernels.float8_cast import cast_blocks, cast_into, cast_rows, cast_transpose, transpose

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
SHAPES = [(256, 128), (130, 67), (1, 48), (2500, 1)]


def outliers(M: int, K: int, dtype: torch.dtype, device: str) -> Tensor:
    """Normal numbers, some rows and columns of which are large, and a column of zeros."""
    x = normal(M, K, seed=M + K)
    x[:, :: max(1, K // 3)] *= 100
    x[:: max(1, M // 3)] *= 1e-3
    x[:, -1] = 0
    return x.to(device, dtype)


def torchaos(x: Tensor, by_column: bool, dtype: torch.dtype, pow2: bool) -> tuple[Tensor, Tensor]:
    from torchao.float8.config import ScalingGranularity
    from torchao.float8.float8_utils import tensor_to_scale, to_fp8_saturated

    of = ScalingGranularity.AXISWISE if by_column else ScalingGranularity.TENSORWISE
    options = {"scaling_granularity": of, "axiswise_dim": 0 if by_column else None}
    scale = tensor_to_scale(x, dtype, round_scales_to_power_of_2=pow2, **options)
    return to_fp8_saturated(x * scale, dtype).t(), scale.reciprocal().t() if by_column else scale.reciprocal()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("source", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("dtype", "by_column", "pow2"), [(E4M3, True, True), (E4M3, False, False), (E5M2, False, False)]
)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bits_are_torchaos(shape, dtype, by_column, pow2, source, device):
    x = outliers(*shape, source, device)
    factors = torch.exp2(torch.arange(shape[0], device=device) % 5 - 2.0)[:, None]
    for view in (x, outliers(*shape[::-1], source, device).t()):
        qdata, scale = cast_transpose(view, factors, by_column, dtype, pow2)
        wanted, wanted_scale = torchaos(view.float() * factors, by_column, dtype, pow2)
        assert qdata.is_contiguous()
        assert qdata.dtype == dtype
        assert torch.equal(qdata.view(torch.uint8), wanted.contiguous().view(torch.uint8))
        assert torch.equal(scale, wanted_scale)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_casts_into_memory_have_the_bits_of_casts_to_new_tensors(shape, dtype, device):
    x, half = outliers(*shape, torch.float32, device), torch.full((), 0.5, device=device)
    by_row, scale_inv = cast_rows(x, dtype)
    by_half = float8_scales.cast_to(x, half, dtype)
    for scale, wanted, wanted_scale in ((None, by_row, scale_inv), (half, by_half, scale_inv[:0])):
        out = torch.zeros(x.numel(), device=device).to(dtype)
        assert cast_into(x, scale, out).equal(wanted_scale)
        assert out.view(torch.uint8).equal(wanted.view(torch.uint8).flatten())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_what_a_known_scale_makes_too_large_becomes_the_largest(dtype, device):
    most = torch.finfo(dtype).max
    x = torch.tensor([[1e6, torch.inf, 1.04 * most, 0.6 * most, torch.nan, 1.0] * 8], device=device)
    for given in (x, -x, x.bfloat16()):
        out = torch.zeros(given.shape, device=device).to(dtype)
        cast_into(given, torch.ones((), device=device), out)
        qdata = out.float()
        wanted = given.float().clamp(-most, most).to(dtype).float()
        assert torch.equal(qdata.nan_to_num(0), wanted.nan_to_num(0))
        assert torch.equal(qdata.isnan(), given.isnan())


@pytest.mark.parametrize("dtype", ["fp8e4nv", "fp8e5"])
def test_a_gpus_conversion_saturates(dtype):
    """What the device code leaves to the conversion is in the PTX, compiled without a GPU."""
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from titanlite.kernels.device.block_cast import _cast_blocks
    from titanlite.kernels.device.float8_cast import _cast_rows

    qdata = f"*{dtype}"
    by_row = ["*bf16", "*fp32", qdata, "*fp32", "i32", "fp32"], {"KNOWN": True, "BK": 256}
    both_ways = {"ROWS": 1, "ROWS_TRANSPOSED": 1, "POW2": False, "BLOCK": 32}
    by_block = ["*bf16", qdata, "*fp32", qdata, "*fp32", "i32", "i32", "i32", "fp32"], both_ways
    for kernel, (types, constants) in ((_cast_rows, by_row), (_cast_blocks, by_block)):
        types = dict(zip(kernel.arg_names, [*types, *["constexpr"] * len(constants)], strict=True))
        ptx = triton.compile(ASTSource(kernel, types, constants), target=GPUTarget("cuda", 90, 32)).asm["ptx"]
        conversions = re.findall(r"cvt\.\S*e[45]m[32]x2\.f32", ptx)
        assert conversions
        assert all(".satfinite." in conversion for conversion in conversions)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("by_column", [True, False])
def test_not_a_number_stays_one(by_column, device):
    x = torch.ones(300, 130, device=device)
    x[7, 5] = torch.nan
    qdata, scale = cast_transpose(x, torch.ones(300, 1, device=device), by_column, E4M3, False)
    assert scale.isnan().sum() == 1
    assert qdata.float().isnan().sum() == (300 if by_column else qdata.numel())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_turned_bytes(shape, device):
    x = torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0)).to(device)
    for dtype in (E4M3, E5M2):
        transposed = transpose(x.view(dtype))
        assert transposed.is_contiguous()
        assert transposed.dtype == dtype
        assert torch.equal(transposed.view(torch.uint8), x.t())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("source", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("pow2", [False, True])
@pytest.mark.parametrize(("rows", "rows_transposed"), [(1, 1), (128, 0), (0, 128), (1, 128), (128, 1)])
def test_bits_of_blocks_are_the_definitions(rows, rows_transposed, pow2, source, device):
    of, rounding = {1: "1x128", 128: "128x128"}, "pow2_floor" if pow2 else "exact"
    for x in (outliers(384, 256, source, device), outliers(128, 1024, source, device)[:, 128:512]):
        *straight, qdata, scale_invs = cast_blocks(x, rows, rows_transposed, E4M3, pow2)
        for view, height, got in ((x, rows, straight), (x.t(), rows_transposed, (qdata, scale_invs))):
            if height == 0:
                assert not any(t.numel() for t in got)
                continue
            wanted = cast(view, of[height], "e4m3", rounding)
            assert got[0].is_contiguous()
            assert torch.equal(got[0].view(torch.uint8), wanted.qdata.contiguous().view(torch.uint8))
            assert torch.equal(got[1], wanted.scale_inv)
            assert (got[1].t() if height == 1 else got[1]).is_contiguous()


def maxima(device: str) -> Tensor:
    """Each of 2²³ mantissas with some exponent; and those where there is something to be careful about."""
    rng = torch.Generator(device).manual_seed(0)
    exponents = torch.randint(80, 255, (2**23,), generator=rng, device=device, dtype=torch.int32)  # from 2⁻⁴⁷ on
    qdata = torch.arange(2**23, device=device, dtype=torch.int32) | exponents << 23
    least = torch.tensor(float8_scales.EPS).view(torch.int32).item()
    edges = [0, 1, least - 1, least, least + 1, 0x7F7FFFFF, 0x7F800000, 0x7FC00000, 0x7FFFFFFF]
    tops = [(e << 23) + m for e in range(255) for m in (0, 0x600000, 0x600001, 0x7FFFFF)]
    whole = torch.cat([qdata, torch.tensor([*edges, *tops], device=device, dtype=torch.int32)])
    return whole.view(torch.float32)


@pytest.mark.gpu
@pytest.mark.parametrize("pow2", [False, True])
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_a_gpus_scales_of_every_mantissa_are_the_definitions(dtype, pow2):
    """Device code divides by approximations, which it corrects; graphs are compiled to code of other kinds."""
    from tests.support.scale_probe import scales

    amax = maxima("cuda")
    wanted = float8_scales.scale_of(amax, dtype, pow2)
    compiled = torch.compile(float8_scales.scale_of, fullgraph=True) if pow2 else float8_scales.scale_of
    for got in (scales(amax, torch.finfo(dtype).max, pow2), compiled(amax, dtype, pow2)):
        for ours, theirs in zip(got, wanted, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rows", [1, 128])
def test_what_is_not_a_number_stays_in_its_block(rows, device):
    x = torch.ones(256, 256, device=device)
    x[7, 5], x[200, 130] = torch.nan, torch.inf
    for qdata, scale_invs in zip(*[iter(cast_blocks(x, rows, rows, E4M3, False))] * 2, strict=True):
        assert dequantise(qdata, scale_invs).isnan().sum() == 2 * 128 * rows


def test_it_may_be_imported_where_tensors_are_on_the_meta_device() -> None:
    """As a model's file is, by whoever builds it there."""
    code = "import torch\nwith torch.device('meta'):\n    import titanlite.kernels.float8_cast"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_scale_of_zeros_is_finite() -> None:
    assert all(t.isfinite() for t in float8_scales.scale_of(torch.zeros(()), E4M3, False))
