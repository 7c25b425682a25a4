"""The definition of float8 casts and products: torchao's bits where torchao has them, else the formats' own rules."""

import dataclasses
import math

import pytest
import torch
from torch import Tensor

from titanlite import recipes
from titanlite.config.recipe_schema import BLOCKS, Float8Recipe, Granularity
from titanlite.float8.cast import DTYPES, cast
from titanlite.float8.emulated import EmulatedFloat8, dequantise
from titanlite.float8.matmul import torchao_config

OF_TORCHAO = ["tensorwise", "rowwise", "rowwise_with_gw_hp"]  # the names that torchao has


def ordinary(rows: int, columns: int) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(0))


def outliers(rows: int, columns: int) -> Tensor:
    x = ordinary(rows, columns)
    x[:, 3] *= 1000
    x[5] *= 1e-3
    return x


def zeros(rows: int, columns: int) -> Tensor:
    x = ordinary(rows, columns)
    x[:, :32], x[7] = 0, 0
    return x


def all_zeros(rows: int, columns: int) -> Tensor:
    return torch.zeros(rows, columns)


def tiny(rows: int, columns: int) -> Tensor:
    """Around and below what scales are made of, down to subnormal numbers."""
    return ordinary(rows, columns) * torch.logspace(-42, -10, rows)[:, None]


def with_nan(rows: int, columns: int) -> Tensor:
    x = ordinary(rows, columns)
    x[2, 5] = math.nan
    return x


def with_inf(rows: int, columns: int) -> Tensor:
    x = ordinary(rows, columns)
    x[2, 5], x[9, 1] = math.inf, -math.inf
    return x


def powers_of_two(rows: int, columns: int) -> Tensor:
    """Maxima of exactly the largest number times a power of two, and the numbers next to them."""
    edges = [448.0, 57344.0, 1.0, math.nextafter(1.0, 2), 480.0, 464.0]
    x = torch.tensor(edges).repeat(rows * columns // len(edges) + 1)[: rows * columns].view(rows, columns)
    return x * torch.exp2(torch.arange(rows) % 20 - 10.0)[:, None]


DATA = (ordinary, outliers, zeros, all_zeros, tiny, with_nan, with_inf, powers_of_two)


def assert_same_bits(ours: Tensor, theirs: Tensor) -> None:
    """NaN has many bits, and is NaN."""
    assert ours.dtype == theirs.dtype
    assert ours.shape == theirs.shape
    nan = ours.float().isnan()
    assert torch.equal(nan, theirs.float().isnan())
    numbers = [torch.where(nan, 0, t.float()).to(t.dtype).contiguous() for t in (ours, theirs)]
    assert torch.equal(*(t.view(-1).view(torch.uint8) for t in numbers))


@pytest.mark.parametrize("data", DATA)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", ["e4m3", "e5m2"])
@pytest.mark.parametrize("rounding", ["exact", "pow2_floor"])
@pytest.mark.parametrize("of", ["tensor", "row"])
def test_casts_and_scales_are_torchaos(of: Granularity, rounding, dtype, transposed, data) -> None:
    from torchao.float8.config import ScalingGranularity
    from torchao.float8.float8_utils import tensor_to_scale, to_fp8_saturated

    by_row = {"scaling_granularity": ScalingGranularity.AXISWISE, "axiswise_dim": -1} if of == "row" else {}
    for precision in (torch.bfloat16, torch.float32):
        x = data(64, 128).to(precision)
        x = x.t() if transposed else x
        pow2 = rounding == "pow2_floor"
        scale = tensor_to_scale(x, DTYPES[dtype], round_scales_to_power_of_2=pow2, **by_row)
        ours, theirs = cast(x, of, dtype, rounding), to_fp8_saturated(x.float() * scale, DTYPES[dtype])
        if pow2:  # of infinity torchao's scale is zero, and its products are NaN; here that is in the bytes already
            scale = torch.where(scale == 0, torch.nan, scale)
            theirs = torch.where(scale.isnan(), torch.nan, theirs.float()).to(theirs.dtype)
        assert_same_bits(ours.scale_inv, scale.reciprocal())
        assert_same_bits(ours.qdata, theirs)
        assert ours.qdata.stride() == x.stride()


@pytest.mark.parametrize("data", DATA)
@pytest.mark.parametrize("name", OF_TORCHAO)
def test_results_are_those_of_torchaos_emulation(name: str, data, monkeypatch: pytest.MonkeyPatch) -> None:
    from torchao.float8.float8_ops import FLOAT8_OPS_TABLE

    if recipes.load("float8", name).scale_rounding == "exact":  # the inverse of another power of two is exact
        monkeypatch.setitem(FLOAT8_OPS_TABLE, torch.ops.aten.mm.default, by_reciprocals)
    for precision in (torch.bfloat16, torch.float32):
        results = []
        for matmul in (EmulatedFloat8(recipes.load("float8", name)), emulated_by_torchao(name)):
            x, w = (data(*shape).to(precision).requires_grad_() for shape in ((64, 96), (48, 96)))
            y = matmul(x, w)
            y.backward(data(64, 48).to(precision))
            results.append((y.detach(), x.grad, w.grad))
        for ours, theirs in zip(*results, strict=True):
            assert_same_bits(ours, theirs)


def by_reciprocals(op, args, kwargs=None) -> Tensor:
    """torchao's emulated product, of what its tensor cores get: bytes times their scale's inverse."""
    left, right = (t._data.float() * t._scale.reciprocal() for t in args)
    return torch.mm(left, right).to(args[0]._orig_dtype)


def emulated_by_torchao(name: str):
    """torchao's own function, with its emulation switched on."""
    from torchao.float8.float8_linear import matmul_with_hp_or_float8_args
    from torchao.float8.float8_training_tensor import LinearMMConfig, ScaledMMConfig

    config = dataclasses.replace(torchao_config(recipes.load("float8", name)), emulate=True)
    products = LinearMMConfig(*(ScaledMMConfig(True, False, False, False) for _ in range(3)))
    return lambda x, w: matmul_with_hp_or_float8_args.apply(x, w.t(), products, config)


@pytest.mark.parametrize("data", [ordinary, outliers])
def test_blocks_of_128_are_torchaos(data) -> None:
    from torchao.prototype.blockwise_fp8_training import kernels

    x = data(256, 384)
    for of, reference in (
        ("1x128", kernels.torch_blockwise_scale_act_quant_lhs),
        ("128x128", kernels.torch_blockwise_scale_weight_quant),
    ):
        data8, scale_inv = reference(x)
        ours = cast(x, of, "e4m3", "exact")
        assert_same_bits(ours.qdata, data8)
        assert_same_bits(ours.scale_inv, scale_inv)


@pytest.mark.parametrize("data", [ordinary, outliers, zeros, tiny, powers_of_two])
@pytest.mark.parametrize("rounding", ["exact", "pow2_floor"])
@pytest.mark.parametrize("of", BLOCKS)
def test_each_block_is_a_tensor_of_its_own(of: Granularity, rounding, data) -> None:
    x, (rows, columns) = data(256, 256), BLOCKS[of]
    whole = cast(x, of, "e4m3", rounding)
    assert whole.scale_inv.shape == (256 // rows, 256 // columns)
    for i, j in [(0, 0), (1, 0), (0, 1), (256 // rows - 1, 256 // columns - 1)]:
        at = slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns)
        alone = cast(x[at], "tensor", "e4m3", rounding)
        assert_same_bits(whole.qdata[at], alone.qdata)
        assert whole.scale_inv[i, j] == alone.scale_inv
        assert_same_bits(dequantise(*whole)[at], dequantise(*alone))


@pytest.mark.parametrize("name", recipes.names("float8"))
def test_compiled_as_eager(name: str) -> None:
    matmul = EmulatedFloat8(recipes.load("float8", name))
    results = []
    for function in (matmul, torch.compile(lambda x, w: matmul(x, w), fullgraph=True, backend="aot_eager")):
        x, w = (outliers(*shape).bfloat16().requires_grad_() for shape in ((128, 256), (128, 256)))
        y = function(x, w)
        y.backward(ordinary(128, 128).bfloat16())
        results.append((y.detach(), x.grad, w.grad))
    for eager, compiled in zip(*results, strict=True):
        assert_same_bits(eager, compiled)


def test_gradients_that_nobody_asked_for_are_not_computed() -> None:
    recipe: Float8Recipe = recipes.load("float8", "rowwise")
    x, w = ordinary(32, 32).requires_grad_(), ordinary(32, 32)
    EmulatedFloat8(recipe)(x, w).sum().backward()
    assert x.grad is not None
    assert w.grad is None
